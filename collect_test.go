package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/pace"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/sim"
)

// An overwriter writes pages of a volume at random, from several goroutines, and reads some back, and knows what each
// has to be.
type overwriter struct {
	b        *bench
	v        *Volume
	pages    int64
	size     int64 // of a page; default 4096
	clients  int
	version  []uint64
	requests int
	longest  time.Duration
	took     []time.Duration
	err      error
}

// run goes on until stop says so. Each client has pages of its own.
func (o *overwriter) run(seed uint64, stop func() bool) error {
	if o.version == nil {
		o.version = make([]uint64, o.pages)
	}
	if o.size == 0 {
		o.size = 4096
	}
	o.longest, o.requests, o.took = 0, 0, o.took[:0]
	var group rt.WaitGroup
	group.Init(o.b.rt)
	for c := range int64(o.clients) {
		group.Go("client", func() {
			ctx := context.Background()
			rng := rand.New(rand.NewPCG(seed, uint64(c)))
			got := make([]byte, o.size)
			for !stop() && o.err == nil {
				i := rng.Int64N(o.pages/int64(o.clients))*int64(o.clients) + c
				begin := o.b.rt.Now()
				var err error
				if read := rng.IntN(4) == 0; read {
					err = o.v.ReadAt(ctx, got, i*o.size)
					if err == nil && o.version[i] > 0 && !bytes.Equal(got, pattern(i*o.size, int(o.size), o.version[i])) {
						err = fmt.Errorf("page %d is not what was written last", i)
					}
				} else {
					o.version[i]++
					err = o.v.WriteAt(ctx, pattern(i*o.size, int(o.size), o.version[i]), i*o.size, 0)
				}
				took := o.b.rt.Now() - begin
				o.longest = max(o.longest, took)
				o.took = append(o.took, took)
				o.requests++
				if err != nil && o.err == nil {
					o.err = err
				}
			}
		})
	}
	group.Wait()
	return o.err
}

// quantile returns how long a request took that was slower than so many of a thousand.
func (o *overwriter) quantile(n int) time.Duration {
	slices.Sort(o.took)
	return o.took[min(len(o.took)*n/1000, len(o.took)-1)]
}

// untilRequests stops after so many.
func (o *overwriter) untilRequests(n int) func() bool { return func() bool { return o.requests >= n } }

// collected is a set whose index has some hundred small nodes, on a cache that is full of clean data or nearly.
func collected(mode string) benchOptions {
	return benchOptions{
		cache: 8192 * crashBucket, bucket: crashBucket, block: 512, backing: []int64{128 << 20}, mode: mode,
		cacheLatency:   blockdev.Latency{Read: 80 * time.Microsecond, Write: 40 * time.Microsecond, Flush: 150 * time.Microsecond, PerMiB: 2 * time.Millisecond, Parallel: 16},
		backingLatency: blockdev.Latency{Read: 200 * time.Microsecond, Write: 200 * time.Microsecond, Flush: 500 * time.Microsecond, PerMiB: 8 * time.Millisecond, Parallel: 32},
	}
}

// Under every policy collections come by themselves and when asked for, under load, the counts stay exact, and data is
// what was written; a collection finds nothing that the exact counts have not, and its marks lose nothing.
func TestPoliciesCollect(t *testing.T) {
	for _, mode := range []string{"writethrough", "writeback"} {
		for _, policy := range pace.Names {
			t.Run(mode+" "+policy, func(t *testing.T) {
				o := collected(mode)
				o.dir = t.TempDir()
				simulate(t, 1, 24*time.Hour, o, func(b *bench) error {
					ctx := context.Background()
					w := &overwriter{b: b, v: b.volumes[0], pages: 20000, clients: 4}
					err := errors.Join(b.attribute("sequential_cutoff", "0"), b.set.SetAttribute(ctx, "set", "gc_policy", policy))
					if err == nil {
						err = w.run(1, w.untilRequests(40000))
					}
					if err != nil {
						return err
					}
					natural := b.set.GC()
					for range 3 {
						if err := b.set.SetAttribute(ctx, "set", "trigger_gc", "1"); err != nil {
							return err
						}
						before := b.set.GC().Collections
						until := b.rt.Now() + time.Minute
						if err := w.run(2, func() bool { return b.set.GC().Collections > before || b.rt.Now() > until }); err != nil {
							return err
						}
						if b.set.GC().Collections == before {
							return fmt.Errorf("no collection in a minute: %+v", b.set.GC())
						}
					}
					g, st := b.set.GC(), b.set.Stats()
					t.Logf("%d collections by themselves, %+v; %d evicted, in use %d %%", natural.Collections, g, st.Evicted, st.InUse)
					if natural.Collections == 0 || g.Nodes < 40 || g.Differences != 0 || g.Looked == 0 || st.Evicted == 0 && mode == "writethrough" {
						return errors.New("that is not what a collection does")
					}
					return b.set.Verify(ctx)
				})
			})
		}
	}
}

