package sim

import (
	"context"
	"fmt"
	"strings"
)

// A Target is a volume under test. Offsets and lengths are in bytes and multiples of BlockSize. All methods may be
// called by several goroutines at the same time.
type Target interface {
	Size() int64
	BlockSize() int
	ReadAt(ctx context.Context, p []byte, off int64) error
	WriteAt(ctx context.Context, p []byte, off int64, fua bool) error
	Flush(ctx context.Context) error
	Discard(ctx context.Context, off, n int64) error
	WriteZeroes(ctx context.Context, off, n int64, fua bool) error
}

// A Client sends requests to one volume. What it writes says of itself what it is, what it does is in the History,
// and what it reads is checked against that.
type Client struct {
	h      *History
	volume int
	t      Target
	block  int64
}

// Client returns a Client of the volume with that number in the History.
func (h *History) Client(volume int, t Target) *Client {
	v := h.volumes[volume]
	if t.Size() != v.Size || t.BlockSize() != v.Block {
		panic(fmt.Sprintf("sim: a Target of %d bytes in blocks of %d for a volume of %d in blocks of %d", t.Size(), t.BlockSize(), v.Size, v.Block))
	}
	return &Client{h: h, volume: volume, t: t, block: int64(v.Block)}
}

// unread is what a buffer holds before a read: what is not filled in is seen.
var unread = strings.Repeat("\xdb", 4096)

// Read reads n bytes at off, and returns a *Violation if they are not what a read may return.
func (c *Client) Read(ctx context.Context, off, n int64) error {
	p := make([]byte, n)
	for rest := p; len(rest) > 0; {
		rest = rest[copy(rest, unread):]
	}
	start := c.h.beginRead()
	defer c.h.endRead(start)
	if err := c.t.ReadAt(ctx, p, off); err != nil {
		return err
	}
	return c.h.read(c.volume, off/c.block, p, start)
}

// Write writes n bytes at off.
func (c *Client) Write(ctx context.Context, off, n int64, fua bool) error {
	number := c.h.begin(opWrite, c.volume, off/c.block, n/c.block, fua)
	p := make([]byte, n)
	putBlocks(p, c.volume, int(c.block), off/c.block, number)
	err := c.t.WriteAt(ctx, p, off, fua)
	clear(p) // it belongs to the caller again: who still uses it is seen
	c.h.end(number, err)
	return err
}

// WriteZeroes writes zeroes to n bytes at off.
func (c *Client) WriteZeroes(ctx context.Context, off, n int64, fua bool) error {
	number := c.h.begin(opZeroes, c.volume, off/c.block, n/c.block, fua)
	err := c.t.WriteZeroes(ctx, off, n, fua)
	c.h.end(number, err)
	return err
}

// Discard discards n bytes at off.
func (c *Client) Discard(ctx context.Context, off, n int64) error {
	number := c.h.begin(opDiscard, c.volume, off/c.block, n/c.block, false)
	err := c.t.Discard(ctx, off, n)
	c.h.end(number, err)
	return err
}

// Flush flushes.
func (c *Client) Flush(ctx context.Context) error {
	start := c.h.tick()
	err := c.t.Flush(ctx)
	if err == nil {
		c.h.flushed(c.volume, start)
	}
	return err
}
