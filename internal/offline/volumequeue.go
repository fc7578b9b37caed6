package offline

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A volumeQueue splits reads into pieces, sends the pieces of a batch to the two devices in one submission each,
// and finishes a read with its last piece.
type volumeQueue struct {
	v              *Volume
	out            *blockdev.Completer
	cache, backing blockdev.Queue // either may be nil, as in the volume

	free struct {
		sync.Mutex
		parts   []*part
		reads   []*read
		batches []*batch
	}
}

// A batch is what one Submit hands on. Each has its own: the devices may complete requests within their Submit, and
// complete may submit more.
type batch struct {
	toCache, toOther []*blockdev.Request
	done             []*blockdev.Request
}

// pieceDepth is how many pieces are at least worked on at once on each device: a large read has many small ones.
const pieceDepth = 64

// A read is a request with pieces under way.
type read struct {
	req  *blockdev.Request
	left atomic.Int32
	err  atomic.Pointer[error]
}

// A part is one piece on its way to a device.
type part struct {
	blockdev.Request
	read   *read
	bounce *blockdev.Buffer // where the piece's memory is not aligned well enough
	dest   []byte           // of the bounce
}

var bouncePool = sync.OnceValue(func() *blockdev.Pool { return blockdev.NewPool(blockdev.PoolOptions{}) })

// NewQueue makes a queue with one queue of each device below it.
func (v *Volume) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q := &volumeQueue{v: v}
	for _, below := range []struct {
		dev blockdev.Device
		to  *blockdev.Queue
	}{{v.cache, &q.cache}, {v.backing, &q.backing}} {
		if below.dev == nil {
			continue
		}
		if q.out == nil {
			q.out = blockdev.NewCompleter(blockdev.RuntimeOf(below.dev), complete)
		}
		queue, err := below.dev.NewQueue(max(depth, pieceDepth), q.finished)
		if err != nil {
			q.closeBelow()
			return nil, err
		}
		*below.to = queue
	}
	return q, nil
}

// Submit may be called from several goroutines at the same time.
func (q *volumeQueue) Submit(reqs []*blockdev.Request) {
	ok := q.out.Begin(len(reqs))
	b := q.getBatch()
	for _, r := range reqs {
		r.Err = nil
		if !ok {
			r.Err = blockdev.ErrClosed
		} else if r.Op != blockdev.OpFlush {
			r.Err = q.v.info.Check(r)
		}
		if r.Err != nil || r.Length() == 0 || r.Op == blockdev.OpFlush || !q.start(r, b) {
			b.done = append(b.done, r)
		}
	}
	if len(b.toCache) > 0 {
		q.cache.Submit(b.toCache)
	}
	if len(b.toOther) > 0 {
		q.backing.Submit(b.toOther)
	}
	if len(b.done) > 0 {
		q.out.Finish(b.done...)
	}
	q.putBatch(b)
}

// start makes the pieces of a read and adds them to b. It reports whether there are any; if not the read is done.
func (q *volumeQueue) start(r *blockdev.Request, b *batch) bool {
	v := q.v
	s := v.first + uint64(r.Off)/ondisk.SectorSize
	end := s + uint64(len(r.Buf))/ondisk.SectorSize
	rd := q.getRead()
	rd.req = r
	rd.left.Store(1) // ours, so that nobody finishes the read before all its pieces are known
	for at := uint64(0); s < end; {
		p := v.lookup(s, end)
		buf := r.Buf[at : at+p.sectors*ondisk.SectorSize]
		switch p.kind {
		case FromNowhere:
			clear(buf)
		case FromUnknown:
			err := error(&blockdev.IOError{Device: v.info.Name, Op: r.Op, Off: r.Off + int64(at), Len: int64(len(buf)), Err: ErrUnreadable})
			v.fail(s, p.sectors, err)
			rd.err.CompareAndSwap(nil, &err)
		default:
			pt := q.getPart()
			pt.Request = blockdev.Request{Op: blockdev.OpRead, Off: int64(p.at) * ondisk.SectorSize, Buf: buf, Purpose: r.Purpose, Owner: pt}
			pt.read = rd
			align := v.info.BufferAlign
			if align > 1 && uintptr(unsafe.Pointer(unsafe.SliceData(buf)))&uintptr(align-1) != 0 {
				pt.bounce, pt.dest = bouncePool().Get(len(buf)), buf
				pt.Buf = pt.bounce.Data[:len(buf)]
			}
			rd.left.Add(1)
			if p.kind == FromBacking {
				b.toOther = append(b.toOther, &pt.Request)
			} else {
				b.toCache = append(b.toCache, &pt.Request)
			}
		}
		at += uint64(len(buf))
		s += p.sectors
	}
	if rd.left.Add(-1) > 0 {
		return true
	}
	q.end(rd)
	return false
}

