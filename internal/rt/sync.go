package rt

import (
	"context"
	"sync"
	"time"
)

// A Mutex is a sync.Mutex that a simulation can see. The zero value is an unlocked mutex of the real runtime.
// It must not be copied after first use.
type Mutex struct {
	real sync.Mutex
	sim  *simLock // nil: real
}

// Init binds the mutex to a runtime (nil: the real one). Call it before first use.
func (m *Mutex) Init(r *Runtime) {
	if r != nil && r.sim != nil {
		m.sim = r.sim.newLock("Mutex")
	}
}

// Lock waits until the mutex is free and takes it.
func (m *Mutex) Lock() {
	if m.sim != nil {
		m.sim.lock()
		return
	}
	m.real.Lock()
}

// LockTimed is Lock that says how long it took: 0 where the mutex was free, and then no clock was read. A simulation goes on
// as with Lock.
func (m *Mutex) LockTimed() (waited time.Duration) {
	if m.sim != nil {
		begin := m.sim.s.now
		m.sim.lock()
		return m.sim.s.now - begin
	}
	if m.real.TryLock() {
		return 0
	}
	begin := time.Now()
	m.real.Lock()
	return time.Since(begin)
}

// TryLock takes the mutex if it is free, and reports whether it was.
func (m *Mutex) TryLock() bool {
	if m.sim != nil {
		return m.sim.tryLock()
	}
	return m.real.TryLock()
}

// Unlock lets the mutex go. It is a run-time error, or in a simulation a panic, if it is not locked.
func (m *Mutex) Unlock() {
	if m.sim != nil {
		m.sim.unlock()
		return
	}
	m.real.Unlock()
}

// An RWMutex is a sync.RWMutex that a simulation can see: held by any number of readers or by one writer. As
// there, a reader may not take it a second time: a writer that waits keeps new readers out. The zero value is
// an unlocked one of the real runtime. It must not be copied after first use.
type RWMutex struct {
	real sync.RWMutex
	sim  *simLock // nil: real
}

// Init binds the lock to a runtime (nil: the real one). Call it before first use.
func (m *RWMutex) Init(r *Runtime) {
	if r != nil && r.sim != nil {
		m.sim = r.sim.newLock("RWMutex")
	}
}

// Lock waits until nobody holds the lock and takes it for writing.
func (m *RWMutex) Lock() {
	if m.sim != nil {
		m.sim.lock()
		return
	}
	m.real.Lock()
}

// TryLock takes the lock for writing if nobody holds it, and reports whether it did.
func (m *RWMutex) TryLock() bool {
	if m.sim != nil {
		return m.sim.tryLock()
	}
	return m.real.TryLock()
}

// Unlock lets go of a lock held for writing.
func (m *RWMutex) Unlock() {
	if m.sim != nil {
		m.sim.unlock()
		return
	}
	m.real.Unlock()
}

// RLock waits until no writer holds the lock, or waits for it, and takes it for reading.
func (m *RWMutex) RLock() {
	if m.sim != nil {
		m.sim.rlock()
		return
	}
	m.real.RLock()
}

// TryRLock takes the lock for reading if no writer holds it or waits for it, and reports whether it did.
func (m *RWMutex) TryRLock() bool {
	if m.sim != nil {
		return m.sim.tryRLock()
	}
	return m.real.TryRLock()
}

// RUnlock lets go of a lock held for reading.
func (m *RWMutex) RUnlock() {
	if m.sim != nil {
		m.sim.runlock()
		return
	}
	m.real.RUnlock()
}

// A Cond is a place to wait for a change of what a lock guards. Unlike the other types it must always be bound,
// with Init or InitRW, before use, and belongs to the runtime of its lock. It must not be copied after that.
type Cond struct {
	real sync.Cond
	sim  *simCond // nil: real
}

// Init binds the Cond to a mutex, itself bound to its runtime before.
func (c *Cond) Init(m *Mutex) {
	c.real.L = &m.real
	if m.sim != nil {
		c.sim = m.sim.newCond()
	}
}

// InitRW binds the Cond to an RWMutex, itself bound to its runtime before; Wait is then called with the lock
// held for writing.
func (c *Cond) InitRW(m *RWMutex) {
	c.real.L = &m.real
	if m.sim != nil {
		c.sim = m.sim.newCond()
	}
}

