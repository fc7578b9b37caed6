package rt

import (
	"context"
	"fmt"
	"runtime"
	"slices"
)

// A simLock is the simulated Mutex and RWMutex. Whoever finds it taken parks and tries again when woken, so
// that others may come first; only readers that waited for a writer are handed the lock, as in package sync, so
// that a row of writers does not keep them out for ever.
type simLock struct {
	s    *Sim
	kind string
	made [4]uintptr // where Init was called

	held    bool  // by a writer
	holder  *simG // the writer, nil for code outside of the simulation
	reads   int   // readers that hold it
	writers []*simG
	readers []*simG // waiting for the writer
	claims  int     // writers that wait, or were woken and have not tried again
}

func (s *Sim) newLock(kind string) *simLock {
	s.self("Init")
	l := &simLock{s: s, kind: kind}
	runtime.Callers(3, l.made[:])
	return l
}

func (l *simLock) lock() {
	g := l.s.point("Lock")
	l.take(g)
}

// take is lock without the scheduling point.
func (l *simLock) take(g *simG) {
	for l.held || l.reads > 0 {
		l.s.mayPark(g, l)
		l.writers = append(l.writers, g)
		l.claims++
		l.s.park(g, l)
		l.claims--
	}
	l.held, l.holder = true, g
}

func (l *simLock) tryLock() bool {
	g := l.s.point("TryLock")
	if l.held || l.reads > 0 {
		return false
	}
	l.held, l.holder = true, g
	return true
}

func (l *simLock) unlock() {
	l.s.self("Unlock")
	if !l.held {
		if l.s.dying {
			return // a deferred Unlock of a goroutine that was ended in Cond.Wait or in Lock
		}
		panic("rt: Unlock of a " + l.kind + " that is not locked")
	}
	l.held, l.holder = false, nil
	if len(l.readers) > 0 {
		for _, g := range l.readers {
			l.reads++
			l.s.ready(g)
		}
		l.readers = l.readers[:0]
		return
	}
	l.wakeWriter()
}

func (l *simLock) rlock() {
	g := l.s.point("RLock")
	if l.held || l.claims > 0 {
		l.s.mayPark(g, l)
		l.readers = append(l.readers, g)
		l.s.park(g, l) // unlock counts it
		return
	}
	l.reads++
}

func (l *simLock) tryRLock() bool {
	l.s.point("TryRLock")
	if l.held || l.claims > 0 {
		return false
	}
	l.reads++
	return true
}

func (l *simLock) runlock() {
	l.s.self("RUnlock")
	if l.reads == 0 {
		if l.s.dying {
			return
		}
		panic("rt: RUnlock of a " + l.kind + " that is not locked for reading")
	}
	l.reads--
	if l.reads == 0 {
		l.wakeWriter()
	}
}

func (l *simLock) wakeWriter() {
	if g := l.s.takeAny(&l.writers); g != nil {
		l.s.ready(g)
	}
}

func (l *simLock) forget(*simG) {}

func (l *simLock) text() string {
	t := l.name()
	switch {
	case l.held && l.holder != nil:
		t += ", held by " + l.holder.String()
	case l.held:
		t += ", held from outside of the simulation"
	case l.reads > 0:
		t += fmt.Sprintf(", held by %d readers", l.reads)
	}
	return t
}

func (l *simLock) name() string { return l.kind + " made at " + place(l.made[:]) }

// takeAny removes one of the goroutines from a list, nil if it is empty.
func (s *Sim) takeAny(list *[]*simG) *simG {
	n := len(*list)
	if n == 0 {
		return nil
	}
	i := 0
	if n > 1 {
		i = s.choose(n)
	}
	g := (*list)[i]
	(*list)[i] = (*list)[n-1]
	*list = (*list)[:n-1]
	return g
}

// A simCond is the simulated Cond.
type simCond struct {
	l       *simLock
	waiting []*simG
}

func (l *simLock) newCond() *simCond { return &simCond{l: l} }

func (c *simCond) wait(ctx context.Context) {
	s := c.l.s
	g := s.blocking("Wait")
	if !c.l.held {
		panic("rt: Wait on a Cond without its lock")
	}
	s.mayPark(g, c)
	c.waiting = append(c.waiting, g)
	c.l.unlock()
	s.parkUntil(ctx, g, c)
	c.l.take(g)
}

func (c *simCond) signal() {
	s := c.l.s
	s.self("Signal")
	if g := s.takeAny(&c.waiting); g != nil {
		s.ready(g)
	}
}

func (c *simCond) broadcast() {
	c.l.s.self("Broadcast")
	for _, g := range c.waiting {
		c.l.s.ready(g)
	}
	c.waiting = c.waiting[:0]
}

func (c *simCond) forget(g *simG) {
	i := slices.Index(c.waiting, g)
	c.waiting = slices.Delete(c.waiting, i, i+1)
}

func (c *simCond) text() string { return "Cond of " + c.l.name() }

// A simGroup is the simulated WaitGroup.
type simGroup struct {
	s       *Sim
	made    [4]uintptr
	count   int
	waiting []*simG
}

func (s *Sim) newGroup() *simGroup {
	s.self("Init")
	w := &simGroup{s: s}
	runtime.Callers(3, w.made[:])
	return w
}

func (w *simGroup) add(n int) {
	w.s.self("WaitGroup.Add")
	w.count += n
	if w.count < 0 && !w.s.dying {
		panic("rt: the count of a WaitGroup fell below zero")
	}
	if w.count == 0 {
		for _, g := range w.waiting {
			w.s.ready(g)
		}
		w.waiting = w.waiting[:0]
	}
}

func (w *simGroup) wait() {
	g := w.s.point("WaitGroup.Wait")
	if w.count > 0 {
		w.s.mayPark(g, w)
		w.waiting = append(w.waiting, g)
		w.s.park(g, w)
	}
}

func (w *simGroup) forget(*simG) {}

func (w *simGroup) text() string {
	return fmt.Sprintf("WaitGroup made at %s, which counts %d", place(w.made[:]), w.count)
}
