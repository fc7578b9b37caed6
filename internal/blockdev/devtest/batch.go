package devtest

import (
	"bytes"
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// A device is the one under test, with what the tests need to use it.
type device struct {
	blockdev.Device
	t      *testing.T
	info   blockdev.Info
	pool   *blockdev.Pool
	closed bool
}

// block returns n blocks in bytes.
func (d *device) block(n int) int64 { return int64(n) * int64(d.info.LogicalBlock) }

// roundUp returns the least multiple of the block that is n or more.
func (d *device) roundUp(n int64) int64 {
	b := int64(d.info.LogicalBlock)
	return (n + b - 1) / b * b
}

// A batcher submits batches and waits for them.
type batcher struct {
	t    testing.TB
	q    blockdev.Queue
	wg   sync.WaitGroup
	busy atomic.Bool
}

func (d *device) queue(depth int) *batcher {
	b := &batcher{t: d.t}
	q, err := d.NewQueue(depth, b.complete)
	if err != nil {
		d.t.Fatal(err)
	}
	b.q = q
	return b
}

func (b *batcher) complete(done []*blockdev.Request) {
	if b.busy.Swap(true) {
		b.t.Error("complete called twice at the same time")
	}
	for _, r := range done {
		if n := r.Owner.(*int); *n != 0 {
			b.t.Errorf("%v %d+%d completed twice", r.Op, r.Off, r.Length())
		} else {
			*n++
		}
	}
	b.busy.Store(false)
	b.wg.Add(-len(done))
}

// do submits the requests as one batch and waits until all have completed.
func (b *batcher) do(reqs ...*blockdev.Request) {
	for _, r := range reqs {
		r.Owner = new(int)
	}
	b.wg.Add(len(reqs))
	b.q.Submit(slices.Clone(reqs))
	b.wg.Wait()
}

// must is do for requests that succeed.
func (b *batcher) must(reqs ...*blockdev.Request) {
	b.t.Helper()
	b.do(reqs...)
	for _, r := range reqs {
		if r.Err != nil {
			b.t.Fatalf("%v %d+%d: %v", r.Op, r.Off, r.Length(), r.Err)
		}
	}
}

func (b *batcher) close() {
	b.t.Helper()
	if err := b.q.Close(); err != nil {
		b.t.Fatalf("close the queue: %v", err)
	}
}

// fill makes content that says where it belongs.
func fill(p []byte, off int64, round uint64) {
	x := uint64(off)*0x9e3779b97f4a7c15 + round*0xbf58476d1ce4e5b9
	i := 0
	for ; i+8 <= len(p); i += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(p[i:], x^x>>32)
	}
	for ; i < len(p); i++ {
		p[i] = byte(x >> (i & 7))
	}
}

func filled(n int64, off int64, round uint64) []byte {
	p := make([]byte, n)
	fill(p, off, round)
	return p
}

func (d *device) write(b *batcher, off, n int64, round uint64, flags blockdev.Flags) {
	d.t.Helper()
	buf := d.pool.Get(int(n))
	defer buf.Release()
	fill(buf.Data, off, round)
	b.must(&blockdev.Request{Op: blockdev.OpWrite, Off: off, Buf: buf.Data, Flags: flags})
}

func (d *device) read(b *batcher, off, n int64) []byte {
	d.t.Helper()
	buf := d.pool.Get(int(n))
	defer buf.Release()
	for i := range buf.Data {
		buf.Data[i] = 0xa5
	}
	b.must(&blockdev.Request{Op: blockdev.OpRead, Off: off, Buf: buf.Data})
	return bytes.Clone(buf.Data)
}
