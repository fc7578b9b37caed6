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
)

// A faultySet is a crashSet whose cache device can fail.
type faultySet struct {
	crashSet
	cache *blockdev.Faulty
}

func openFaulty(ctx context.Context, e *sim.Env, mode string) (*sim.System, error) {
	f := blockdev.NewFaulty(e.Devices[0], e.Seed)
	e.Devices[0] = f
	s, err := openCrash(ctx, e, mode)
	if err == nil {
		s.Own = faultySet{s.Own.(crashSet), f}
	}
	return s, err
}

// pinnedAtRest is how many buckets of a crash loop's set are pinned at most when no request is under way: eight that
// take data of each kind, and one more while a fill comes to its end.
const pinnedAtRest = 2*8 + 1

// faultLoop is a loop in whose first life one of twenty requests for data in the cache fails, and one of twenty writes
// of nodes and generations. No client may see a wrong byte, and no bucket stays pinned.
func faultLoop(seed uint64, mode string) sim.Loop {
	l := crashLoop(seed, mode)
	first := mode
	if mode == "changing" {
		first = "writethrough"
	}
	l.Build = func(ctx context.Context, e *sim.Env) (*sim.System, error) {
		s, err := openFaulty(ctx, e, first)
		if err != nil {
			return nil, err
		}
		own := s.Own.(faultySet)
		s.Own = own.crashSet // as l.Between wants it
		own.cache.Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpRead, blockdev.OpWrite}, Prob: 0.05})
		own.cache.Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForBtree, blockdev.ForPrio}, Ops: []blockdev.Op{blockdev.OpWrite}, Prob: 0.05})
		stop := s.Close
		s.Close = func(ctx context.Context) error {
			e.Runtime.Sleep(10 * time.Millisecond) // for fills
			st, err := own.set.Stats(), own.set.Err()
			if cerr := stop(ctx); cerr != nil || err != nil {
				return cerr
			}
			if st.Pinned > pinnedAtRest {
				return fmt.Errorf("%d buckets are pinned at rest: %+v", st.Pinned, st)
			}
			return nil
		}
		return s, nil
	}
	l.Workload.Tolerate = isIOError
	return l
}

// Data that the cache device does not take leaves no bucket pinned, and what it does not give comes from the backing
// device.
func TestPinsAfterIOErrors(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		for i := range int64(100) {
			if err := v.WriteAt(ctx, page('A'), 2<<20+i*16<<10, 0); err != nil {
				return err
			}
		}
		b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpRead, blockdev.OpWrite}})
		for i := range int64(100) {
			if err := b.expect(2<<20+i*16<<10, 'A'); err != nil {
				return err
			}
			if err := v.WriteAt(ctx, page('B'), i*16<<10, 0); err != nil {
				return err
			}
			if err := b.expect(i*16<<10, 'B'); err != nil {
				return err
			}
			if err := b.expect(4<<20+i*16<<10, 0); err != nil {
				return err
			}
		}
		b.rt.Sleep(10 * time.Millisecond) // for fills
		if st := b.set.Stats(); st.Pinned > pinnedAtRest {
			return fmt.Errorf("%d buckets are pinned at rest: %+v", st.Pinned, st)
		}
		if st := v.Stats(); st.CacheReadErrors < 100 {
			return fmt.Errorf("want 100 or more failed reads from the cache: %+v", st)
		}
		return nil
	})
}

func isIOError(err error) bool {
	var e *blockdev.IOError
	return errors.As(err, &e)
}

// TestPowerCutsBesideIOErrors cuts the power where the cache device fails now and then.
func TestPowerCutsBesideIOErrors(t *testing.T) {
	for _, mode := range crashModes("writethrough", "changing") {
		t.Run(mode, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := faultLoop(seed, mode)
				l.Step = crashStep(90)
				l.Run(t)
			}
		})
	}
}

// TestIOErrors runs loads to their end where the cache device fails now and then.
func TestIOErrors(t *testing.T) {
	if testing.Short() {
		t.Skip("TestPowerCutsBesideIOErrors is done")
	}
	for _, seed := range sim.Seeds(4) {
		l := faultLoop(seed, "changing")
		l.Most = -1
		l.Run(t)
	}
}

// TestKillsOfFailedSets kills the process after writes of metadata have begun to fail, for good: what was acknowledged,
// also since then, is there.
func TestKillsOfFailedSets(t *testing.T) {
	broken := map[string][]blockdev.Purpose{"journal": {blockdev.ForJournal}, "nodes": {blockdev.ForBtree}, "generations": {blockdev.ForPrio}, "all": nil}
	for name, purposes := range broken {
		if testing.Short() && name != "all" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := brokenLoop(seed, purposes)
				l.Kill, l.Step = true, crashStep(70)
				l.Run(t)
			}
		})
	}
}

// brokenLoop is a loop in whose first life all writes and flushes for such purposes fail from some request on.
func brokenLoop(seed uint64, purposes []blockdev.Purpose) sim.Loop {
	l := crashLoop(seed, "changing")
	l.Build = func(ctx context.Context, e *sim.Env) (*sim.System, error) {
		s, err := openFaulty(ctx, e, "writethrough")
		if err != nil {
			return nil, err
		}
		stop := s.Close
		s.Close = func(ctx context.Context) error {
			_ = stop(ctx) // it says that the set has failed
			return nil
		}
		return s, nil
	}
	modes := []string{"writethrough", "writearound", "none"}
	l.Between = func(ctx context.Context, _ *sim.Env, s *sim.System, n int) error {
		own, ok := s.Own.(faultySet)
		if !ok {
			return nil // a later life
		}
		if n == 40+int(seed*13%150) {
			own.cache.Add(blockdev.Fault{Purposes: purposes, Ops: []blockdev.Op{blockdev.OpWrite, blockdev.OpFlush}})
		}
		if n%20 == 10 {
			_ = own.set.SetAttribute(ctx, "volume"+strconv.Itoa(n/20%2), "cache_mode", modes[n/40%3])
		}
		return nil
	}
	l.Workload = sim.Workload{
		Requests: 600, Clients: 8, Blocks: 32, Weights: sim.Weights{Read: 40, Write: 20, FUA: 30, Flush: 5, Discard: 2, Zeroes: 3},
		Tolerate: func(error) bool { return true }, // also what the set answers that has failed
	}
	return l
}
