package blockdev

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/uring"
)

const (
	ringBatch   = 128 // completions taken, and requests put in, at a time
	ringThreads = 8   // goroutines for what is not done in the ring
)

// A ringQueue is a queue of the uring engine: reads and writes go through the queue's own ring, everything else,
// and whatever the ring does not finish, through a few goroutines.
//
//	Submit -> waiting -> slots -> ring ~~ kernel ~~> ring -> reap -> completer
//	   |        (more than depth)                              |
//	   '-----------> pool: flush, discard, zero <-- short or interrupted transfers
//
// A slot stands for a request in the ring; its number is the operation's user data, and the table keeps request
// and buffer reachable while only the kernel knows them. The reaper frees slots and refills the ring from what
// waits, so a queue never has more than depth requests in the kernel.
type ringQueue struct {
	completer
	f     *file
	pool  threadPool
	ring  *uring.Ring
	fd    int   // in SQEs: an index into the registered files, or the descriptor
	fixed uint8 // the flag that says which

	// submitting is held while SQEs are filled and handed to the kernel. Inside it: slots.mu.
	submitting sync.Mutex

	slots struct {
		sync.Mutex // held for memory operations only
		busy       []*Request
		free       []uint32
		waiting    requestList
	}

	cqes     [ringBatch]uring.CQE // the reaper's
	finished [ringBatch]*Request
}

func newRingQueue(f *file, depth int, complete func([]*Request)) (*ringQueue, error) {
	ring, err := uring.New(uint32(depth), uring.Options{})
	if err != nil {
		return nil, err
	}
	q := &ringQueue{f: f, ring: ring, fd: f.fd}
	q.completer.init(f.rt, complete)
	q.pool.init(f, &q.completer, min(depth, ringThreads))
	q.slots.busy = make([]*Request, depth)
	q.slots.free = make([]uint32, depth)
	for i := range q.slots.free {
		q.slots.free[i] = uint32(depth - 1 - i)
	}
	if ring.RegisterFiles([]int32{int32(f.fd)}) == nil {
		q.fd, q.fixed = 0, uring.FixedFile
	}
	if err := ring.Start(q.reap); err != nil {
		ring.Close()
		return nil, err
	}
	return q, nil
}

func (q *ringQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	var ring, slow, settled requestList
	for _, r := range reqs {
		r.done = 0
		r.Err = q.f.info.Check(r)
		switch {
		case r.Err != nil:
			settled.push(r)
		case r.Op == OpRead || r.Op == OpWrite && (r.Flags&FUA == 0 || !q.f.noDsync.Load()):
			if len(r.Buf) == 0 {
				settled.push(r)
			} else {
				ring.push(r)
			}
		default:
			slow.push(r)
		}
	}
	if slow.n > 0 {
		q.pool.add(&slow)
	}
	if ring.n > 0 {
		q.slots.Lock()
		q.slots.waiting.append(&ring)
		q.slots.Unlock()
		q.pump()
	}
	for r := settled.pop(); r != nil; r = settled.pop() {
		q.finish(r)
	}
}

// pump puts waiting requests into the ring while slots are free, and hands them to the kernel.
func (q *ringQueue) pump() {
	q.submitting.Lock()
	defer q.submitting.Unlock()
	for {
		var taken [ringBatch]uint32
		n, more := q.fillSlots(&taken)
		if n == 0 {
			return
		}
		for _, slot := range taken[:n] {
			q.prepare(slot)
		}
		if err := q.ring.Submit(); err != nil {
			q.takeBack()
		}
		if !more {
			return
		}
	}
}

// fillSlots moves waiting requests to free slots and returns which; more: there are more of both.
func (q *ringQueue) fillSlots(taken *[ringBatch]uint32) (n int, more bool) {
	s := &q.slots
	s.Lock()
	defer s.Unlock()
	for n < len(taken) && s.waiting.n > 0 && len(s.free) > 0 {
		slot := s.free[len(s.free)-1]
		s.free = s.free[:len(s.free)-1]
		s.busy[slot] = s.waiting.pop()
		taken[n] = slot
		n++
	}
	return n, s.waiting.n > 0 && len(s.free) > 0
}

