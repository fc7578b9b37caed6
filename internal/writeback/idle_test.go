package writeback

import "testing"

// Source: B 5.5.
func TestIdle(t *testing.T) {
	for volumes, updates := range map[int]int{1: 6, 2: 24, 3: 54} {
		var i Idle
		quiet := func(what string) {
			t.Helper()
			for n := 1; n < updates; n++ {
				if i.Tick(false, volumes) {
					t.Fatalf("%d volumes, %s: idle after %d updates, want %d", volumes, what, n, updates)
				}
			}
		}
		quiet("new")
		if i.Tick(true, volumes) {
			t.Errorf("%d volumes: idle at a request", volumes)
		}
		quiet("after a request")
		for range 2 {
			if !i.Tick(false, volumes) {
				t.Errorf("%d volumes: not idle after %d updates", volumes, updates)
			}
		}
		if !i.Tick(false, volumes+1) {
			t.Errorf("%d volumes: not idle any more because one was attached", volumes)
		}
		if i.Tick(true, volumes) {
			t.Errorf("%d volumes: idle after a request to an idle set", volumes)
		}
		quiet("after a request to an idle set")
	}
}
