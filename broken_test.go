package ubcache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/sim"
)

// A brokenRule is a rule of the reuse gate, and a loop in which a set that does not keep it loses data.
type brokenRule struct {
	name   string
	broken cacheset.Broken
	loop   func(broken cacheset.Broken) sim.Loop
}

var brokenRules = []brokenRule{
	{"J1 of clean keys", cacheset.SkipJ1, drained},
	{"J1 of moved keys", cacheset.SkipJ1, moveLoop},
	{"J2", cacheset.SkipJ2, evictLoop},
	{"M1", cacheset.SkipM1, rewriteLoop},
	{"F1", cacheset.SkipF1, drained},
	{"V1", cacheset.SkipV1, overwriteLoop},
	{"V3", cacheset.SkipV3, drained},
	{"V4", cacheset.SkipV4, readLoop},
	{"V5", cacheset.SkipV5, rewriteLoop},
	{"DIRTY first", cacheset.SkipDirtyState, drained},
	{"CLEAN last", cacheset.EarlyClean, drained},
	{"slots last", cacheset.EarlySlot, reused},
	{"discards", cacheset.EarlyDiscard, discarding},
}

// TestBrokenRules leaves one rule after another out, and sees that a crash loop finds it. The same cuts of the same loop
// find nothing where the rule is kept.
func TestBrokenRules(t *testing.T) {
	if testing.Short() {
		t.Skip("other crash loops run the same code")
	}
	for _, rule := range brokenRules {
		t.Run(rule.name, func(t *testing.T) {
			l := rule.loop(rule.broken)
			l.Test = t.Name()
			begin := time.Now()
			r, err := l.Try()
			var f *sim.Failure
			if !errors.As(err, &f) {
				t.Fatalf("not found in %d cuts, %d images: %v", r.Cuts, r.Images, err)
			}
			t.Logf("found after %d cuts, %d images, %v: %v", r.Cuts, r.Images, time.Since(begin), err)
			kept := rule.loop(0)
			kept.Most = (f.Cut-kept.Start)/kept.Step + 1
			kept.Run(t)
		})
	}
}

// crowded gives a loop a larger cache that is nearly full of a flash-only volume which nobody opens, of size bytes. So few
// buckets go round, and yet more are ready at a time than data must leave alone (F 9.6), as a larger cache makes more
// ready: one that is ready too early is then taken too early.
func crowded(l sim.Loop, size int64) sim.Loop {
	l.Disks[0].Size = 2048 * crashBucket
	return withCrowd(l, size)
}

// withCrowd adds a flash-only volume of size bytes to a loop, which nobody opens. It is all written.
func withCrowd(l sim.Loop, size int64) sim.Loop {
	prepare := l.Prepare
	l.Prepare = func(ctx context.Context, e *sim.Env) error {
		if err := prepare(ctx, e); err != nil {
			return err
		}
		set, err := Open(ctx, Options{CacheDevice: e.Devices[0]})
		if err != nil {
			return err
		}
		return errors.Join(fillFlash(ctx, set, "crowd", size), set.Close(ctx))
	}
	return l
}

// fillFlash makes a flash-only volume and writes it all.
func fillFlash(ctx context.Context, set *CacheSet, label string, size int64) error {
	if _, err := set.CreateFlash(ctx, label, size); err != nil {
		return err
	}
	v, err := set.OpenVolume(ctx, VolumeOptions{Name: label, Flash: label})
	if err != nil {
		return err
	}
	p := bytes.Repeat([]byte{'c'}, 64<<10)
	for off := int64(0); off < size; off += int64(len(p)) {
		if err := v.WriteAt(ctx, p, off, 0); err != nil {
			return err
		}
	}
	return nil
}

// slowly opens a set and the volumes, and then has requests of the cache device take long.
func (o opening) slowly(slow ...blockdev.Fault) func(ctx context.Context, e *sim.Env) (*sim.System, error) {
	return func(ctx context.Context, e *sim.Env) (*sim.System, error) {
		f := blockdev.NewFaulty(e.Devices[0], e.Seed)
		e.Devices[0] = f
		s, err := o.open(ctx, e)
		if err != nil {
			return nil, err
		}
		for _, fault := range slow {
			f.Add(fault)
		}
		s.Own = faultySet{s.Own.(crashSet), f}
		return s, nil
	}
}

// slowJournal lets journal entries take long: what empties a bucket, and what names generations, is durable late.
var slowJournal = blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForJournal}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 10 * time.Millisecond}

