package blockdev

import (
	"slices"

	"github.com/ubcache/ubcache/internal/rt"
)

// Syncs joins the flushes, and the writes with FUA, of several IOs on one device. A device may say once only that it has
// lost writes: to one of those that are under way together, whose turn to tell of it may come after another has succeeded
// and been believed. So none returns before those that have begun before its end, and after a failure none succeeds.
type Syncs struct {
	mu    rt.Mutex
	over  rt.Cond // one is
	begun uint64
	under []uint64 // numbers of those under way
	err   error    // of the first that has failed
}

// NewSyncs makes one for IOs on dev.
func NewSyncs(dev Device) *Syncs {
	s := new(Syncs)
	s.mu.Init(RuntimeOf(dev))
	s.over.Init(&s.mu)
	return s
}

// begin returns the number of one that begins.
func (s *Syncs) begin() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun++
	s.under = append(s.under, s.begun)
	return s.begun
}

// end ends one whose own outcome is err, and returns what counts.
func (s *Syncs) end(n uint64, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	i := slices.Index(s.under, n)
	s.under = slices.Delete(s.under, i, i+1)
	s.over.Broadcast()
	for last := s.begun; s.err == nil && len(s.under) > 0 && slices.Min(s.under) <= last; {
		s.over.Wait()
	}
	if err == nil {
		err = s.err
	}
	return err
}