// What each policy is there for: with classic nobody gets a bucket while a collection is on, with the others that reclaim
// it goes on; the index is held for a hundred nodes, or for ten; and with exact nobody waits for anything of it. Time is
// simulated, and the same load runs under all.
func TestPoliciesStall(t *testing.T) {
	longest := map[string]time.Duration{}
	hold := map[string]time.Duration{}
	for _, policy := range append([]string{"exact"}, pace.Names...) {
		o := collected("writeback")
		o.cache, o.backing = 2*o.cache, []int64{256 << 20}
		o.cacheLatency.Read = 800 * time.Microsecond // nodes that are not in memory: a collection of half a second and more
		o.dir, o.nodes = t.TempDir(), 200<<10
		simulate(t, 1, 24*time.Hour, o, func(b *bench) error {
			ctx := context.Background()
			w := &overwriter{b: b, v: b.volumes[0], pages: 80000, size: 1024, clients: 16}
			err := errors.Join(b.attribute("sequential_cutoff", "0"), w.run(1, w.untilRequests(120000)),
				b.set.SetAttribute(ctx, "set", "gc_policy", policy), w.run(2, w.untilRequests(30000)))
			if err != nil {
				return err
			}
			end := b.rt.Now() + 6*time.Second
			next := b.rt.Now()
			err = w.run(3, func() bool {
				if now := b.rt.Now(); now >= next {
					next = now + 3*time.Second
					b.set.set.TriggerGC()
				}
				return b.rt.Now() > end
			})
			g := b.set.GC()
			t.Logf("%-8s %6d requests, p50 %v p99 %v p99.9 %v max %v; collections %d, last %v, %d nodes; %d holds, longest %v", policy, w.requests,
				w.quantile(500), w.quantile(990), w.quantile(999), w.longest, g.Collections, g.Last, g.Nodes, g.Holds, g.LongestHold)
			longest[policy], hold[policy] = w.longest, g.LongestHold
			if policy != "exact" && g.Collections == 0 {
				return errors.New("nothing was collected")
			}
			return err
		})
	}
	for _, c := range []struct {
		what string
		ok   bool
	}{
		{"exact lets nobody wait", longest["exact"] < 20*time.Millisecond && hold["exact"] == 0},
		{"classic stops for about as long as a collection takes", longest["classic"] > 10*longest["exact"] && longest["classic"] > 2*hold["classic"]},
		{"reclaim goes on meanwhile", longest["reclaim"] < longest["classic"]/2},
		{"rescale stops for longer, as collections take longer", longest["rescale"] > longest["classic"]/2},
		{"rescale and paced hold the index for a shorter time", hold["rescale"] < hold["classic"]/2 && hold["paced"] < hold["classic"]/2},
	} {
		if !c.ok {
			t.Errorf("%s: %v, %v", c.what, longest, hold)
		}
	}
}

// TestPolicyChangesUnderLoad goes from one policy to another, also in the middle of collections.
func TestPolicyChangesUnderLoad(t *testing.T) {
	for _, seed := range sim.Seeds(3) {
		o := collected("writeback")
		o.dir = t.TempDir()
		simulate(t, seed, 24*time.Hour, o, func(b *bench) error {
			ctx := context.Background()
			w := &overwriter{b: b, v: b.volumes[0], pages: 20000, clients: 8}
			over, changes := false, 0
			var group rt.WaitGroup
			group.Init(b.rt)
			group.Go("changes", func() {
				names := append([]string{"exact"}, pace.Names...)
				for !over {
					name := names[b.rt.Uint64N(uint64(len(names)))]
					if err := b.set.SetAttribute(ctx, "set", "gc_policy", name); err != nil && w.err == nil {
						w.err = err
					}
					if got := b.set.GC().Policy; got != name {
						w.err = fmt.Errorf("policy %s, want %s", got, name)
					}
					changes++
					if b.rt.Uint64N(2) == 0 {
						b.set.set.TriggerGC()
					}
					b.rt.Sleep(time.Duration(b.rt.Uint64N(uint64(300 * time.Millisecond))))
				}
			})
			err := w.run(seed, w.untilRequests(60000))
			over = true
			group.Wait()
			if err != nil {
				return err
			}
			g := b.set.GC()
			t.Logf("%d changes, %d collections, longest request %v", changes, g.Collections, w.longest)
			if g.Collections == 0 || g.Differences != 0 {
				return fmt.Errorf("%+v", g)
			}
			return b.set.Verify(ctx)
		})
	}
}

// TestPowerCutsWhileCollecting cuts the power under each policy, with one collection after the other.
func TestPowerCutsWhileCollecting(t *testing.T) {
	for _, policy := range pace.Names {
		t.Run(policy, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := collectLoop(seed, policy)
				l.Step = crashStep(300)
				l.Run(t)
			}
		})
	}
}

// collectLoop is a loop of a set that collects without end.
func collectLoop(seed uint64, policy string) sim.Loop {
	o := opening{mode: "writeback", drain: fastDrain, policy: policy}
	l := crashLoop(seed, "writeback")
	l.Build, l.Reopen = o.open, o.open
	l.Between = func(_ context.Context, _ *sim.Env, s *sim.System, n int) error {
		if n%5 == 0 {
			s.Own.(crashSet).set.set.TriggerGC()
		}
		return nil
	}
	return l
}