// end takes the outcome of a read over to its request.
func (q *volumeQueue) end(rd *read) {
	if err := rd.err.Load(); err != nil {
		rd.req.Err = *err
	}
	rd.req = nil
	rd.err.Store(nil)
	q.free.Lock()
	q.free.reads = append(q.free.reads, rd)
	q.free.Unlock()
}

// finished takes back pieces; both devices' queues call it, perhaps at the same time.
func (q *volumeQueue) finished(done []*blockdev.Request) {
	for _, r := range done {
		pt := r.Owner.(*part)
		rd := pt.read
		if r.Err != nil {
			from := rd.req.Off
			if pt.dest != nil {
				from += offsetIn(rd.req.Buf, pt.dest)
			} else {
				from += offsetIn(rd.req.Buf, r.Buf)
			}
			err := r.Err
			q.v.fail(q.v.first+uint64(from)/ondisk.SectorSize, uint64(len(r.Buf))/ondisk.SectorSize, err)
			rd.err.CompareAndSwap(nil, &err)
		}
		if pt.bounce != nil {
			copy(pt.dest, r.Buf)
			pt.bounce.Release()
		}
		q.putPart(pt)
		if rd.left.Add(-1) == 0 {
			req := rd.req
			q.end(rd)
			q.out.Finish(req)
		}
	}
}

// offsetIn returns where part begins in whole, which contains it.
func offsetIn(whole, part []byte) int64 {
	return int64(uintptr(unsafe.Pointer(unsafe.SliceData(part))) - uintptr(unsafe.Pointer(unsafe.SliceData(whole))))
}

func (q *volumeQueue) getPart() *part {
	q.free.Lock()
	defer q.free.Unlock()
	if n := len(q.free.parts); n > 0 {
		p := q.free.parts[n-1]
		q.free.parts = q.free.parts[:n-1]
		return p
	}
	return new(part)
}

func (q *volumeQueue) putPart(p *part) {
	*p = part{}
	q.free.Lock()
	q.free.parts = append(q.free.parts, p)
	q.free.Unlock()
}

func (q *volumeQueue) getRead() *read {
	q.free.Lock()
	defer q.free.Unlock()
	if n := len(q.free.reads); n > 0 {
		r := q.free.reads[n-1]
		q.free.reads = q.free.reads[:n-1]
		return r
	}
	return new(read)
}

func (q *volumeQueue) getBatch() *batch {
	q.free.Lock()
	defer q.free.Unlock()
	if n := len(q.free.batches); n > 0 {
		b := q.free.batches[n-1]
		q.free.batches = q.free.batches[:n-1]
		return b
	}
	return new(batch)
}

func (q *volumeQueue) putBatch(b *batch) {
	for _, list := range []*[]*blockdev.Request{&b.toCache, &b.toOther, &b.done} {
		clear(*list)
		*list = (*list)[:0]
	}
	q.free.Lock()
	q.free.batches = append(q.free.batches, b)
	q.free.Unlock()
}

// Close waits for everything under way.
func (q *volumeQueue) Close() error {
	if !q.out.Close() {
		return blockdev.ErrClosed
	}
	return q.closeBelow()
}

func (q *volumeQueue) closeBelow() (err error) {
	for _, below := range []blockdev.Queue{q.cache, q.backing} {
		if below == nil {
			continue
		}
		if cerr := below.Close(); err == nil {
			err = cerr
		}
	}
	return err
}

// maxFailed bounds how many failed reads are remembered.
const maxFailed = 4096

// fail remembers that a read of these key sectors failed.
func (v *Volume) fail(s, sectors uint64, err error) {
	r := Range{Pos{v.inode, s - v.first}, Pos{v.inode, s - v.first + sectors}}
	if v.remember(r) && v.onFailure != nil {
		v.onFailure(int64(r.From.Sector)*ondisk.SectorSize, int64(sectors)*ondisk.SectorSize, err)
	}
}

// remember adds to what could not be read, and reports whether that is new.
func (v *Volume) remember(r Range) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, f := range v.failed {
		if f.From.Compare(r.From) <= 0 && f.To.Compare(r.To) >= 0 {
			return false
		}
	}
	if len(v.failed) >= maxFailed {
		return false
	}
	v.failed = append(v.failed, r)
	return true
}

// Failed returns the parts of the volume, offset and length in bytes, that somebody tried to read in vain, in
// the order in which that happened; at most 4096 of them.
func (v *Volume) Failed() [][2]int64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([][2]int64, len(v.failed))
	for i, f := range v.failed {
		out[i] = [2]int64{int64(f.From.Sector) * ondisk.SectorSize, int64(f.To.Sector-f.From.Sector) * ondisk.SectorSize}
	}
	return out
}
