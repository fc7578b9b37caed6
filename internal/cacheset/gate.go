package cacheset

import (
	"time"

	"github.com/ubcache/ubcache/internal/rt"
)

// A gate is what the kernel's write lock on the root is to a collection: while it is shut nobody looks anything up in the
// index or changes it, but the collector. It is there only while a policy collects; else a lookup meets a nil pointer.
//
// It is no lock: the set's lock is let go by whoever waits, and by the collector while it reads and writes nodes. Whoever
// holds buckets or journal room while they wait holds nothing that the collector waits for: it gives up where it would
// have to wait for a bucket, and journal entries are written without passing the gate.
type gate struct {
	closed bool
	since  time.Duration
	opened rt.Cond
}

// Enter takes the set's lock on behalf of a request when it may look at the index: not while a collection keeps it out.
func (s *Set) Enter() {
	s.LockRequest()
	s.passLocked(true)
}

// PassLocked waits while a collection keeps a number of requests out. It lets go of the lock meanwhile.
func (s *Set) PassLocked(requests int) {
	if s.keptOutLocked() {
		begin := s.rt.Now()
		s.passLocked(false)
		s.StalledEach(StallGate, s.rt.Now()-begin, requests)
	}
}

// passLocked waits until the gate is open.
func (s *Set) passLocked(request bool) {
	if !s.keptOutLocked() {
		return
	}
	begin := s.rt.Now()
	for s.keptOutLocked() {
		s.gate.opened.Wait()
	}
	if request {
		s.stalls.add(StallGate, s.rt.Now()-begin)
	}
}

// keptOutLocked reports whether the gate is shut.
func (s *Set) keptOutLocked() bool { return s.gate != nil && s.gate.closed }

func (g *gate) shutLocked(now time.Duration) {
	g.closed, g.since = true, now
}

// openLocked lets everybody in who waits. It returns how long they could not.
func (g *gate) openLocked(now time.Duration) time.Duration {
	g.closed = false
	g.opened.Broadcast()
	return now - g.since
}
