package nbd

import (
	"sync"
	"sync/atomic"
)

// budget is a number of bytes that connections share. Who asks for more than is free waits its turn, first come
// first served, so that large requests are not starved by small ones.
type budget struct {
	free    atomic.Int64
	waiting atomic.Int32

	mu    sync.Mutex
	queue []*budgetWaiter // guarded by mu
}

type budgetWaiter struct {
	n       int64
	granted chan struct{}
}

// tryTake takes n bytes if they are free and nobody waits.
func (b *budget) tryTake(n int64) bool {
	if b.waiting.Load() != 0 {
		return false
	}
	if b.free.Add(-n) >= 0 {
		return true
	}
	b.give(n)
	return false
}

// take takes n bytes, which must not be more than the whole budget, and waits until they are free or cancel is
// closed; then it returns false.
func (b *budget) take(n int64, cancel <-chan struct{}) bool {
	w := &budgetWaiter{n: n, granted: make(chan struct{})}
	b.mu.Lock()
	b.queue = append(b.queue, w)
	b.waiting.Add(1)
	b.grantLocked()
	b.mu.Unlock()
	select {
	case <-w.granted:
		return true
	case <-cancel:
	}
	b.mu.Lock()
	for i := range b.queue {
		if b.queue[i] == w {
			b.queue = append(b.queue[:i], b.queue[i+1:]...)
			b.waiting.Add(-1)
			b.grantLocked()
			b.mu.Unlock()
			return false
		}
	}
	b.mu.Unlock()
	b.give(n) // it was granted at the same moment
	return false
}

// give returns n bytes.
func (b *budget) give(n int64) {
	b.free.Add(n)
	if b.waiting.Load() != 0 {
		b.mu.Lock()
		b.grantLocked()
		b.mu.Unlock()
	}
}

// grantLocked serves the waiters at the head of the queue as far as the bytes go.
func (b *budget) grantLocked() {
	for len(b.queue) > 0 {
		w := b.queue[0]
		if b.free.Add(-w.n) < 0 {
			// A give between these two sees waiting != 0 and comes here itself, after us.
			b.free.Add(w.n)
			return
		}
		b.queue = b.queue[1:]
		b.waiting.Add(-1)
		close(w.granted)
	}
}
