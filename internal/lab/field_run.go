package lab

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

const (
	fieldWindow = time.Second           // of which the report has a line each
	fieldSample = 10 * time.Millisecond // how often it is looked whether a collection is under way
)

// A fieldRun is a variant of a field with one policy.
type fieldRun struct {
	f        *Field
	variant  *Variant
	policy   string
	img      *image
	progress func(stage string, percent int)

	rt   *rt.Runtime
	set  *ubcache.CacheSet
	load *load
	rec  fieldRecorder // guarded by load.mu
	row  *FieldRow
	over bool // of the sampler; guarded by load.mu
}

// run returns what was measured.
func (x *fieldRun) run(ctx context.Context) (*FieldRow, error) {
	begin := time.Now()
	x.row = &FieldRow{Policy: x.policy, Variant: x.variant.Name}
	err := simulate(x.f.Seed, func(r *rt.Runtime) error {
		x.rt = r
		m, err := x.img.clone(r)
		if err != nil {
			return err
		}
		defer m.close()
		model := &x.f.CacheModel
		if x.variant.CacheModel != nil {
			model = x.variant.CacheModel
		}
		// A start takes as long as the devices do, but nobody waits for it here.
		cache := blockdev.NewDelaying(m.cache, blockdev.Latency{})
		backing := blockdev.NewDelaying(m.backing, blockdev.Latency{})
		x.progress("open", 0)
		return withSet(x.f, cache, backing, func(set *ubcache.CacheSet, v *ubcache.Volume) error {
			x.set = set
			if err := x.settings(); err != nil {
				return err
			}
			cache.SetLatency(model.Latency)
			backing.SetLatency(x.f.BackingModel.Latency)
			err := x.measure(ctx, v)
			cache.SetLatency(blockdev.Latency{}) // nor for the end
			backing.SetLatency(blockdev.Latency{})
			x.progress("close", 0)
			return err
		})
	})
	x.row.Took.RealTime = time.Since(begin)
	x.row.Took.PeakMemory = peakMemory()
	return x.row, err
}

func (x *fieldRun) settings() error {
	ctx := context.Background()
	if x.set.GC().Policy != x.policy {
		if err := x.set.SetAttribute(ctx, "set", "gc_policy", x.policy); err != nil {
			return err
		}
	}
	if x.variant.Discard {
		return x.set.SetAttribute(ctx, "cache", "discard", "1")
	}
	return nil
}

// peakMemory returns the most that the process has had of memory, in bytes.
func peakMemory() int64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return u.Maxrss << 10
}

// measure puts the load on the volume, and fills in the row.
func (x *fieldRun) measure(ctx context.Context, v *ubcache.Volume) error {
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	defer pool.Trim(0)
	x.load = newLoad(x.rt, v, x.f.File, pool)
	x.rec.init(x.f.Jobs)
	var group rt.WaitGroup
	group.Init(x.rt)
	group.Go("collections", x.sample)
	var loadErr error
	group.Go("load", func() {
		rng := rand.New(rand.NewPCG(x.f.Seed, 0x6c6f6164))
		loadErr = x.load.run(ctx, x.f.Jobs, rng, func(q *fieldRequest) bool {
			x.rec.done(q, x.rt.Now(), x.load.collecting)
			return true
		})
	})
	x.wait(ctx, "warm", x.f.Warm)
	before, gc := x.set.Stats(), x.set.GC()
	stalls := x.set.Stalls()
	x.load.mu.Lock()
	x.rec.begin(x.rt.Now(), x.f.Span)
	x.load.mu.Unlock()
	x.wait(ctx, "measure", x.f.Span)
	x.load.mu.Lock()
	x.load.stopped, x.over = true, true
	x.load.mu.Unlock()
	after, gcAfter := x.set.Stats(), x.set.GC()
	stallsAfter := x.set.Stalls()
	group.Wait()
	x.row.Jobs = x.rec.results(x.f.Jobs)
	x.row.fill(&before, &after, &gc, &gcAfter)
	x.row.Stalls = stallsBetween(stalls, stallsAfter)
	return errors.Join(loadErr, x.set.Err())
}

// wait returns after a simulated time, or when ctx ends.
func (x *fieldRun) wait(ctx context.Context, stage string, d time.Duration) {
	begin := x.rt.Now()
	for last := -1; ctx.Err() == nil; {
		gone := x.rt.Now() - begin
		if percent := int(100 * gone / max(d, 1)); percent != last {
			last = percent
			x.progress(stage, min(percent, 100))
		}
		if gone >= d {
			return
		}
		x.rt.Sleep(min(d-gone, fieldWindow))
	}
}

// sample looks at the collections. Between two of them nothing is held, so what was held since the last one ended was held
// by this one.
func (x *fieldRun) sample() {
	last := x.set.GC()
	for {
		x.load.mu.Lock()
		g := x.set.GC()
		x.load.collecting = g.Running
		over := x.over
		if g.Collections > last.Collections && x.rec.measures(x.rt.Now()) {
			c := FieldCollection{End: x.rt.Now() - x.rec.from, Took: g.Last, Nodes: g.Nodes, Holds: g.Holds - last.Holds, Held: g.TotalHold - last.TotalHold}
			x.row.GC.List = append(x.row.GC.List, c)
		}
		if g.Collections > last.Collections {
			last = g
		}
		x.load.mu.Unlock()
		if over {
			return
		}
		x.rt.Sleep(fieldSample)
	}
}

// stallsBetween returns what has come to be since an earlier look. Max is since the set was opened.
func stallsBetween(before, after []ubcache.Stall) []ubcache.Stall {
	var list []ubcache.Stall
	for i, s := range after {
		if i < len(before) {
			s.Count -= before[i].Count
			s.Total -= before[i].Total
		}
		if s.Count > 0 {
			list = append(list, s)
		}
	}
	return list
}
