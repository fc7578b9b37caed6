package sim

import (
	"slices"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A serial device lets writes that overlap through one after the other, as a disk must decide in the end. A
// Crashable decides twice, for what a program reads and for what a crash leaves, and not always in the same way.
type serial struct {
	blockdev.Device
	mu      rt.Mutex
	writing []*blockdev.Request // below
	held    []heldRequest       // in the order in which they came
}

type heldRequest struct {
	q *serialQueue
	r *blockdev.Request
}

func newSerial(dev blockdev.Device) *serial {
	s := &serial{Device: dev}
	s.mu.Init(s.Runtime())
	return s
}

// Runtime returns the runtime of the wrapped device.
func (s *serial) Runtime() *rt.Runtime { return blockdev.RuntimeOf(s.Device) }

// Unwrap returns the wrapped device.
func (s *serial) Unwrap() blockdev.Device { return s.Device }

// NewQueue makes a queue whose overlapping writes wait for one another, and for those of other queues.
func (s *serial) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q := &serialQueue{s: s, up: blockdev.NewCompleter(s.Runtime(), complete)}
	var err error
	q.below, err = s.Device.NewQueue(depth, q.passedBack)
	return q, err
}

type serialQueue struct {
	s     *serial
	up    *blockdev.Completer
	below blockdev.Queue
}

func (q *serialQueue) Submit(reqs []*blockdev.Request) {
	if !q.up.Begin(len(reqs)) {
		for _, r := range reqs {
			r.Err = blockdev.ErrClosed
		}
		q.up.Finish(reqs...)
		return
	}
	s := q.s
	var pass []*blockdev.Request
	s.mu.Lock()
	for _, r := range reqs {
		switch {
		case !r.Op.Writes():
		case s.busyLocked(r, len(s.held)):
			s.held = append(s.held, heldRequest{q, r})
			continue
		default:
			s.writing = append(s.writing, r)
		}
		pass = append(pass, r)
	}
	s.mu.Unlock()
	if len(pass) > 0 {
		q.below.Submit(pass)
	}
}

// busyLocked reports whether r overlaps a write below, or one of the first n that are held.
func (s *serial) busyLocked(r *blockdev.Request, n int) bool {
	overlaps := func(o *blockdev.Request) bool { return r.Off < o.Off+o.Length() && o.Off < r.Off+r.Length() }
	return slices.ContainsFunc(s.writing, overlaps) ||
		slices.ContainsFunc(s.held[:n], func(h heldRequest) bool { return overlaps(h.r) })
}

func (q *serialQueue) passedBack(done []*blockdev.Request) {
	s := q.s
	var freed []heldRequest
	s.mu.Lock()
	for _, r := range done {
		if i := slices.Index(s.writing, r); i >= 0 {
			s.writing = slices.Delete(s.writing, i, i+1)
		}
	}
	for i := 0; i < len(s.held); {
		h := s.held[i]
		if s.busyLocked(h.r, i) {
			i++
			continue
		}
		s.held = slices.Delete(s.held, i, i+1)
		s.writing = append(s.writing, h.r)
		freed = append(freed, h)
	}
	s.mu.Unlock()
	for _, h := range freed {
		h.q.below.Submit([]*blockdev.Request{h.r})
	}
	q.up.Finish(done...)
}

// Close waits for what was submitted, and ends the queue.
func (q *serialQueue) Close() error {
	if !q.up.Close() {
		return blockdev.ErrClosed
	}
	return q.below.Close()
}