// Wait lets go of the lock, which the caller holds, waits for Signal or Broadcast, and takes the lock again.
// Someone else may have changed the state in between, and it may return for no reason: call it in a loop that
// looks at the state.
func (c *Cond) Wait() {
	if c.sim != nil {
		c.sim.wait(context.Background())
		return
	}
	c.real.Wait()
}

// WaitContext is Wait that also returns when ctx is done. It returns ctx.Err(), with the lock held in any case;
// if ctx is done already it does not wait. A Signal that came to a caller whose context is done goes on to another
// one that waits.
func (c *Cond) WaitContext(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.sim != nil {
		c.sim.wait(ctx)
	} else {
		c.waitReal(ctx)
	}
	err := ctx.Err()
	if err != nil {
		c.Signal() // perhaps one woke us, who will do nothing about it
	}
	return err
}

func (c *Cond) waitReal(ctx context.Context) {
	if ctx.Done() == nil {
		c.real.Wait()
		return
	}
	stop := context.AfterFunc(ctx, func() {
		c.real.L.Lock() // so that this does not fall between the check of ctx and Wait
		defer c.real.L.Unlock()
		c.real.Broadcast()
	})
	c.real.Wait()
	stop()
}

// Signal wakes one goroutine that waits, if there is any. The caller may hold the lock but need not.
func (c *Cond) Signal() {
	if c.sim != nil {
		c.sim.signal()
		return
	}
	c.real.Signal()
}

// Broadcast wakes all goroutines that wait. The caller may hold the lock but need not.
func (c *Cond) Broadcast() {
	if c.sim != nil {
		c.sim.broadcast()
		return
	}
	c.real.Broadcast()
}

// A WaitGroup counts things under way and waits for their end, as sync.WaitGroup does. The zero value belongs
// to the real runtime. It must not be copied after first use.
type WaitGroup struct {
	real sync.WaitGroup
	sim  *simGroup // nil: real
}

// Init binds the group to a runtime (nil: the real one). Call it before first use.
func (g *WaitGroup) Init(r *Runtime) {
	if r != nil && r.sim != nil {
		g.sim = r.sim.newGroup()
	}
}

// Add adds n, which may be negative, to the count. It panics if the count falls below zero. When the count is
// zero, Add with a positive n must happen before Wait.
func (g *WaitGroup) Add(n int) {
	if g.sim != nil {
		g.sim.add(n)
		return
	}
	g.real.Add(n)
}

// Done takes one from the count.
func (g *WaitGroup) Done() { g.Add(-1) }

// Wait waits until the count is zero.
func (g *WaitGroup) Wait() {
	if g.sim != nil {
		g.sim.wait()
		return
	}
	g.real.Wait()
}

// Go counts one and runs fn in a goroutine of its own, on the group's runtime, taking one from the count when it
// ends. For the name see Runtime.Go.
func (g *WaitGroup) Go(name string, fn func()) {
	g.Add(1)
	run := func() {
		defer g.Done()
		fn()
	}
	if g.sim != nil {
		g.sim.s.spawn(name, run)
		return
	}
	go run()
}

// A Semaphore limits how much of something is used at once. It is fair to nobody: a small request may overtake
// a large one that waits. It must be bound with Init before use and must not be copied after that.
type Semaphore struct {
	mu    Mutex
	freed Cond
	free  int64
}

// Init binds the semaphore to a runtime (nil: the real one) and makes n units available.
func (s *Semaphore) Init(r *Runtime, n int64) {
	s.mu.Init(r)
	s.freed.Init(&s.mu)
	s.free = n
}

// Acquire waits until n units are available and takes them. When ctx is done first, it takes none and returns
// ctx.Err().
func (s *Semaphore) Acquire(ctx context.Context, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.free < n {
		if err := s.freed.WaitContext(ctx); err != nil {
			return err
		}
	}
	s.free -= n
	return nil
}

// TryAcquire takes n units if they are available, and reports whether they were.
func (s *Semaphore) TryAcquire(n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.free < n {
		return false
	}
	s.free -= n
	return true
}

// Release gives n units back.
func (s *Semaphore) Release(n int64) {
	s.mu.Lock()
	s.free += n
	s.mu.Unlock()
	s.freed.Broadcast()
}
