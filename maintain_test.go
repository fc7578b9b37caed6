package ubcache

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/ubcache/ubcache/internal/sim"
)

// thinLoop is a loop over an index of many small extents, most of which a load discards and overwrites, while the index is
// walked, rewritten and coalesced all the time: leaves get empty, and the tree lower. A flash-only volume that the load
// does not use is deleted on the way, and with drops set a volume is detached.
func thinLoop(seed uint64, o opening, drops bool) sim.Loop {
	o.restless = true
	l := crashLoop(seed, o.mode)
	l.Workload = sim.Workload{
		Requests: 250, Blocks: 8, Large: 3000, Weights: sim.Weights{Read: 10, Write: 15, FUA: 4, Flush: 8, Discard: 25, Zeroes: 3},
	}
	prepare := l.Prepare
	l.Prepare = func(ctx context.Context, e *sim.Env) error {
		if err := prepare(ctx, e); err != nil {
			return err
		}
		return fillThinly(ctx, e, o.mode != "none")
	}
	l.Build, l.Reopen = o.open, o.open
	l.Between = func(ctx context.Context, _ *sim.Env, s *sim.System, n int) error {
		set := s.Own.(crashSet).set
		switch {
		case n == 20 && slices.ContainsFunc(set.FlashVolumes(), func(f FlashVolume) bool { return f.Label == "gone" }):
			return set.DeleteFlash(ctx, "gone")
		case n == 150 && drops:
			return set.Volume("volume0").Detach(ctx)
		}
		return nil
	}
	return l
}

// fillThinly writes every other block of a flash-only volume, and with all caches as many of the other volumes.
func fillThinly(ctx context.Context, e *sim.Env, all bool) error {
	s, err := opening{mode: "writethrough"}.open(ctx, e)
	if err != nil {
		return err
	}
	err = thin(ctx, s, all)
	return errors.Join(err, s.Close(ctx))
}

func thin(ctx context.Context, s *sim.System, all bool) error {
	set := s.Own.(crashSet).set
	if _, err := set.CreateFlash(ctx, "gone", 1<<20); err != nil {
		return err
	}
	gone, err := set.OpenVolume(ctx, VolumeOptions{Name: "gone", Flash: "gone"})
	if err != nil {
		return err
	}
	buf := make([]byte, 512)
	for i := range int64(1000) {
		if err := gone.WriteAt(ctx, buf, i*1024, 0); err != nil {
			return err
		}
		for _, t := range s.Targets {
			if !all {
				break
			}
			off := (t.Size()*3/5 + i*1024%(t.Size()*2/5)) &^ 511
			if err := t.ReadAt(ctx, buf, off); err != nil {
				return err
			}
		}
	}
	return set.CloseVolume(ctx, "gone")
}

var thinCases = []struct {
	name  string
	o     opening
	drops bool
}{
	{"writethrough", opening{mode: "writethrough"}, false},
	{"writeback", opening{mode: "writeback", drain: fastDrain}, false},
	{"detach", opening{mode: "writeback"}, true},
	{"flash alone", opening{mode: "none"}, false}, // when that is deleted there is next to nothing left
}

// TestPowerCutsWhileCoalescing cuts the power while the index gets smaller.
func TestPowerCutsWhileCoalescing(t *testing.T) {
	for _, c := range thinCases {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := thinLoop(seed, c.o, c.drops)
				l.Step = crashStep(200)
				l.Run(t)
			}
		})
	}
}

// TestLivesInARowWhileCoalescing lets a set die several times, each time while it recovers or soon after, by a power cut
// or alone.
func TestLivesInARowWhileCoalescing(t *testing.T) {
	for _, c := range thinCases[len(thinCases)-2:] {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := thinLoop(seed, c.o, c.drops)
				l.Lives, l.Step = 3, crashStep(500)
				l.Run(t)
				l.Kill = true
				l.Run(t)
			}
		})
	}
}

// TestIndexShrinksUnderLoad runs such loads to their end. They do coalesce, and the tree does get lower.
func TestIndexShrinksUnderLoad(t *testing.T) {
	for _, c := range thinCases {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(3) {
				l := thinLoop(seed, c.o, c.drops)
				between := l.Between
				var most SetStats
				l.Between = func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
					if n == 240 {
						most = s.Own.(crashSet).set.Stats()
						if most.NodesCoalesced < 4 || most.Sweeps < 3 || c.o.mode == "none" && most.TreesLowered == 0 {
							return fmt.Errorf("%d nodes coalesced in %d sweeps, tree lowered %d times", most.NodesCoalesced, most.Sweeps, most.TreesLowered)
						}
					}
					return between(ctx, e, s, n)
				}
				l.Most = -1
				l.Run(t)
				t.Logf("%d nodes coalesced, %d rewritten, %d sweeps, tree lowered %d times", most.NodesCoalesced, most.NodesStale, most.Sweeps, most.TreesLowered)
			}
		})
	}
}

// TestFullCacheWithoutRest is a cache that is nearly full of dirty data, its journal the smallest there is, while the index
// is rewritten all the time: that takes no bucket that others wait for, and nobody waits for ever.
func TestFullCacheWithoutRest(t *testing.T) {
	for _, seed := range sim.Seeds(2) {
		l := inWriteback(dirtyLoop(seed, "writeback", 300), opening{drain: fastDrain, restless: true})
		l.Step = crashStep(400)
		l.Run(t)
		l = withCrowd(writebackLoop(seed, opening{restless: true}), 2560<<10)
		l.Workload.Weights = sim.Weights{Read: 10, Write: 40, FUA: 5, Flush: 2, Zeroes: 1}
		l.Between = fillsUp(writeBackEach(120))
		l.Most = -1
		l.Run(t)
	}
}
