package volume

import (
	"sync/atomic"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A queue takes requests in batches. Reads that hit are looked up in one hold of the set's lock and go to the cache
// device in one submission; all else becomes an op, with a goroutine.
type queue struct {
	v     *Volume
	out   *blockdev.Completer
	cache blockdev.Queue
	point uint32    // tells this queue's data from others'
	seq   sequencer // guarded by the set's lock

	free struct {
		mu      rt.Mutex
		hits    []*hit
		parts   []*hitPart
		batches []*batch
	}
}

// A batch is what one Submit, or one completion, hands on.
type batch struct {
	toCache []*blockdev.Request
	done    []*blockdev.Request
	slow    []*op
}

// A hit is a read all of which is in the cache.
type hit struct {
	req  *blockdev.Request
	left atomic.Int32
	bad  atomic.Bool // a piece has to be read again
}

// A hitPart is one piece of it.
type hitPart struct {
	blockdev.Request
	hit  *hit
	ptr  ondisk.Ptr
	good bool
}

const (
	lookSlice = 256 // lookups in one hold of the lock
	hitParts  = 64  // a read of more pieces is an op
)

// NewQueue makes a queue. complete is called as blockdev.Device says.
func (v *Volume) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	if v.closed.Load() {
		return nil, blockdev.ErrClosed
	}
	q := &queue{v: v, out: blockdev.NewCompleter(v.rt, complete)}
	q.free.mu.Init(v.rt)
	c, err := v.cache.dev.NewQueue(max(depth, hitParts), q.arrived)
	if err != nil {
		return nil, err
	}
	q.cache = c
	v.set.Lock()
	v.point++
	q.point = v.inode<<16 | v.point&0xffff
	v.set.Unlock()
	return q, nil
}

// Submit takes a batch; see blockdev.Queue.
func (q *queue) Submit(reqs []*blockdev.Request) {
	v := q.v
	ok := q.out.Begin(len(reqs))
	b := q.getBatch()
	looked := 0
	conf := v.config.Load()
	locked := false
	for _, r := range reqs {
		r.Err = nil
		if !ok {
			r.Err = blockdev.ErrClosed
		} else if r.Op != blockdev.OpFlush {
			r.Err = v.info.Check(r)
		}
		if r.Err != nil || r.Op != blockdev.OpFlush && r.Length() == 0 {
			b.done = append(b.done, r)
			continue
		}
		var why bypass
		if r.Op != blockdev.OpFlush {
			if !locked {
				v.set.Lock()
				locked = true
			}
			why = q.bypassLocked(r, conf)
			if r.Op == blockdev.OpRead {
				n := q.hitLocked(r, why, b)
				if looked += max(n, 1); looked >= lookSlice {
					v.set.Unlock()
					locked, looked = false, 0
				}
				if n > 0 {
					continue
				}
			}
		}
		o := v.ops.get(v)
		o.q, o.req, o.conf, o.why, o.retry = q, r, conf, why, false
		b.slow = append(b.slow, o)
	}
	if locked {
		v.set.Unlock()
	}
	q.send(b)
}

// send hands a batch on.
func (q *queue) send(b *batch) {
	if len(b.toCache) > 0 {
		q.cache.Submit(b.toCache)
	}
	for _, o := range b.slow {
		o.v.running.Add(1)
		q.v.rt.Go("request", o.run)
	}
	if len(b.done) > 0 {
		q.out.Finish(b.done...)
	}
	q.putBatch(b)
}

