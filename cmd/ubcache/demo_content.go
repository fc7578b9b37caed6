package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"
)

// What the demo stores says what it is: each sector of a block carries the number of the block and its own, the
// version, and words that follow from these and from a number drawn for each run. So a read tells whether it got
// the right block, whole, and in which version, and whether it got it from this run.
const (
	demoBlock   = 4096
	demoSector  = 512
	demoSectors = demoBlock / demoSector
)

// demoContent knows what was written to each block, and so what a read may return.
type demoContent struct {
	run    uint64          // drawn for this run
	sent   []atomic.Uint32 // the newest version of each block that was sent to be written
	stands []atomic.Uint32 // the newest one that a write was acknowledged for, or a read has returned
	busy   []atomic.Bool   // a write is under way
}

// newDemoContent describes blocks that all have version 0.
func newDemoContent(run uint64, blocks int) *demoContent {
	return &demoContent{run: run, sent: make([]atomic.Uint32, blocks), stands: make([]atomic.Uint32, blocks), busy: make([]atomic.Bool, blocks)}
}

func (c *demoContent) blocks() int { return len(c.sent) }

// fill writes a version of a block into p.
func (c *demoContent) fill(p []byte, block int, version uint32) {
	for s := range demoSectors {
		b := p[s*demoSector : (s+1)*demoSector]
		binary.LittleEndian.PutUint64(b, uint64(block))
		binary.LittleEndian.PutUint32(b[8:], version)
		binary.LittleEndian.PutUint32(b[12:], uint32(s))
		x := c.run ^ uint64(block)<<35 ^ uint64(version)<<3 ^ uint64(s)
		for off := 16; off < demoSector; off += 8 { // splitmix64
			x += 0x9e3779b97f4a7c15
			z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
			z = (z ^ z>>27) * 0x94d049bb133111eb
			binary.LittleEndian.PutUint64(b[off:], z^z>>31)
		}
	}
}

// beginRead returns what endRead wants to know: the version that stood when the read began.
func (c *demoContent) beginRead(block int) uint32 { return c.stands[block].Load() }

// endRead checks what a read has returned. It may be as old as what stood when it began and as new as what has been
// sent by now; where a write was under way, it may be some of both, word by word. Whoever reads later must not get
// anything older. scratch is memory for a block.
func (c *demoContent) endRead(p []byte, block int, stood uint32, scratch []byte) error {
	sent := c.sent[block].Load()
	var known [demoBlock / 8]bool // words that are of one of these versions
	left := len(known)
	for version := sent; ; version-- {
		c.fill(scratch, block, version)
		if bytes.Equal(p, scratch) {
			c.raise(block, version)
			return nil
		}
		for i := range known {
			if !known[i] && bytes.Equal(p[i*8:i*8+8], scratch[i*8:i*8+8]) {
				known[i] = true
				left--
			}
		}
		if version == stood {
			break
		}
	}
	if left == 0 {
		return nil
	}
	first := slices.Index(known[:], false) * 8
	s := first / demoSector
	b := p[s*demoSector:]
	is := "content that nobody wrote"
	of, at, version := int(binary.LittleEndian.Uint64(b)), int(binary.LittleEndian.Uint32(b[12:])), binary.LittleEndian.Uint32(b[8:])
	if of >= 0 && of < c.blocks() && at < demoSectors {
		c.fill(scratch, of, version)
		if bytes.Equal(b[:demoSector], scratch[at*demoSector:(at+1)*demoSector]) {
			is = fmt.Sprintf("sector %d of block %d, version %d", at, of, version)
		}
	}
	want := fmt.Sprintf("version %d", stood)
	if stood < sent {
		want += fmt.Sprintf(" to %d", sent)
	}
	return fmt.Errorf("block %d, from byte %d: want %s, got %s", block, first, want, is)
}

// beginWrite fills p with the next version of a block. It returns false if a write of the block is under way.
func (c *demoContent) beginWrite(p []byte, block int) (version uint32, ok bool) {
	if !c.busy[block].CompareAndSwap(false, true) {
		return 0, false
	}
	version = c.sent[block].Add(1)
	c.fill(p, block, version)
	return version, true
}

// endWrite says that the write was acknowledged.
func (c *demoContent) endWrite(block int, version uint32) {
	c.raise(block, version)
	c.busy[block].Store(false)
}

func (c *demoContent) raise(block int, version uint32) {
	for {
		old := c.stands[block].Load()
		if old >= version || c.stands[block].CompareAndSwap(old, version) {
			return
		}
	}
}

// A demoReader checks a volume that is written to it from its first byte on, in whole blocks: every block must have
// the version that stands.
type demoReader struct {
	c       *demoContent
	next    int
	scratch [demoBlock]byte
}

func (r *demoReader) Write(p []byte) (int, error) {
	for n := 0; n < len(p); n += demoBlock {
		if len(p)-n < demoBlock || r.next >= r.c.blocks() {
			return n, fmt.Errorf("the volume is not %d whole blocks long", r.c.blocks())
		}
		if err := r.c.endRead(p[n:n+demoBlock], r.next, r.c.beginRead(r.next), r.scratch[:]); err != nil {
			return n, err
		}
		r.next++
	}
	return len(p), nil
}

// end says whether all blocks have come.
func (r *demoReader) end() error {
	if r.next != r.c.blocks() {
		return fmt.Errorf("the volume ends after block %d of %d", r.next, r.c.blocks())
	}
	return nil
}
