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

// Enter takes the set's lock when requests may look at the index: not while a collection keeps them out.
func (s *Set) Enter() {
	s.mu.Lock()
	if s.gate != nil {
		s.passLocked()
	}
}

// passLocked waits until the gate is open.
func (s *Set) passLocked() {
	for g := s.gate; g != nil && g.closed; g = s.gate {
		g.opened.Wait()
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
