package ubcache

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/sim"
	"github.com/ubcache/ubcache/internal/volume"
	"github.com/ubcache/ubcache/internal/writeback"
)

// fastDrain has dirty data written back as soon as there is some.
func fastDrain(v *volume.Volume) error {
	err := v.ChangeWriteback(func(s *writeback.Settings) error {
		s.Percent, s.Delay = 0, time.Millisecond
		return nil
	})
	return errors.Join(err, v.SetWritebackRate(writeback.MaxRate))
}

// writebackLoop is a loop over volumes in writeback mode, with a flash-only volume beside.
func writebackLoop(seed uint64, o opening) sim.Loop {
	return inWriteback(crashLoop(seed, "writeback"), o)
}

// inWriteback has a loop open its volumes in writeback mode, and a flash-only volume beside.
func inWriteback(l sim.Loop, o opening) sim.Loop {
	if o.order == "kernel" {
		for i := range l.Volumes {
			l.Volumes[i].Loose = true
		}
	}
	o.mode, o.flash = "writeback", true
	l = withFlash(l, 512<<10)
	l.Build, l.Reopen = o.open, o.open
	return l
}

// writeBackEach has the client of each so many-th request wait until a volume is written back.
func writeBackEach(requests int) func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
	return func(ctx context.Context, _ *sim.Env, s *sim.System, n int) error {
		if n%requests != requests-1 {
			return nil
		}
		return s.Own.(crashSet).set.Volume("volume" + strconv.Itoa(n/requests%2)).WriteBack(ctx)
	}
}

// A writebackCase is a way in which dirty data is made and written back.
type writebackCase struct {
	name string
	loop func(seed uint64) sim.Loop
}

var writebackCases = []writebackCase{
	{"fast", func(seed uint64) sim.Loop { return writebackLoop(seed, opening{drain: fastDrain}) }},
	{"usual rate", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{})
		l.Workload.Think = 50 * time.Millisecond // so that there are some seconds for it
		return l
	}},
	{"asked for", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{})
		l.Between = writeBackEach(12)
		return l
	}},
	{"kernel order", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{order: "kernel", drain: fastDrain})
		l.Between = writeBackEach(20)
		return l
	}},
	{"full", func(seed uint64) sim.Loop {
		return inWriteback(dirtyLoop(seed, "writeback", 300), opening{drain: fastDrain})
	}},
	{"up to the cut-off", func(seed uint64) sim.Loop {
		l := withCrowd(writebackLoop(seed, opening{}), 2560<<10)
		l.Workload.Weights = sim.Weights{Read: 10, Write: 40, FUA: 5, Flush: 2, Zeroes: 1}
		l.Between = fillsUp(writeBackEach(120))
		return l
	}},
	{"moving", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{restless: true})
		l.Workload.Weights = sim.Weights{Read: 20, Write: 40, FUA: 5, Flush: 3, Discard: 3, Zeroes: 3}
		l.Between = writeBackEach(60)
		return l
	}},
	{"failing", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{drain: fastDrain})
		l.Build = failing(l.Build)
		return l
	}},
	{"large blocks", func(seed uint64) sim.Loop {
		l := largeBlockLoop(seed)
		o := opening{mode: "writeback", drain: fastDrain}
		l.Build, l.Reopen = o.open, o.open
		l.Between = writeBackEach(30)
		return l
	}},
	{"changing", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{drain: fastDrain})
		l.Between = changeModes
		return l
	}},
	{"detaching", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{})
		l.Between = detachEach
		return l
	}},
}

// fillsUp sees that the cache takes as much dirty data as it may at some time.
func fillsUp(between func(ctx context.Context, e *sim.Env, s *sim.System, n int) error) func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
	most := uint(0)
	return func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
		if n == 0 {
			most = 0
		}
		most = max(most, uint(s.Own.(crashSet).set.Stats().InUse))
		if n == 290 && most < writeback.CutoffWritebackSync {
			return fmt.Errorf("no more than %d percent were in use", most)
		}
		return between(ctx, e, s, n)
	}
}

// inTurn returns the cases to try: in short tests the last, which has most.
func inTurn(cases []writebackCase) []writebackCase {
	if testing.Short() {
		return cases[len(cases)-1:]
	}
	return cases
}

// failing has one of ten reads and writes of writeback fail.
func failing(open func(ctx context.Context, e *sim.Env) (*sim.System, error)) func(ctx context.Context, e *sim.Env) (*sim.System, error) {
	return func(ctx context.Context, e *sim.Env) (*sim.System, error) {
		for i, dev := range e.Devices {
			f := blockdev.NewFaulty(dev, e.Seed+uint64(i))
			f.Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForWriteback}, Prob: 0.1})
			e.Devices[i] = f
		}
		return open(ctx, e)
	}
}

// changeModes changes the mode of a volume now and then.
func changeModes(ctx context.Context, _ *sim.Env, s *sim.System, n int) error {
	if n%20 != 10 {
		return nil
	}
	modes := []string{"writethrough", "writeback", "writearound", "writeback", "none", "writeback"}
	return s.Own.(crashSet).set.SetAttribute(ctx, "volume"+strconv.Itoa(n/20%2), "cache_mode", modes[n/40%len(modes)])
}

// detachEach detaches one volume, and later the other. The next life attaches them again.
func detachEach(ctx context.Context, _ *sim.Env, s *sim.System, n int) error {
	if n != 99 && n != 199 {
		return nil
	}
	return s.Own.(crashSet).set.Volume("volume" + strconv.Itoa(n/100)).Detach(ctx)
}

// TestPowerCutsInWriteback cuts the power while dirty data is made, and written back.
func TestPowerCutsInWriteback(t *testing.T) {
	for _, c := range inTurn(writebackCases) {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := c.loop(seed)
				l.Step = crashStep(150)
				l.Run(t)
			}
		})
	}
}

// TestKillsInWriteback kills the process, twice in a row.
func TestKillsInWriteback(t *testing.T) {
	cases := append(writebackCases[:len(writebackCases):len(writebackCases)], writebackCase{"no runtime folder", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{drain: fastDrain})
		open := l.Build
		l.Build = func(ctx context.Context, e *sim.Env) (*sim.System, error) {
			e.Dir = ""
			return open(ctx, e)
		}
		l.Reopen = l.Build
		return l
	}})
	for _, c := range inTurn(cases) {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := c.loop(seed)
				l.Kill, l.Lives, l.Step = true, 2, crashStep(100)
				l.Run(t)
			}
		})
	}
}

// TestLivesInARowInWriteback lets a set die several times, each time while it recovers or soon after.
func TestLivesInARowInWriteback(t *testing.T) {
	for _, c := range inTurn(writebackCases) {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := c.loop(seed)
				l.Lives, l.Step = 4, crashStep(300)
				l.Run(t)
			}
		})
	}
}

// TestReadsWhileRunningInWriteback runs loads to their end: each block is linearizable, and a stop loses nothing.
func TestReadsWhileRunningInWriteback(t *testing.T) {
	for _, c := range inTurn(writebackCases) {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(3) {
				l := c.loop(seed)
				l.Most = -1
				l.Run(t)
			}
		})
	}
}
