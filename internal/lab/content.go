package lab

import (
	"encoding/binary"
	"fmt"
)

// A Content knows what each block of a volume must hold. Each sector of a block that was written carries a stamp:
//
//	0 run u64     8 block u64     16 generation u32     20 sector in the block u32
//
// so that a read tells whether it got the right block, whole, in the newest version, from this run. It costs some
// nanoseconds a sector. The rest of a sector is whatever the buffer held.
//
// A block that somebody has claimed is nobody else's until it is released, so that what a read must return is never in
// doubt. Methods must not be called at the same time.
type Content struct {
	run   uint64
	block int
	blank bool
	gen   []uint32 // of each block, 0: never written
	busy  []uint64 // a bit for each block
}

const stampBytes = 24

// NewContent describes a volume that nobody has written to, of size bytes in blocks of block bytes. run tells its stamps from
// those of other runs. With blank it reads as zeroes.
func NewContent(run uint64, size int64, block int, blank bool) *Content {
	n := size / int64(block)
	return &Content{run: run, block: block, blank: blank, gen: make([]uint32, n), busy: make([]uint64, (n+63)/64)}
}

// Blocks returns how many there are.
func (c *Content) Blocks() int64 { return int64(len(c.gen)) }

// Claim claims the first block from n on that nobody has, and returns it. Some block must be free.
func (c *Content) Claim(n int64) int64 {
	for c.busy[n/64]&(1<<(n%64)) != 0 {
		if n++; n == c.Blocks() {
			n = 0
		}
	}
	c.busy[n/64] |= 1 << (n % 64)
	return n
}

// Release gives a block back.
func (c *Content) Release(n int64) { c.busy[n/64] &^= 1 << (n % 64) }

// Write makes p the next version of block n, which the caller has claimed.
func (c *Content) Write(p []byte, n int64) {
	c.gen[n]++
	for s := 0; s*512 < c.block; s++ {
		b := p[s*512 : s*512+stampBytes]
		binary.LittleEndian.PutUint64(b, c.run)
		binary.LittleEndian.PutUint64(b[8:], uint64(n))
		binary.LittleEndian.PutUint32(b[16:], c.gen[n])
		binary.LittleEndian.PutUint32(b[20:], uint32(s))
	}
}

// Check says what is wrong with what a read of block n has returned, which the caller has claimed.
func (c *Content) Check(p []byte, n int64) error {
	want := c.gen[n]
	if want == 0 && !c.blank {
		return nil
	}
	for s := 0; s*512 < c.block; s++ {
		b := p[s*512 : s*512+stampBytes]
		run, block := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
		gen, sector := binary.LittleEndian.Uint32(b[16:]), binary.LittleEndian.Uint32(b[20:])
		switch {
		case want == 0 && run|block|uint64(gen)|uint64(sector) == 0:
		case want != 0 && run == c.run && block == uint64(n) && gen == want && sector == uint32(s):
		case run == c.run:
			return fmt.Errorf("wrong data: sector %d of block %d, version %d, where version %d of sector %d of block %d was written last", sector, block, gen, want, s, n)
		case want == 0:
			return fmt.Errorf("wrong data: sector %d of block %d has something, and was never written", s, n)
		default:
			return fmt.Errorf("wrong data: sector %d of block %d has not what this run wrote, version %d", s, n, want)
		}
	}
	return nil
}
