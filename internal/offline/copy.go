package offline

import (
	"context"
	"io"
	"slices"
	"sort"
	"sync"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// CopyOptions modify Copy.
type CopyOptions struct {
	// Progress, if set, hears how many bytes have been written, of how many. Calls come one at a time.
	Progress func(done, of int64)
}

const (
	copyChunk = 1 << 20 // bytes a read
	copyDepth = 8       // reads at once
)

// Copy writes the whole content of a device to w, in order. Where a part cannot be read it writes zeroes and
// goes on; the parts, offset and length in bytes, are returned. An error of w or the end of ctx ends it.
func Copy(ctx context.Context, w io.Writer, dev blockdev.Device, o CopyOptions) (bad [][2]int64, err error) {
	info := dev.Info()
	var known ranges // not worth a read
	if u, ok := dev.(interface{ Unreadable() [][2]int64 }); ok {
		known = u.Unreadable()
	}
	type slot struct {
		req   blockdev.Request
		buf   *blockdev.Buffer
		ready chan struct{}
	}
	slots := make([]slot, copyDepth)
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	for i := range slots {
		slots[i].ready = make(chan struct{}, 1)
	}
	q, err := dev.NewQueue(copyDepth, func(done []*blockdev.Request) {
		for _, r := range done {
			r.Owner.(*slot).ready <- struct{}{}
		}
	})
	if err != nil {
		return nil, err
	}
	var next int64
	start := func(s *slot) {
		n := min(copyChunk, info.Size-next)
		s.req = blockdev.Request{Op: blockdev.OpRead, Off: next, Buf: s.buf.Data[:n], Owner: s}
		if known.contain(next, n) {
			clear(s.req.Buf)
			bad = append(bad, [2]int64{next, n})
			s.ready <- struct{}{}
		} else {
			q.Submit([]*blockdev.Request{&s.req})
		}
		next += n
	}
	inFlight := 0
	for i := range slots {
		slots[i].buf = pool.Get(copyChunk)
		if next < info.Size {
			start(&slots[i])
			inFlight++
		}
	}
	defer func() {
		if cerr := q.Close(); err == nil {
			err = cerr
		}
		for i := range slots {
			slots[i].buf.Release()
		}
		pool.Trim(0)
	}()
	for i := 0; inFlight > 0; i = (i + 1) % len(slots) {
		s := &slots[i]
		<-s.ready
		inFlight--
		if s.req.Err != nil {
			bad = append(bad, readAround(ctx, dev, known, s.req.Off, s.req.Buf)...)
		}
		if err := ctx.Err(); err != nil {
			return bad, err
		}
		if _, err := w.Write(s.req.Buf); err != nil {
			return bad, err
		}
		if o.Progress != nil {
			o.Progress(s.req.Off+int64(len(s.req.Buf)), info.Size)
		}
		if next < info.Size {
			start(s)
			inFlight++
		}
	}
	return joinRanges(bad), nil
}

// readAround reads p again in pieces, after it could not be read as a whole: pages, and of those that cannot be
// read the blocks. It zeroes what is left, and everything from when ctx ends.
func readAround(ctx context.Context, dev blockdev.Device, known ranges, off int64, p []byte) (bad [][2]int64) {
	bio, err := blockdev.NewIO(dev, copyDepth)
	if err != nil {
		clear(p)
		return [][2]int64{{off, int64(len(p))}}
	}
	defer bio.Close()
	block := dev.Info().LogicalBlock
	page := max(block, 4096)
	var wg sync.WaitGroup
	var mu sync.Mutex
	limit := make(chan struct{}, copyDepth)
	for at := 0; at < len(p); at += page {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			some := readPieces(ctx, bio, known, off+int64(at), p[at:min(at+page, len(p))], page, block)
			mu.Lock()
			bad = append(bad, some...)
			mu.Unlock()
		})
	}
	wg.Wait()
	return joinRanges(bad)
}

// readPieces reads p in pieces of size bytes, and those that cannot be read in pieces of the smaller size least.
func readPieces(ctx context.Context, bio *blockdev.IO, known ranges, off int64, p []byte, size, least int) (bad [][2]int64) {
	for at := 0; at < len(p); at += size {
		b := p[at:min(at+size, len(p))]
		switch {
		case known.contain(off+int64(at), int64(len(b))):
			clear(b)
			bad = append(bad, [2]int64{off + int64(at), int64(len(b))})
		case ctx.Err() == nil && bio.ReadAt(b, off+int64(at)) == nil:
		case ctx.Err() == nil && len(b) > least:
			bad = append(bad, readPieces(ctx, bio, known, off+int64(at), b, least, least)...)
		default:
			clear(b)
			bad = append(bad, [2]int64{off + int64(at), int64(len(b))})
		}
	}
	return bad
}

// ranges are parts of a device, offset and length in bytes, in order and without touching one another.
type ranges [][2]int64

// contain reports whether n bytes at off lie in one of the ranges.
func (r ranges) contain(off, n int64) bool {
	i := sort.Search(len(r), func(i int) bool { return r[i][0]+r[i][1] > off })
	return i < len(r) && r[i][0] <= off && off+n <= r[i][0]+r[i][1]
}

// joinRanges sorts ranges and joins those that touch.
func joinRanges(r [][2]int64) [][2]int64 {
	slices.SortFunc(r, func(a, b [2]int64) int { return int(min(max(a[0]-b[0], -1), 1)) })
	out := r[:0]
	for _, x := range r {
		if n := len(out); n > 0 && out[n-1][0]+out[n-1][1] >= x[0] {
			out[n-1][1] = max(out[n-1][1], x[0]+x[1]-out[n-1][0])
			continue
		}
		out = append(out, x)
	}
	return out
}