// prepare fills an SQE. There is always one: the ring has as many as there are slots, and room for twice as many
// completions.
func (q *ringQueue) prepare(slot uint32) {
	r := q.slots.busy[slot] // ours since fillSlots; the reaper gets it from the kernel
	e := q.ring.Get()
	p := r.Buf[:min(len(r.Buf), q.f.most)]
	if r.Op == OpRead {
		e.ReadAt(q.fd, p, r.Off)
	} else {
		flags := uint32(0)
		if r.Flags&FUA != 0 {
			flags = unix.RWF_DSYNC
		}
		e.WriteAt(q.fd, p, r.Off, flags)
	}
	e.Flags = q.fixed
	e.UserData = uint64(slot)
}

// takeBack gives what the kernel did not take (for want of memory, mostly) to the goroutines.
func (q *ringQueue) takeBack() {
	var slow requestList
	q.slots.Lock()
	q.ring.Withdraw(func(e *uring.SQE) { slow.push(q.vacate(uint32(e.UserData))) })
	q.slots.Unlock()
	if slow.n > 0 {
		q.pool.add(&slow)
	}
}

// vacate frees a slot and returns its request. slots is locked.
func (q *ringQueue) vacate(slot uint32) *Request {
	r := q.slots.busy[slot]
	q.slots.busy[slot] = nil
	q.slots.free = append(q.slots.free, slot)
	return r
}

// reap takes all completions there are. The ring's goroutine calls it, and nobody else.
func (q *ringQueue) reap() {
	for {
		n := q.ring.Reap(q.cqes[:])
		if n == 0 {
			return
		}
		q.slots.Lock()
		for i, c := range q.cqes[:n] {
			q.finished[i] = q.vacate(uint32(c.UserData))
		}
		refill := q.slots.waiting.n > 0
		q.slots.Unlock()
		if refill { // first, so that the device has work while we deliver
			q.pump()
		}
		var slow requestList
		whole := q.finished[:0]
		for i, c := range q.cqes[:n] {
			if r := q.finished[i]; q.settle(r, c.Res) {
				whole = append(whole, r)
			} else {
				slow.push(r)
			}
		}
		if slow.n > 0 {
			q.pool.add(&slow)
		}
		if len(whole) > 0 {
			q.finish(whole...)
		}
		clear(q.finished[:n])
	}
}

// settle takes in a result. It returns false if the request is not finished: what came back short, was
// interrupted, or cannot be done in this way goes on in a goroutine.
func (q *ringQueue) settle(r *Request, res int32) bool {
	if res >= 0 {
		r.done = int(res)
		return r.done == len(r.Buf)
	}
	switch e := unix.Errno(-res); e {
	case unix.EINTR, unix.EAGAIN, unix.ECANCELED, unix.ENOBUFS:
		return false
	case unix.EOPNOTSUPP:
		if r.Op == OpWrite && r.Flags&FUA != 0 {
			q.f.noDsync.Store(true) // from now on write and flush
			return false
		}
		r.Err = q.f.wrap(r, e)
	default:
		r.Err = q.f.wrap(r, e)
	}
	return true
}

func (q *ringQueue) Close() error {
	if !q.close() {
		return ErrClosed
	}
	q.pool.close()
	// A Submit whose requests have all completed may still be inside pump. One that comes later finds nothing to
	// do, and leaves the ring alone.
	q.submitting.Lock()
	q.submitting.Unlock() //nolint:staticcheck // waiting is all there is to do
	err := q.ring.Close()
	if e := q.f.release(); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("close a queue of %s: %w", q.f.path, err)
	}
	return nil
}
