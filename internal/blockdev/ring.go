package blockdev

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/uring"
)

const (
	ringBatch   = 128 // completions taken, and requests put in, at a time
	ringThreads = 4   // threads for what is not done in the ring
)

// A ringQueue is a queue of the uring engine. Whatever a ring can do goes through the queue's own ring, the rest
// through a few threads.
//
//	Submit -> waiting -> slots -> ring ~~ kernel ~~> ring -> reap -> completer
//	   |        (more than depth)     ^                  |  ^
//	   |                              '--- second step --'  | handed back
//	   '-----------> pool: discards of block devices, ------'
//	                 and what came back short or refused
//
// A slot stands for a request in the ring; its number is the operation's user data, and the table keeps request
// and buffer reachable while only the kernel knows them. The reaper frees slots and refills the ring from what
// waits, so a queue never has more than depth requests in the kernel.
//
// A thread that has put operations into a ring must not sleep in the kernel where signals cannot reach it, as it
// does in fdatasync, fallocate, or a read from a disk: the kernel completes what a thread has submitted in that
// same thread, and until it wakes up, none of that completes. Any goroutine may run on a thread that has
// submitted. So flushes and zeroing go through the ring, where the kernel has threads of its own for them, and
// what cannot is done on threads set apart, which hand their results to the reaper and never submit.
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
		handedBack requestList // by pool
	}

	cqes     [ringBatch]uring.CQE // the reaper's
	finished [ringBatch]*Request
}

// An outcome is what settle makes of a result.
type outcome uint8

const (
	complete  outcome = iota
	again             // another operation in the ring has to follow
	elsewhere         // goes on in the pool
)

func newRingQueue(f *file, depth int, complete func([]*Request)) (*ringQueue, error) {
	ring, err := uring.New(uint32(depth), uring.Options{})
	if err != nil {
		return nil, err
	}
	q := &ringQueue{f: f, ring: ring, fd: f.fd}
	q.completer.init(f.rt, complete)
	q.pool.init(f, min(depth, ringThreads), q.handBack)
	q.pool.apart = true
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
		case r.Err != nil || q.f.nothingToDo(r):
			settled.push(r)
		case q.f.ringCan(r):
			ring.push(r)
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
	switch {
	case r.Op == OpRead:
		e.ReadAt(q.fd, r.Buf[:min(len(r.Buf), q.f.most)], r.Off)
	case r.Op == OpWrite:
		flags := uint32(0)
		if r.Flags&FUA != 0 {
			flags = unix.RWF_DSYNC
		}
		e.WriteAt(q.fd, r.Buf[:min(len(r.Buf), q.f.most)], r.Off, flags)
	case r.Op == OpFlush || r.done == stepFlush:
		e.Fdatasync(q.fd)
	default:
		e.Fallocate(q.fd, q.f.allocMode(r)|unix.FALLOC_FL_KEEP_SIZE, r.Off, r.Len)
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

// handBack gives the reaper a request that the pool has finished.
func (q *ringQueue) handBack(r *Request) {
	q.slots.Lock()
	q.slots.handedBack.push(r)
	q.slots.Unlock()
	q.ring.Wake()
}

// reap takes all completions there are. The ring's goroutine calls it, and nobody else.
func (q *ringQueue) reap() {
	for {
		n := q.ring.Reap(q.cqes[:])
		var back requestList
		q.slots.Lock()
		for i, c := range q.cqes[:n] {
			q.finished[i] = q.vacate(uint32(c.UserData))
		}
		back.append(&q.slots.handedBack)
		refill := n > 0 && q.slots.waiting.n > 0
		q.slots.Unlock()
		if n == 0 && back.n == 0 {
			return
		}
		if refill { // first, so that the device has work while we deliver
			q.pump()
		}
		var slow, next requestList
		whole := q.finished[:0]
		for i, c := range q.cqes[:n] {
			r := q.finished[i]
			switch q.settle(r, c.Res) {
			case complete:
				whole = append(whole, r)
			case again:
				next.push(r)
			case elsewhere:
				slow.push(r)
			}
		}
		if slow.n > 0 {
			q.pool.add(&slow)
		}
		if next.n > 0 {
			q.slots.Lock()
			q.slots.waiting.append(&next)
			q.slots.Unlock()
			q.pump()
		}
		if len(whole) > 0 {
			q.finish(whole...)
		}
		clear(q.finished[:n])
		for r := back.pop(); r != nil; r = back.pop() {
			q.finish(r)
		}
	}
}

// settle takes in a result and says how the request goes on: what came back short, was interrupted, or cannot be
// done in this way goes to the pool.
func (q *ringQueue) settle(r *Request, res int32) outcome {
	if res >= 0 {
		switch {
		case r.Op == OpRead || r.Op == OpWrite:
			if r.done = int(res); r.done < len(r.Buf) {
				return elsewhere
			}
		case r.Op != OpFlush && r.Flags&FUA != 0 && r.done != stepFlush:
			r.done = stepFlush
			return again
		}
		return complete
	}
	e := unix.Errno(-res)
	switch {
	case e == unix.EINTR, e == unix.EAGAIN, e == unix.ECANCELED, e == unix.ENOBUFS:
		return elsewhere
	case isUnsupported(e) && r.Op == OpWrite && r.Flags&FUA != 0:
		q.f.noDsync.Store(true) // from now on write and flush
		return elsewhere
	case isUnsupported(e) && (r.Op == OpDiscard || r.Op == OpWriteZeroes):
		return elsewhere // there are other ways
	}
	r.Err = q.f.wrap(r, e)
	return complete
}

func (q *ringQueue) Close() error {
	if !q.close() {
		return ErrClosed
	}
	q.pool.close()
	q.lastSubmitters()
	err := q.ring.Close()
	if e := q.f.release(); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("close a queue of %s: %w", q.f.path, err)
	}
	return nil
}

// lastSubmitters waits for those inside pump, whose requests may all have completed. Who comes there later finds
// nothing to do, and leaves the ring alone.
func (q *ringQueue) lastSubmitters() {
	q.submitting.Lock()
	defer q.submitting.Unlock()
}
