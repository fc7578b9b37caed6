package blockdev

import (
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// Headroom is the room before each Buffer's Data, in bytes, that Header hands out.
	Headroom = 64

	pageSize = 4096

	minClass, maxClass = 12, 22 // buffers of 4 KiB to 4 MiB are kept for reuse; larger ones are mapped each time
	numClasses         = maxClass - minClass + 1
)

// PoolOptions modify NewPool.
type PoolOptions struct {
	// MaxFree is how many bytes of free buffers are kept for reuse; what is released beyond goes back to the
	// system. Default 64 MiB.
	MaxFree int64
}

// A Pool hands out page-aligned buffers outside Go's heap, which the collector neither scans nor counts. All
// methods may be called by several goroutines at the same time.
//
//	      one mapping per buffer
//	|-------------------|hhhh|dddddddddddddddddddd|
//	^ page              ^    ^ page: Data         ^ Data's capacity: a power of two, 4 KiB or more
//	                    Headroom
//
// A buffer belongs to whoever called Get until it is given to someone else or released. Nothing releases it by
// itself: one forgotten is lost for ever, and shows in Stats; under the build tag invariants, Leaks tells where
// it came from.
//
// Free buffers lie in shards, so that goroutines seldom meet. A goroutine whose shard is empty takes half of
// another's: a producer and a consumer on different shards move buffers in bulk.
type Pool struct {
	maxFree   int64
	freeBytes atomic.Int64
	inUse     atomic.Int64 // buffers handed out
	shards    []poolShard  // a power of two
	leaks     leakTracker
}

type poolShard struct {
	mu   sync.Mutex
	free [numClasses]bufferStack
	_    [64]byte
}

// A bufferStack is a list of free buffers of one class, the one used last on top.
type bufferStack struct {
	top *Buffer
	n   int
	low int // the least n since the last TrimIdle: these have not been needed
}

// A Buffer is a piece of memory from a Pool.
type Buffer struct {
	// Data is what was asked for: page-aligned, of the length given to Get. What it holds at first is
	// undefined.
	Data []byte

	pool  *Pool
	mem   []byte // the whole mapping
	next  *Buffer
	class int8 // -1: not kept
	free  atomic.Bool
}

// NewPool makes an empty pool.
func NewPool(o PoolOptions) *Pool {
	if o.MaxFree == 0 {
		o.MaxFree = 64 << 20
	}
	n := min(1<<bits.Len(uint(runtime.NumCPU()-1)), 16)
	return &Pool{maxFree: o.MaxFree, shards: make([]poolShard, n)}
}

// Get returns a buffer with size bytes of Data. It allocates nothing when there is a free one to reuse, and
// panics when the system refuses memory, as the Go heap does.
func (p *Pool) Get(size int) *Buffer {
	if size < 0 {
		panic("blockdev: Pool.Get with a negative size")
	}
	class := classOf(size)
	b := p.take(class)
	if b == nil {
		b = p.grow(class, size)
	}
	b.Data = b.mem[pageSize : pageSize+size]
	b.free.Store(false)
	p.inUse.Add(1)
	p.leaks.got(b)
	return b
}

// Header returns the n bytes just before Data, for a protocol header to be sent together with it; n is at most
// Headroom.
func (b *Buffer) Header(n int) []byte {
	if n > Headroom {
		panic("blockdev: header too large for the headroom")
	}
	return b.mem[pageSize-n : pageSize : pageSize]
}

// WithHeader returns one slice of Header(n) and the first m bytes of Data.
func (b *Buffer) WithHeader(n, m int) []byte {
	if n > Headroom || m > cap(b.Data) {
		panic("blockdev: header or data too large for the buffer")
	}
	return b.mem[pageSize-n : pageSize+m]
}

// Release gives the buffer back. Nothing of it may be used afterwards. Releasing it twice panics.
func (b *Buffer) Release() {
	if b.free.Swap(true) {
		panic("blockdev: a buffer was released twice")
	}
	p := b.pool
	p.inUse.Add(-1)
	p.leaks.released(b)
	b.Data = nil
	size := int64(len(b.mem))
	if b.class < 0 || p.freeBytes.Add(size) > p.maxFree {
		if b.class >= 0 {
			p.freeBytes.Add(-size)
		}
		b.unmap()
		return
	}
	s := p.shard()
	s.mu.Lock()
	s.free[b.class].push(b)
	s.mu.Unlock()
}

