package lab

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	ubcache "github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/rt"
)

// A fakeSet collects for some time whenever it is asked to.
type fakeSet struct {
	rt       *rt.Runtime
	takes    []time.Duration // one collection after the other; the last of them goes on
	asked    []time.Duration // when
	verified int
	err      error // of trigger_gc
	mismatch error

	gc    ubcache.GCStats
	stats ubcache.SetStats
	exact bool
}

func (s *fakeSet) GC() ubcache.GCStats              { return s.gc }
func (s *fakeSet) Stats() ubcache.SetStats          { return s.stats }
func (s *fakeSet) Verify(ctx context.Context) error { s.verified++; return nil }
func (s *fakeSet) collect(d time.Duration) {
	s.gc.Running = !s.exact
	s.rt.Go("collection", func() {
		s.rt.Sleep(d)
		if s.exact {
			s.stats.Sweeps++
			s.stats.IndexNodes = 77
			return
		}
		s.gc.Running = false
		s.gc.Collections++
		s.gc.Last, s.gc.Total, s.gc.Nodes = d, s.gc.Total+d, 55
		s.gc.Holds += 4
		s.gc.TotalHold += d / 2
		s.gc.LongestHold = max(s.gc.LongestHold, d/4)
	})
}

func (s *fakeSet) SetAttribute(ctx context.Context, object, name, _ string) error {
	switch object + " " + name {
	case "set trigger_gc":
		if s.err != nil {
			return s.err
		}
		s.collect(s.takes[min(len(s.asked), len(s.takes)-1)])
		s.asked = append(s.asked, s.rt.Now())
		return nil
	case "set trigger_verify":
		if s.mismatch != nil {
			return s.mismatch
		}
		s.verified++
		return s.rt.SleepContext(ctx, 700*time.Millisecond)
	}
	return errors.New("no such attribute")
}

// watched watches a fake set for ten seconds of simulated time.
func watched(t *testing.T, s *fakeSet, force time.Duration, meanwhile func()) (c Collections, w *watch, err error) {
	t.Helper()
	sim := rt.NewSim(1)
	simErr := sim.Run(func() {
		r := sim.Runtime()
		s.rt = r
		stop, cancel := context.WithCancel(context.Background())
		w = &watch{rt: r, set: s, exact: s.exact, force: force, begin: r.Now(), tick: func(time.Duration, *watch) {}}
		g := newGroup(r)
		g.Go("watch", func() { err = w.run(stop) })
		if meanwhile != nil {
			g.Go("meanwhile", meanwhile)
		}
		r.Sleep(10 * time.Second)
		cancel()
		g.Wait()
		c = w.collections(r.Now())
		if settled, serr := w.settle(context.Background()); !settled || serr != nil {
			t.Errorf("settled: %v, %v", settled, serr)
		}
	})
	if simErr != nil {
		t.Fatal(simErr)
	}
	return c, w, err
}

// near reports whether a time is what it should be, to what a watch can see.
func near(d Duration, want time.Duration) bool {
	return d >= Duration(want-2*watchEvery) && d <= Duration(want+3*watchEvery)
}

func TestWatchSeesCollections(t *testing.T) {
	s := &fakeSet{takes: []time.Duration{500 * time.Millisecond, 3 * time.Second, time.Second}}
	c, _, err := watched(t, s, 2*time.Second, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Forced at 2, 4 and, since the second one runs until 7, then; and at 9 or so, which is not over at the end.
	if c.Completed != 3 || c.Unfinished != 1 || len(c.Spans) != 4 || c.Nodes != 55 {
		t.Errorf("%+v, asked at %v", c, s.asked)
	}
	if !near(c.Mean, 1500*time.Millisecond) || !near(c.Max, 3*time.Second) || !near(c.Spans[1].From, 4*time.Second) || !near(c.Spans[1].To, 7*time.Second) {
		t.Errorf("%+v", c)
	}
	if len(s.asked) != 4 || !near(Duration(s.asked[2]), 7*time.Second) {
		t.Errorf("asked at %v", s.asked)
	}
	if c.Holds != 12 || c.HoldTotal != Duration(2250*time.Millisecond) || c.HoldMax != Duration(750*time.Millisecond) {
		t.Errorf("%d holds, %v, at most %v", c.Holds, c.HoldTotal, c.HoldMax)
	}
	if s.verified != 0 {
		t.Error("the counts are verified under a policy of collections")
	}
}

func TestWatchSeesWhatNobodyAskedFor(t *testing.T) {
	s := &fakeSet{}
	c, _, err := watched(t, s, 0, func() {
		s.rt.Sleep(3 * time.Second)
		s.collect(2 * time.Second)
	})
	if err != nil || len(s.asked) != 0 || c.Completed != 1 || !near(c.Max, 2*time.Second) || !near(c.Spans[0].From, 3*time.Second) {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestWatchOfExact(t *testing.T) {
	s := &fakeSet{exact: true, takes: []time.Duration{time.Second, 500 * time.Millisecond, 9 * time.Second}}
	c, w, err := watched(t, s, 3*time.Second, nil)
	if err != nil || c.Completed != 2 || c.Unfinished != 1 || c.Nodes != 77 || !near(c.Mean, 750*time.Millisecond) || !near(c.Max, time.Second) {
		t.Errorf("%+v, %v", c, err)
	}
	// Passes at 3, 6 and 9; the last was over before the end.
	if s.verified != 3 || w.left {
		t.Errorf("%d passes, left %v", s.verified, w.left)
	}
}

// A pass that is under way at the end of a window is over when the next begins.
func TestWatchSettlesTheVerifier(t *testing.T) {
	s := &fakeSet{exact: true, takes: []time.Duration{time.Second}}
	_, w, err := watched(t, s, 9500*time.Millisecond, nil)
	if err != nil || !w.left || s.verified != 2 {
		t.Errorf("left %v, %d passes, %v", w.left, s.verified, err)
	}
}

func TestWatchFails(t *testing.T) {
	s := &fakeSet{takes: []time.Duration{time.Second}, err: ubcache.ErrNoAttribute}
	if _, _, err := watched(t, s, time.Second, nil); !errors.Is(err, ubcache.ErrNoAttribute) || !strings.Contains(err.Error(), "collections cannot be forced") {
		t.Errorf("no trigger_gc: %v", err)
	}
	s = &fakeSet{exact: true, takes: []time.Duration{time.Second}, mismatch: errors.New("3 counts")}
	if _, _, err := watched(t, s, time.Second, nil); !errors.Is(err, s.mismatch) || !strings.Contains(err.Error(), "the counts do not fit") {
		t.Errorf("a mismatch: %v", err)
	}
}
