package lab

import (
	"context"
	"fmt"
	"time"

	ubcache "github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/rt"
)

const (
	watchEvery  = 10 * time.Millisecond
	settleLimit = 2 * time.Minute // for what was begun in a window and is still under way after it
)

// A collector is what a watch needs of a set.
type collector interface {
	GC() ubcache.GCStats
	Stats() ubcache.SetStats
	SetAttribute(ctx context.Context, object, name, value string) error
	Verify(ctx context.Context) error
}

// A watch forces collections while a load runs, and sees when they begin and end, to the nearest watchEvery. With the policy exact
// what is forced is a sweep with all that it leads to, and a pass of the verifier beside it.
type watch struct {
	rt    *rt.Runtime
	set   collector
	exact bool
	force time.Duration // between the beginnings of two, at least; 0: only look
	tick  func(now time.Duration, w *watch)

	begin     time.Duration   // of the window
	first     ubcache.GCStats // at its beginning
	gc        ubcache.GCStats
	stats     ubcache.SetStats
	completed int
	longest   time.Duration
	total     time.Duration
	nodes     uint64
	spans     []Span
	running   bool
	since     time.Duration

	verifies rt.WaitGroup
	mu       rt.Mutex // guards what follows
	busy     bool     // the verifier
	left     bool     // a pass is not waited for any more, and may go on
	err      error
}

// run works until stop ends. It returns when no goroutine of its own is left.
func (w *watch) run(stop context.Context) error {
	w.mu.Init(w.rt)
	w.verifies.Init(w.rt)
	next := w.begin + w.force // the first interval is measured too
	for w.rt.SleepContext(stop, watchEvery) == nil {
		now := w.rt.Now()
		w.look(now)
		if w.force > 0 && now >= next && !w.running {
			next = now + w.force
			if err := w.trigger(stop, now); err != nil {
				w.failed(err)
			}
		}
		w.mu.Lock()
		failed := w.err != nil
		w.mu.Unlock()
		if failed {
			break
		}
		w.tick(now, w)
	}
	w.verifies.Wait() // the end of stop ends the waits, not the passes
	w.look(w.rt.Now())
	return w.err
}

func (w *watch) failed(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

// trigger begins a collection.
func (w *watch) trigger(stop context.Context, now time.Duration) error {
	if err := w.set.SetAttribute(stop, "set", "trigger_gc", "1"); err != nil {
		if stop.Err() != nil {
			return nil
		}
		return fmt.Errorf("collections cannot be forced: %w", err)
	}
	if !w.exact {
		return nil
	}
	w.running, w.since = true, now
	w.mu.Lock()
	busy := w.busy
	w.busy = true
	w.mu.Unlock()
	if busy {
		return nil
	}
	w.verifies.Go("verify", func() {
		err := w.set.SetAttribute(stop, "set", "trigger_verify", "1")
		w.mu.Lock()
		w.busy, w.left = false, stop.Err() != nil
		w.mu.Unlock()
		if err != nil && stop.Err() == nil {
			w.failed(fmt.Errorf("the counts do not fit the index: %w", err))
		}
	})
	return nil
}

// look sees what has begun and ended since the last look.
func (w *watch) look(now time.Duration) {
	if w.exact {
		s := w.set.Stats()
		if n := int(s.Sweeps - w.stats.Sweeps); n > 0 {
			from := w.since
			if !w.running {
				from = now // by itself: when it began is not known
			}
			w.ended(n, now-from, now-from, from, now)
			w.nodes = uint64(s.IndexNodes)
			w.running = false
		}
		w.stats = s
		return
	}
	g := w.set.GC()
	if n := int(g.Collections - w.gc.Collections); n > 0 {
		w.ended(n, g.Total-w.gc.Total, max(g.Last, (g.Total-w.gc.Total)/time.Duration(n)), max(now-g.Last, w.begin), now)
		w.nodes = g.Nodes
		w.running = false
	}
	if g.Running && !w.running {
		w.since = now
	}
	w.running = g.Running
	w.gc = g
}

func (w *watch) ended(n int, total, longest, from, now time.Duration) {
	w.completed += n
	w.total += total
	w.longest = max(w.longest, longest)
	w.spans = append(w.spans, Span{Duration(from - w.begin), Duration(now - w.begin)})
}

// collections returns what was seen in the window that ends now.
func (w *watch) collections(now time.Duration) Collections {
	c := Collections{Completed: w.completed, Max: Duration(w.longest), Nodes: w.nodes, Spans: w.spans}
	if !w.exact {
		c.Holds, c.HoldTotal, c.HoldMax = w.gc.Holds-w.first.Holds, Duration(w.gc.TotalHold-w.first.TotalHold), Duration(w.gc.LongestHold)
	}
	if w.completed > 0 {
		c.Mean = Duration(w.total / time.Duration(w.completed))
	}
	if w.running {
		c.Unfinished = 1
		c.Spans = append(c.Spans, Span{Duration(w.since - w.begin), Duration(now - w.begin)})
	}
	return c
}

// settle waits until nothing that was forced is under way any more, so that the next window is not measured with it. It
// reports false if that takes more than settleLimit.
func (w *watch) settle(ctx context.Context) (settled bool, err error) {
	limited, cancel := w.rt.WithTimeout(ctx, settleLimit)
	defer cancel()
	for w.running && w.rt.SleepContext(limited, watchEvery) == nil {
		w.look(w.rt.Now())
	}
	if w.left && limited.Err() == nil { // this pass begins after the one that goes on
		if err := w.set.Verify(limited); err != nil && limited.Err() == nil {
			return false, fmt.Errorf("the counts do not fit the index: %w", err)
		}
	}
	return limited.Err() == nil, ctx.Err()
}