// hitLocked adds the pieces of a read to the batch if all of it is in the cache. It returns how many these are, 0 if
// it is not.
func (q *queue) hitLocked(r *blockdev.Request, why bypass, b *batch) int {
	v := q.v
	at := v.first + uint64(r.Off)/ondisk.SectorSize
	end := at + uint64(len(r.Buf))/ondisk.SectorSize
	n := len(b.toCache)
	var h *hit
	buf := r.Buf
	for at < end {
		p, miss := v.set.LookupLocked(v.inode, at, end)
		if !miss.IsZero() || !p.Cached || !v.set.GoodLocked(p.Ptr) || len(b.toCache)-n == hitParts {
			break
		}
		piece := buf[:(p.End-at)*ondisk.SectorSize]
		if !aligned(piece, v.cache.align) {
			break
		}
		if h == nil {
			h = q.getHit()
			h.req = r
		}
		pt := q.getPart()
		pt.Request = blockdev.Request{Op: blockdev.OpRead, Off: int64(p.Ptr.Sector()) * ondisk.SectorSize, Buf: piece, Purpose: r.Purpose, Owner: pt}
		pt.hit, pt.ptr = h, p.Ptr
		b.toCache = append(b.toCache, &pt.Request)
		v.set.TouchLocked(p.Ptr)
		buf = buf[len(piece):]
		at = p.End
	}
	if at < end {
		for _, pr := range b.toCache[n:] {
			q.putPart(pr.Owner.(*hitPart))
		}
		b.toCache = b.toCache[:n]
		if h != nil {
			q.putHit(h)
		}
		return 0
	}
	h.left.Store(int32(len(b.toCache) - n))
	v.countReadLocked(r, why, true)
	return len(b.toCache) - n
}

// countReadLocked counts a read.
func (v *Volume) countReadLocked(r *blockdev.Request, why bypass, hit bool) {
	s := &v.stats
	s.Reads++
	s.ReadSectors += uint64(len(r.Buf)) / ondisk.SectorSize
	switch {
	case why != accepted && hit:
		s.BypassHits++
	case why != accepted:
		s.BypassMisses++
	case hit:
		s.Hits++
	default:
		s.Misses++
	}
}

// arrived takes back pieces of hits.
func (q *queue) arrived(done []*blockdev.Request) {
	v := q.v
	v.set.Lock()
	for _, r := range done {
		p := r.Owner.(*hitPart)
		if p.good = r.Err == nil && v.set.GoodLocked(p.ptr); !p.good {
			if r.Err == nil {
				v.stats.ReadRaces++
			} else {
				v.stats.CacheReadErrors++
			}
		}
	}
	v.set.Unlock()
	b := q.getBatch()
	for _, r := range done {
		p := r.Owner.(*hitPart)
		h := p.hit
		if !p.good {
			h.bad.Store(true)
		}
		q.putPart(p)
		if h.left.Add(-1) > 0 {
			continue
		}
		if h.bad.Load() {
			o := v.ops.get(v)
			o.q, o.req, o.conf, o.why, o.retry = q, h.req, v.config.Load(), accepted, true
			b.slow = append(b.slow, o)
		} else {
			b.done = append(b.done, h.req)
		}
		q.putHit(h)
	}
	q.send(b)
}

// Close waits for everything under way.
func (q *queue) Close() error {
	if !q.out.Close() {
		return blockdev.ErrClosed
	}
	return q.cache.Close()
}

func (q *queue) getHit() *hit {
	q.free.mu.Lock()
	defer q.free.mu.Unlock()
	if n := len(q.free.hits); n > 0 {
		h := q.free.hits[n-1]
		q.free.hits = q.free.hits[:n-1]
		return h
	}
	return new(hit)
}

func (q *queue) putHit(h *hit) {
	h.req = nil
	h.bad.Store(false)
	q.free.mu.Lock()
	q.free.hits = append(q.free.hits, h)
	q.free.mu.Unlock()
}

func (q *queue) getPart() *hitPart {
	q.free.mu.Lock()
	defer q.free.mu.Unlock()
	if n := len(q.free.parts); n > 0 {
		p := q.free.parts[n-1]
		q.free.parts = q.free.parts[:n-1]
		return p
	}
	return new(hitPart)
}

func (q *queue) putPart(p *hitPart) {
	*p = hitPart{}
	q.free.mu.Lock()
	q.free.parts = append(q.free.parts, p)
	q.free.mu.Unlock()
}

func (q *queue) getBatch() *batch {
	q.free.mu.Lock()
	defer q.free.mu.Unlock()
	if n := len(q.free.batches); n > 0 {
		b := q.free.batches[n-1]
		q.free.batches = q.free.batches[:n-1]
		return b
	}
	return new(batch)
}

func (q *queue) putBatch(b *batch) {
	clear(b.toCache)
	clear(b.done)
	clear(b.slow)
	b.toCache, b.done, b.slow = b.toCache[:0], b.done[:0], b.slow[:0]
	q.free.mu.Lock()
	q.free.batches = append(q.free.batches, b)
	q.free.mu.Unlock()
}