// overwriteLoop overwrites a flash-only volume, so fast that emptied buckets are needed at once.
func overwriteLoop(broken cacheset.Broken) sim.Loop {
	l := crowded(withFlash(loopOver(0, "none"), 1<<20), 13<<20)
	o := opening{flash: true, broken: broken}
	l.Build, l.Reopen = o.slowly(slowJournal), o.open
	l.Workload = sim.Workload{Requests: 400, Clients: 8, Blocks: 256, Think: 20 * time.Millisecond, Weights: sim.Weights{Write: 60, Flush: 1}}
	l.Start, l.Step, l.Most = 400, 50, 20
	return l
}

// readLoop reads, so fast that evicted buckets are needed at once.
func readLoop(broken cacheset.Broken) sim.Loop {
	l := crowded(crashLoop(0, "writethrough"), 11<<20)
	o := opening{mode: "writethrough", broken: broken}
	l.Build, l.Reopen = o.slowly(slowJournal), o.open
	l.Workload = sim.Workload{Requests: 400, Clients: 8, Blocks: 256, Think: 2 * time.Millisecond, Weights: sim.Weights{Read: 60, Write: 2}}
	l.Start, l.Step, l.Most = 100, 20, 25
	return l
}

// rewriteLoop has leaves rewritten, while entries are written and buckets needed. Appends to the root, which have the
// pointers to the copies, take long.
func rewriteLoop(broken cacheset.Broken) sim.Loop {
	l := crashLoop(0, "writethrough")
	o := opening{mode: "writethrough", broken: broken}
	l.Build, l.Reopen = o.slowly(), o.open
	l.Between = func(_ context.Context, _ *sim.Env, s *sim.System, _ int) error {
		if own, ok := s.Own.(faultySet); ok {
			root := own.set.set.Info().Root // it moves
			own.cache.Clear()
			own.cache.Add(blockdev.Fault{
				Ops: []blockdev.Op{blockdev.OpWrite}, Off: int64(root.Ptr.Sector()) * 512, Len: int64(root.Sectors) * 512, Hang: 30 * time.Millisecond,
			})
		}
		return nil
	}
	l.Workload = sim.Workload{Requests: 800, Clients: 8, Weights: sim.Weights{Read: 20, Write: 20, FUA: 20, Flush: 1}}
	l.Start, l.Step, l.Most = 400, 50, 30
	return l
}

// evictLoop overwrites cached data of one volume, in the kernel's order, while reads of another evict.
func evictLoop(broken cacheset.Broken) sim.Loop {
	l := loopOver(0, "writethrough", 512<<10, 3<<20)
	o := opening{mode: "writethrough", order: "kernel", broken: broken}
	l.Build, l.Reopen = o.open, o.open
	for i := range l.Volumes {
		l.Volumes[i].Loose = true
	}
	l.Between = func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
		if n == 0 {
			if err := s.Own.(crashSet).set.SetAttribute(ctx, "cache", "cache_replacement_policy", "random"); err != nil {
				return err
			}
		}
		rng := rand.New(rand.NewPCG(e.Seed, uint64(n)))
		t := s.Targets[1]
		return t.ReadAt(ctx, make([]byte, 64<<10), rng.Int64N(t.Size()-64<<10)&^511)
	}
	l.Workload = sim.Workload{Requests: 300, Weights: sim.Weights{Write: 10, FUA: 10, Flush: 1}}
	l.Start, l.Step, l.Most = 700, 50, 20
	return l
}

// reused is a loop in which slots go from one volume to another.
func reused(broken cacheset.Broken) sim.Loop {
	l := reuseLoop(0, broken)
	l.Start, l.Step, l.Most = 200, 40, 40
	return l
}

// discarding is a loop in which empty buckets are discarded.
func discarding(broken cacheset.Broken) sim.Loop {
	l := discardLoop(0, broken)
	l.Start, l.Step, l.Most = 200, 60, 40
	return l
}

// moveLoop overwrites a flash-only volume at random, while what is left of its data is moved together all the time.
func moveLoop(broken cacheset.Broken) sim.Loop {
	l := crowded(withFlash(loopOver(0, "none"), 1<<20), 13<<20)
	o := opening{flash: true, broken: broken, restless: true}
	l.Build, l.Reopen = o.open, o.open
	l.Workload = sim.Workload{Requests: 600, Blocks: 256, Weights: sim.Weights{Read: 10, Write: 30, FUA: 10, Flush: 2}}
	l.Start, l.Step, l.Most = 1000, 100, 12
	return l
}

// drained is a writebackLoop in which the clients write little, have the volumes written back now and then, and read much
// else meanwhile.
func drained(broken cacheset.Broken) sim.Loop {
	l := writebackLoop(0, opening{broken: broken})
	l.Between = writeBackEach(8)
	l.Workload = sim.Workload{Requests: 300, Blocks: 32, Weights: sim.Weights{Read: 40, Write: 3, FUA: 3}}
	l.Start, l.Step, l.Most = 20, 10, 42
	return l
}