// PoolStats is what a pool holds.
type PoolStats struct {
	InUse     int64 // buffers handed out and not released: 0 when all users have ended, or some leaked
	FreeBytes int64 // mapped, for reuse
}

// Stats returns what the pool holds now.
func (p *Pool) Stats() PoolStats {
	return PoolStats{InUse: p.inUse.Load(), FreeBytes: p.freeBytes.Load()}
}

// Trim gives free buffers back to the system until at most keep bytes of them are left.
func (p *Pool) Trim(keep int64) {
	for i := range p.shards {
		for class := numClasses - 1; class >= 0; class-- {
			for p.freeBytes.Load() > keep {
				if !p.dropOne(&p.shards[i], class) {
					break
				}
			}
		}
	}
}

// TrimIdle gives back the free buffers that nobody has needed since the last call. Called every few seconds it
// makes the pool follow the load.
func (p *Pool) TrimIdle() {
	for i := range p.shards {
		s := &p.shards[i]
		for class := range s.free {
			s.mu.Lock()
			idle := s.free[class].low
			s.mu.Unlock()
			for ; idle > 0 && p.dropOne(s, class); idle-- {
			}
			s.mu.Lock()
			s.free[class].low = s.free[class].n
			s.mu.Unlock()
		}
	}
}

func (p *Pool) dropOne(s *poolShard, class int) bool {
	s.mu.Lock()
	b := s.free[class].pop()
	s.mu.Unlock()
	if b == nil {
		return false
	}
	p.freeBytes.Add(-int64(len(b.mem)))
	b.unmap()
	return true
}

// take returns a free buffer of the class, or nil.
func (p *Pool) take(class int8) *Buffer {
	if class < 0 {
		return nil
	}
	home := p.shard()
	home.mu.Lock()
	b := home.free[class].pop()
	home.mu.Unlock()
	if b == nil {
		b = p.steal(home, class)
	}
	if b != nil {
		p.freeBytes.Add(-int64(len(b.mem)))
	}
	return b
}

// steal moves half of another shard's buffers, at most 32, to home and returns one of them. The locks are taken
// one after the other, never both.
func (p *Pool) steal(home *poolShard, class int8) *Buffer {
	if p.freeBytes.Load() == 0 {
		return nil
	}
	for i := range p.shards {
		s := &p.shards[i]
		if s == home {
			continue
		}
		var got bufferStack
		s.mu.Lock()
		for n := min((s.free[class].n+1)/2, 32); n > 0; n-- {
			got.push(s.free[class].pop())
		}
		s.mu.Unlock()
		b := got.pop()
		if b == nil {
			continue
		}
		if got.n > 0 {
			home.mu.Lock()
			for c := got.pop(); c != nil; c = got.pop() {
				home.free[class].push(c)
			}
			home.mu.Unlock()
		}
		return b
	}
	return nil
}

// grow maps a new buffer.
func (p *Pool) grow(class int8, size int) *Buffer {
	n := (size + pageSize - 1) &^ (pageSize - 1)
	if class >= 0 {
		n = 1 << (int(class) + minClass)
	}
	mem, err := unix.Mmap(-1, 0, pageSize+n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(fmt.Sprintf("blockdev: no memory for a buffer of %d bytes: %v", n, err))
	}
	return &Buffer{pool: p, mem: mem, class: class}
}

func (b *Buffer) unmap() {
	if err := unix.Munmap(b.mem); err != nil {
		panic(fmt.Sprintf("blockdev: unmapping a buffer: %v", err)) // the address is ours: cannot happen
	}
	b.mem = nil
}

// shard returns the shard for the calling goroutine: goroutines have different stacks, and mostly keep them.
func (p *Pool) shard() *poolShard {
	var here byte
	h := uint64(uintptr(unsafe.Pointer(&here))>>11) * 0x9e3779b97f4a7c15
	return &p.shards[h>>32&uint64(len(p.shards)-1)]
}

// classOf returns the size class for size bytes of data, or -1 if buffers of that size are not kept.
func classOf(size int) int8 {
	if size <= 1<<minClass {
		return 0
	}
	c := bits.Len(uint(size-1)) - minClass
	if c >= numClasses {
		return -1
	}
	return int8(c)
}

func (s *bufferStack) push(b *Buffer) {
	b.next, s.top = s.top, b
	s.n++
}

func (s *bufferStack) pop() *Buffer {
	b := s.top
	if b == nil {
		return nil
	}
	s.top, b.next = b.next, nil
	s.n--
	s.low = min(s.low, s.n)
	return b
}
