package blockdev

import (
	"github.com/ubcache/ubcache/internal/rt"
)

// bounceSize is the most that one request of an IO moves through a buffer of its own.
const bounceSize = 1 << 20

// An IO does blocking operations on a device, from any number of goroutines at the same time. More than depth
// operations wait for one another. Memory need not be aligned: where it is not, data goes through a buffer.
//
// Errors wrap an *IOError that says what was asked for.
type IO struct {
	core    *ioCore
	purpose Purpose
}

type ioCore struct {
	dev   Device
	info  Info
	queue Queue
	pool  *Pool
	syncs *Syncs

	mu     rt.Mutex
	freed  rt.Cond // a slot is free
	free   *ioSlot
	closed bool
}

// An ioSlot carries one operation.
type ioSlot struct {
	req   Request
	batch [1]*Request
	next  *ioSlot

	mu       rt.Mutex
	finished rt.Cond
	done     bool
}

// NewIO makes an IO with a queue of its own. Close it before the device.
func NewIO(dev Device, depth int) (*IO, error) {
	depth = max(depth, 1)
	c := &ioCore{dev: dev, info: dev.Info(), pool: NewPool(PoolOptions{MaxFree: 4 * bounceSize})}
	r := RuntimeOf(dev)
	c.mu.Init(r)
	c.freed.Init(&c.mu)
	for range depth {
		s := &ioSlot{next: c.free}
		s.batch[0] = &s.req
		s.mu.Init(r)
		s.finished.Init(&s.mu)
		c.free = s
	}
	q, err := dev.NewQueue(depth, ioComplete)
	if err != nil {
		return nil, err
	}
	c.queue = q
	return &IO{core: c}, nil
}

// RuntimeOf returns the runtime that the device uses: what its Runtime method says, or the real one.
func RuntimeOf(dev Device) *rt.Runtime {
	if d, ok := dev.(interface{ Runtime() *rt.Runtime }); ok {
		return d.Runtime()
	}
	return rt.New()
}

func ioComplete(done []*Request) {
	for _, r := range done {
		s := r.Owner.(*ioSlot)
		s.mu.Lock()
		s.done = true
		s.mu.Unlock()
		s.finished.Signal()
	}
}

// WithPurpose returns an IO on the same queue whose requests are made for p. Closing either closes both.
func (o *IO) WithPurpose(p Purpose) *IO { return &IO{core: o.core, purpose: p} }

// Join makes flushes and writes with FUA part of s. It comes before they are made.
func (o *IO) Join(s *Syncs) { o.core.syncs = s }

// Device returns the device.
func (o *IO) Device() Device { return o.core.dev }

// ReadAt fills p from byte offset off. Neither needs to be aligned; the range must lie within the device.
func (o *IO) ReadAt(p []byte, off int64) error {
	c := o.core
	block := int64(c.info.LogicalBlock)
	if off < 0 || int64(len(p)) > c.info.Size || off > c.info.Size-int64(len(p)) {
		return &IOError{Device: c.info.Name, Op: OpRead, Off: off, Len: int64(len(p)), Err: ErrOutOfRange}
	}
	if (off|int64(len(p)))&(block-1) == 0 && aligned(p, c.info.BufferAlign) {
		return o.do(OpRead, off, 0, p, 0)
	}
	if len(p) == 0 {
		return nil
	}
	from := off &^ (block - 1)
	size := (off + int64(len(p)) - from + block - 1) &^ (block - 1)
	b := c.pool.Get(int(min(size, max(bounceSize, block))))
	defer b.Release()
	for len(p) > 0 {
		from = off &^ (block - 1)
		skip := off - from
		size = min((skip+int64(len(p))+block-1)&^(block-1), int64(len(b.Data)))
		if err := o.do(OpRead, from, 0, b.Data[:size], 0); err != nil {
			return err
		}
		n := copy(p, b.Data[skip:size])
		p = p[n:]
		off += int64(n)
	}
	return nil
}

// WriteAt stores p at byte offset off. Both off and len(p) are multiples of the device's LogicalBlock; otherwise
// it returns ErrUnaligned and stores nothing. With FUA it is durable on return.
//
// Data in unaligned memory is written in pieces of up to 1 MiB, in order; after an error some may be stored.
func (o *IO) WriteAt(p []byte, off int64, flags Flags) error {
	c := o.core
	r := Request{Op: OpWrite, Off: off, Buf: p}
	unlimited := c.info
	unlimited.BufferAlign = 1
	if err := unlimited.Check(&r); err != nil { // before anything is stored
		return ioError(c.info.Name, &r, err)
	}
	if aligned(p, c.info.BufferAlign) {
		return o.do(OpWrite, off, 0, p, flags)
	}
	b := c.pool.Get(min(len(p), max(bounceSize, c.info.LogicalBlock)))
	defer b.Release()
	for len(p) > 0 {
		n := copy(b.Data, p)
		if err := o.do(OpWrite, off, 0, b.Data[:n], flags); err != nil {
			return err
		}
		p = p[n:]
		off += int64(n)
	}
	return nil
}

// Flush makes durable all writes that had completed when it was called.
func (o *IO) Flush() error { return o.do(OpFlush, 0, 0, nil, 0) }

// Discard lets the device forget n bytes at off, both multiples of LogicalBlock. It fails with ErrNotSupported
// where the device cannot.
func (o *IO) Discard(off, n int64) error { return o.do(OpDiscard, off, n, nil, 0) }

// WriteZeroes makes n bytes at off read as zeroes, both multiples of LogicalBlock.
func (o *IO) WriteZeroes(off, n int64, flags Flags) error {
	return o.do(OpWriteZeroes, off, n, nil, flags)
}

// do carries out one request and waits for it.
func (o *IO) do(op Op, off, length int64, buf []byte, flags Flags) error {
	c := o.core
	s := c.take()
	if s == nil {
		return &IOError{Device: c.info.Name, Op: op, Off: off, Len: max(length, int64(len(buf))), Err: ErrClosed}
	}
	s.done = false
	s.req = Request{Op: op, Off: off, Len: length, Buf: buf, Flags: flags, Purpose: o.purpose, Owner: s}
	var sync uint64
	if c.syncs != nil && (op == OpFlush || flags&FUA != 0) {
		sync = c.syncs.begin()
	}
	c.queue.Submit(s.batch[:])
	s.mu.Lock()
	for !s.done {
		s.finished.Wait()
	}
	s.mu.Unlock()
	err := s.req.Err
	if _, ok := err.(*IOError); err != nil && !ok {
		err = ioError(c.info.Name, &s.req, err)
	}
	s.req = Request{} // keeps nothing alive
	c.give(s)
	if sync > 0 {
		err = c.syncs.end(sync, err)
	}
	return err
}

// take returns a free slot, waiting for one, or nil after Close.
func (c *ioCore) take() *ioSlot {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.free == nil && !c.closed {
		c.freed.Wait()
	}
	if c.closed {
		return nil
	}
	s := c.free
	c.free, s.next = s.next, nil
	return s
}

func (c *ioCore) give(s *ioSlot) {
	c.mu.Lock()
	s.next, c.free = c.free, s
	c.mu.Unlock()
	c.freed.Signal()
}

// Close waits for the operations under way and ends the queue; the device stays open. Operations that begin
// later, or that wait for a slot, fail with ErrClosed.
func (o *IO) Close() error {
	c := o.core
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.freed.Broadcast()
	err := c.queue.Close()
	c.pool.Trim(0)
	return err
}
