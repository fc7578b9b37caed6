package volume

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/rt"
)

// A crossing is the ranges of a volume in a simulation, and in which order writes came to their turn.
type crossing struct {
	rt    *rt.Runtime
	mu    rt.Mutex
	r     ranges
	begun []string
	group rt.WaitGroup
}

func cross(t *testing.T, seed uint64, fn func(c *crossing)) {
	t.Helper()
	s := rt.NewSim(seed)
	s.Limit = time.Hour
	err := s.Run(func() {
		c := &crossing{rt: s.Runtime()}
		c.mu.Init(c.rt)
		c.r.ended.Init(&c.mu)
		c.group.Init(c.rt)
		fn(c)
		c.group.Wait()
		if len(c.r.writes)+len(c.r.waiting)+len(c.r.fills) > 0 {
			t.Errorf("seed %d: left: %d writes, %d that wait, %d fills", seed, len(c.r.writes), len(c.r.waiting), len(c.r.fills))
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// write makes a write that takes a second, and has come as far as it does without waiting.
func (c *crossing) write(name string, start, end uint64) {
	c.group.Go(name, func() {
		w := span{start, end}
		c.mu.Lock()
		c.r.beginWriteLocked(w)
		c.begun = append(c.begun, name)
		c.mu.Unlock()
		c.rt.Sleep(time.Second)
		c.mu.Lock()
		c.r.endWriteLocked(w)
		c.mu.Unlock()
	})
	c.rt.Sleep(time.Millisecond)
}

// Writes that overlap begin in the order in which they came, and nobody waits for one that does not concern it.
func TestOverlappingWritesInOrder(t *testing.T) {
	type write struct {
		name       string
		start, end uint64
	}
	for name, c := range map[string]struct {
		writes []write
		want   []string
	}{
		"apart": {[]write{{"a", 0, 8}, {"b", 8, 16}, {"c", 100, 108}}, []string{"a", "b", "c"}},
		"same":  {[]write{{"a", 0, 8}, {"b", 0, 8}, {"c", 0, 8}, {"d", 0, 8}}, []string{"a", "b", "c", "d"}},
		"small ones behind a large one": {
			[]write{{"a", 0, 8}, {"large", 0, 64}, {"b", 8, 16}, {"c", 56, 64}, {"d", 64, 72}}, []string{"a", "d", "large", "b", "c"},
		},
		"chain": {[]write{{"a", 0, 8}, {"b", 4, 12}, {"c", 8, 16}, {"d", 12, 20}}, []string{"a", "b", "c", "d"}},
		"large one behind two": {
			[]write{{"a", 0, 8}, {"b", 32, 40}, {"large", 0, 64}, {"c", 0, 8}}, []string{"a", "b", "large", "c"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(20) {
				var order []string
				cross(t, seed, func(x *crossing) {
					for _, w := range c.writes {
						x.write(w.name, w.start, w.end)
					}
					x.group.Wait()
					order = x.begun
				})
				if name == "small ones behind a large one" { // b and c are apart
					slices.Sort(order[3:])
				}
				if !slices.Equal(order, c.want) {
					t.Fatalf("seed %d: %v, want %v", seed, order, c.want)
				}
			}
		})
	}
}

// A fill is not begun over a write or another fill, and a write that begins voids it.
func TestFillsAndWrites(t *testing.T) {
	cross(t, 1, func(c *crossing) {
		c.mu.Lock()
		defer c.mu.Unlock()
		begin := func(f *fill, want bool) {
			t.Helper()
			if got := c.r.beginFillLocked(f); got != want {
				t.Errorf("a fill of %v begins: %v, want %v", f.span, got, want)
			}
		}
		first, second := &fill{span: span{0, 8}}, &fill{span: span{8, 16}, void: true}
		begin(first, true)
		begin(second, true)
		begin(&fill{span: span{7, 9}}, false)
		c.r.beginWriteLocked(span{8, 24})
		if !first.WantedLocked() || second.WantedLocked() {
			t.Errorf("wanted: %v and %v, want the first alone", first.WantedLocked(), second.WantedLocked())
		}
		begin(&fill{span: span{23, 30}}, false)
		c.r.endWriteLocked(span{8, 24})
		c.r.endFillLocked(second)
		begin(second, true)
		if !second.WantedLocked() {
			t.Error("a fill that begins again is void")
		}
		c.r.endFillLocked(first)
		c.r.endFillLocked(second)
	})
}

func TestSpansOverlap(t *testing.T) {
	a := span{8, 16}
	for b, want := range map[span]bool{{0, 8}: false, {0, 9}: true, {8, 16}: true, {10, 12}: true, {15, 20}: true, {16, 20}: false} {
		if a.overlaps(b) != want || b.overlaps(a) != want {
			t.Error(fmt.Sprint(a, b), "overlap: want", want)
		}
	}
}
