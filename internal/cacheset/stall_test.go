package cacheset

import (
	"sync"
	"testing"
	"time"
)

// Waits up to StallLeast do not count, longer ones do, each for those who had it.
func TestStallTotals(t *testing.T) {
	s := &Set{}
	for _, d := range []time.Duration{0, time.Microsecond, StallLeast} {
		s.Stalled(StallSplit, d)
		s.StalledEach(StallSplit, d, 9)
	}
	s.StalledEach(StallSplit, time.Hour, 0)
	s.StalledTotals(StallSplit, StallTotals{})
	if n := s.Stalls(); n != [StallCauses]StallTotals{} {
		t.Errorf("short waits count: %v", n)
	}
	s.Stalled(StallGate, StallLeast+1)
	s.StalledEach(StallOverlap, time.Second, 3)
	s.Stalled(StallOverlap, time.Minute)
	var sum StallTotals
	sum.Add(time.Millisecond)
	sum.Add(StallLeast)
	sum.Add(3 * time.Millisecond)
	sum.Add(time.Millisecond)
	s.StalledTotals(StallCache, sum)
	want := [StallCauses]StallTotals{
		StallGate:    {1, StallLeast + 1, StallLeast + 1},
		StallOverlap: {4, 63 * time.Second, time.Minute},
		StallCache:   {3, 5 * time.Millisecond, 3 * time.Millisecond},
	}
	if n := s.Stalls(); n != want {
		t.Errorf("is %v\nwant %v", n, want)
	}
}

// Every cause has a name, and no two have the same.
func TestStallNames(t *testing.T) {
	seen := map[string]Stall{}
	for c := range StallCauses {
		if before, ok := seen[c.String()]; ok || c.String() == "" {
			t.Errorf("cause %d is %q, as is %d", c, c, before)
		}
		seen[c.String()] = c
	}
}

// Many count at once, and nothing is lost.
func TestStallsAtOnce(t *testing.T) {
	s := &Set{}
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for n := range 1000 {
				s.Stalled(StallNode, StallLeast+time.Duration(i*1000+n+1))
			}
		})
	}
	group.Wait()
	const all = 8000
	if n, want := s.Stalls()[StallNode], (StallTotals{all, all*StallLeast + all*(all+1)/2, StallLeast + all}); n != want {
		t.Errorf("is %v, want %v", n, want)
	}
}
