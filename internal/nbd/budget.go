package nbd

import (
	"sync"
	"sync/atomic"
)

// budget is a number of bytes that connections share, fairly:
//
//   - The first quantum bytes that a connection holds are granted whatever the others hold. So requests of that size
//     never wait for other connections, and what is held altogether may be larger than the budget by that much for
//     each connection.
//   - Beyond, a connection may hold as much as it leaves free: what it holds and asks for must not be more than half
//     of what is free. So those that hold on to what they have cannot take all.
//   - Who holds nothing and asks for more than that waits in line. The first in line is served as soon as that
//     leaves a sixteenth of the whole budget free, or nearly nothing is held. While there is a line, all others may
//     hold a sixteenth of what is free, not half: they pass it, but do not keep it waiting as long as not more than
//     about a hundred of them take all they can get.
//
// Who holds something and asks for too much waits until enough of it is given back. It is not in line: it may be
// its own client that takes no replies.
type budget struct {
	total   int64
	free    atomic.Int64 // negative when quanta were granted out of nothing
	waiting atomic.Int32 // length of queue

	mu    sync.Mutex
	queue []*account // those that wait, oldest first; guarded by mu
}

// A connection may hold quantum bytes in any case. That is not more than it has for its input buffer anyway.
const quantum = 64 << 10

// What a connection may hold is the free bytes divided by these, unless it is first in line.
const (
	divisor       = 2
	divisorPassed = 16 // with others in line
)

// An account is what one connection has of a budget. It asks for one thing at a time.
type account struct {
	held    atomic.Int64
	wants   int64         // while in the queue; guarded by budget.mu
	granted chan struct{} // capacity 1
}

func newBudget(total int64) *budget {
	b := &budget{total: total}
	b.free.Store(total)
	return b
}

func newAccount() *account { return &account{granted: make(chan struct{}, 1)} }

// tryTake takes n bytes if a may have them at once.
func (b *budget) tryTake(a *account, n int64) bool {
	if b.waiting.Load() == 0 {
		return b.grab(a, n, divisor, false)
	}
	return b.grab(a, n, divisorPassed, false)
}

// take takes n bytes, which must not be more than the whole budget, and waits until a may have them or cancel is
// closed; then it returns false.
func (b *budget) take(a *account, n int64, cancel <-chan struct{}) bool {
	b.mu.Lock()
	a.wants = n
	b.queue = append(b.queue, a)
	b.waiting.Add(1)
	b.grantLocked()
	b.mu.Unlock()
	select {
	case <-a.granted:
		return true
	case <-cancel:
	}
	b.mu.Lock()
	for i := range b.queue {
		if b.queue[i] == a {
			b.queue = append(b.queue[:i], b.queue[i+1:]...)
			b.waiting.Add(-1)
			b.grantLocked() // there may be another first in line now
			b.mu.Unlock()
			return false
		}
	}
	b.mu.Unlock()
	<-a.granted // at the same moment
	b.give(a, n)
	return false
}

// give returns n bytes.
//
// No wake-up is lost: who waits has counted itself in waiting before it looks at free and held a last time, and
// here they change before waiting is looked at.
func (b *budget) give(a *account, n int64) {
	a.held.Add(-n)
	b.free.Add(n)
	if b.waiting.Load() != 0 {
		b.mu.Lock()
		b.grantLocked()
		b.mu.Unlock()
	}
}

// grantLocked serves those that wait as far as the rules let it.
func (b *budget) grantLocked() {
	left := b.queue[:0]
	line := false // someone older is in line
	for _, a := range b.queue {
		inLine := a.held.Load() == 0
		div := int64(divisor)
		if line {
			div = divisorPassed
		}
		if b.grab(a, a.wants, div, inLine && !line) {
			b.waiting.Add(-1)
			a.granted <- struct{}{} // capacity 1, and a waits for one grant
			continue
		}
		line = line || inLine
		left = append(left, a)
	}
	clear(b.queue[len(left):])
	b.queue = left
}

// grab takes n bytes for a if it may hold its share, that is free/div, or is first in line. What a holds may
// become less at the same time, but not more.
func (b *budget) grab(a *account, n, div int64, first bool) bool {
	for {
		free := b.free.Load()
		held := a.held.Load()
		rest := b.total / 16
		ok := held+n <= quantum || held+n <= free/div ||
			first && held == 0 && (n <= free-rest || free >= b.total-rest)
		if !ok {
			return false
		}
		if b.free.CompareAndSwap(free, free-n) {
			a.held.Add(n)
			return true
		}
	}
}
