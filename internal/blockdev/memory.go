package blockdev

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/rt"
)

// MemoryOptions modify Memory. The zero value is a disk with blocks of 512 bytes.
type MemoryOptions struct {
	Name          string // default "memory"
	LogicalBlock  int    // bytes, default 512
	PhysicalBlock int    // bytes, default 4096 or LogicalBlock, whichever is more
	BufferAlign   int    // bytes, default 512, as strict as a real disk; 1: any
	NoDiscard     bool   // discards are not supported
	Rotational    bool   // what Info says
	ReadOnly      bool

	Runtime *rt.Runtime // default: the real one
}

// A MemoryDevice is a disk in memory, outside Go's heap. Parts never written take no memory, so it may be
// larger than the machine's. Requests are done within Submit, whatever their number, and complete there.
type MemoryDevice struct {
	info Info
	mem  []byte
	rt   *rt.Runtime
	refs atomic.Int64 // 1 for the open device, 1 per queue; the memory goes at 0
	shut atomic.Bool

	written atomic.Bool // otherwise it still reads as zeroes
}

// Memory makes a disk of size bytes, rounded down to whole blocks, that reads as zeroes.
func Memory(size int64, o MemoryOptions) (*MemoryDevice, error) {
	if o.Name == "" {
		o.Name = "memory"
	}
	if o.LogicalBlock == 0 {
		o.LogicalBlock = 512
	}
	if o.PhysicalBlock == 0 {
		o.PhysicalBlock = max(4096, o.LogicalBlock)
	}
	if o.BufferAlign == 0 {
		o.BufferAlign = 512
	}
	if o.Runtime == nil {
		o.Runtime = rt.New()
	}
	if o.LogicalBlock < 512 || o.LogicalBlock&(o.LogicalBlock-1) != 0 || o.BufferAlign&(o.BufferAlign-1) != 0 {
		return nil, fmt.Errorf("blockdev: memory: bad block size %d or alignment %d", o.LogicalBlock, o.BufferAlign)
	}
	size &^= int64(o.LogicalBlock - 1)
	d := &MemoryDevice{
		info: Info{
			Name: o.Name, Size: size, LogicalBlock: o.LogicalBlock, PhysicalBlock: o.PhysicalBlock,
			MaxTransfer: 1 << 20, BufferAlign: o.BufferAlign, Rotational: o.Rotational, ReadOnly: o.ReadOnly,
			CanDiscard: !o.NoDiscard, DiscardZeroes: !o.NoDiscard, Direct: true, Engine: "memory",
		},
		rt: o.Runtime,
	}
	if size > 0 {
		mem, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
		if err != nil {
			return nil, fmt.Errorf("blockdev: memory for a disk of %d bytes: %w", size, err)
		}
		d.mem = mem
	}
	d.refs.Store(1)
	return d, nil
}

// Info describes the device.
func (d *MemoryDevice) Info() Info { return d.info }

// Runtime returns the runtime that the device was made with.
func (d *MemoryDevice) Runtime() *rt.Runtime { return d.rt }

// SetRuntime moves the device to another runtime, as from one simulation to the next. It must have no queues.
func (d *MemoryDevice) SetRuntime(r *rt.Runtime) { d.rt = r }

// Bytes returns the device's content itself. It is for tests: nothing guards it against requests under way, and
// it must not be used after Close.
func (d *MemoryDevice) Bytes() []byte {
	d.written.Store(true) // who knows
	return d.mem
}

// NewQueue makes a queue; depth has no effect.
func (d *MemoryDevice) NewQueue(depth int, complete func(done []*Request)) (Queue, error) {
	if d.shut.Load() {
		return nil, ErrClosed
	}
	d.refs.Add(1)
	q := &memoryQueue{dev: d}
	q.completer.init(d.rt, complete)
	return q, nil
}

// Close releases the memory once all queues are closed.
func (d *MemoryDevice) Close() error {
	if d.shut.Swap(true) {
		return ErrClosed
	}
	return d.release()
}

func (d *MemoryDevice) release() error {
	if d.refs.Add(-1) > 0 || d.mem == nil {
		return nil
	}
	mem := d.mem
	d.mem = nil
	return unix.Munmap(mem)
}

// do works on one request.
func (d *MemoryDevice) do(r *Request) error {
	if err := d.info.Check(r); err != nil {
		return err
	}
	if r.Op.Writes() && !d.written.Load() {
		d.written.Store(true)
	}
	switch r.Op {
	case OpRead:
		copy(r.Buf, d.mem[r.Off:])
	case OpWrite:
		copy(d.mem[r.Off:], r.Buf)
	case OpDiscard, OpWriteZeroes:
		d.zero(r.Off, r.Len)
	case OpFlush:
	}
	return nil
}

// zero clears a range: whole pages by giving their memory back where that is worth a system call, the rest by
// hand.
func (d *MemoryDevice) zero(off, n int64) {
	const page, least = 4096, 64 << 10
	end := off + n
	from, to := (off+page-1)&^(page-1), end&^(page-1)
	if to-from < least || unix.Madvise(d.mem[from:to], unix.MADV_DONTNEED) != nil {
		clear(d.mem[off:end])
		return
	}
	clear(d.mem[off:from])
	clear(d.mem[to:end])
}

type memoryQueue struct {
	completer
	dev *MemoryDevice
}

func (q *memoryQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	for _, r := range reqs {
		r.Err = q.dev.do(r)
	}
	q.finish(reqs...)
}

func (q *memoryQueue) Close() error {
	if !q.close() {
		return ErrClosed
	}
	return q.dev.release()
}
