package rt

import (
	"context"
	"strings"
	"time"
)

func (s *Sim) wallTime() time.Time {
	s.self("WallTime")
	return epoch.Add(s.now)
}

// A simTimer wakes a goroutine or starts one.
type simTimer struct {
	s     *Sim
	when  time.Duration
	age   uint64 // orders timers of the same time
	index int    // in the heap, -1 if not there
	g     *simG  // to wake; or
	name  string // to start, with fn
	fn    func()
}

func (s *Sim) afterFunc(d time.Duration, fn func()) *simTimer {
	name := "timer"
	if g := s.self("AfterFunc"); g != nil {
		name = g.name
		if !strings.HasPrefix(name, "timer of ") {
			name = "timer of " + name
		}
	}
	t := &simTimer{s: s, index: -1, name: name, fn: fn}
	t.set(d)
	return t
}

// set puts the timer, which is not in the heap, into it; or fires it, if it is due.
func (t *simTimer) set(d time.Duration) {
	if d <= 0 {
		t.fire()
		return
	}
	t.s.age++
	t.when, t.age = saturate(t.s.now, d), t.s.age
	t.s.timers.add(t)
}

func (t *simTimer) fire() {
	if t.g != nil {
		t.s.ready(t.g)
		return
	}
	t.s.start(t.name, t.fn)
}

func (t *simTimer) stop() bool {
	t.s.self("Timer.Stop")
	return t.s.timers.remove(t)
}

func (t *simTimer) reset(d time.Duration) bool {
	t.s.self("Timer.Reset")
	was := t.s.timers.remove(t)
	t.set(d)
	return was
}

// A timerHeap has the next timer at its head.
type timerHeap []*simTimer

func (h timerHeap) less(a, b *simTimer) bool {
	return a.when < b.when || a.when == b.when && a.age < b.age
}

func (h *timerHeap) add(t *simTimer) {
	*h = append(*h, t)
	h.up(t, len(*h)-1)
}

// remove reports whether the timer was there.
func (h *timerHeap) remove(t *simTimer) bool {
	i := t.index
	if i < 0 || i >= len(*h) || (*h)[i] != t { // the latter two: it was dropped when a Run ended
		return false
	}
	t.index = -1
	last := len(*h) - 1
	moved := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	if i < last {
		h.down(moved, i)
		h.up(moved, moved.index)
	}
	return true
}

// up places t at i or nearer to the head.
func (h timerHeap) up(t *simTimer, i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(t, h[parent]) {
			break
		}
		h[i] = h[parent]
		h[i].index = i
		i = parent
	}
	h[i] = t
	t.index = i
}

// down places t at i or further from the head.
func (h timerHeap) down(t *simTimer, i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if child+1 < len(h) && h.less(h[child+1], h[child]) {
			child++
		}
		if !h.less(h[child], t) {
			break
		}
		h[i] = h[child]
		h[i].index = i
		i = child
	}
	h[i] = t
	t.index = i
}

// A simContext is a context that ends by simulated time. The context inside is of the standard library, so that
// contexts derived from this one end together with it; their Err, though, is context.Canceled, and only their
// Cause tells that it was a timeout.
type simContext struct {
	context.Context
	deadline time.Time
	expired  bool
}

func (c *simContext) Deadline() (time.Time, bool) {
	if d, ok := c.Context.Deadline(); ok && d.Before(c.deadline) {
		return d, true
	}
	return c.deadline, true
}

func (c *simContext) Err() error {
	if c.expired {
		return context.DeadlineExceeded
	}
	return c.Context.Err()
}

func (s *Sim) withTimeout(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	s.self("WithTimeout")
	inner, cancel := context.WithCancelCause(parent)
	c := &simContext{Context: inner, deadline: epoch.Add(saturate(s.now, max(d, 0)))}
	expire := func() {
		if inner.Err() == nil {
			c.expired = true
			cancel(context.DeadlineExceeded)
		}
	}
	if d <= 0 {
		expire()
		return c, func() {}
	}
	t := s.afterFunc(d, expire)
	return c, func() {
		t.stop()
		cancel(context.Canceled)
	}
}
