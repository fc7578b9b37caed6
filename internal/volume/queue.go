package volume

import (
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A queue takes requests in batches. Reads that hit are looked up, and writes that stay in the cache given a place, in one
// hold of the set's lock, and go to the cache device in one submission; all else becomes an op with a goroutine.
type queue struct {
	v     *Volume
	out   *blockdev.Completer
	cache blockdev.Queue
	point uint32    // tells this queue's data from others'
	seq   sequencer // guarded by the set's lock
	told  uint64    // of how many failed flushes; guarded by the set's lock
	wrote atomic.Bool

	hits    freeList[hit]
	parts   freeList[hitPart]
	batches freeList[batch]
}

// A batch is what one Submit, or one completion, hands on.
type batch struct {
	toCache []*blockdev.Request
	done    []*blockdev.Request
	slow    []*op
	over    []*op // to be put back

	failed      error // of the cache device, to be logged: it has failed so many times
	failedTimes uint64
}

func (b *batch) reset() {
	clear(b.toCache)
	clear(b.done)
	clear(b.slow)
	clear(b.over)
	b.toCache, b.done, b.slow, b.over = b.toCache[:0], b.done[:0], b.slow[:0], b.over[:0]
}

// A hit is a read all of which is in the cache.
type hit struct {
	req   *blockdev.Request
	since time.Duration // when it went to the cache device
	left  atomic.Int32
	bad   atomic.Bool // a piece has to be read again
}

func (h *hit) reset() {
	h.req = nil
	h.bad.Store(false)
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
	q.hits.init(v.rt)
	q.parts.init(v.rt)
	q.batches.init(v.rt)
	c, err := v.cache.dev.NewQueue(max(depth, hitParts), q.arrived)
	if err != nil {
		return nil, err
	}
	q.cache = c
	v.set.Lock()
	v.point++
	q.point = v.inode<<16 | v.point&0xffff
	q.told = v.told
	v.set.Unlock()
	return q, nil
}

// Submit takes a batch; see blockdev.Queue.
func (q *queue) Submit(reqs []*blockdev.Request) {
	v := q.v
	ok := q.out.Begin(len(reqs))
	v.set.Arrived(len(reqs))
	b := q.batches.get()
	looked := 0
	c := v.use()
	info := v.info.Load()
	locked := false
	var now time.Duration // when the lock was taken: one reading of the clock serves all that is done in a hold of it
	for i, r := range reqs {
		r.Err = nil
		if !ok {
			r.Err = blockdev.ErrClosed
		} else if r.Op != blockdev.OpFlush {
			r.Err = info.Check(r)
		}
		if r.Err != nil || r.Op != blockdev.OpFlush && r.Length() == 0 {
			b.done = append(b.done, r)
			continue
		}
		var why bypass
		if r.Op != blockdev.OpFlush && !c.detached {
			if !locked {
				now = q.lock(len(reqs) - i)
				v.set.NoteRequestsLocked()
				locked = true
			}
			why = q.bypassLocked(r, c, now)
			if r.Op == blockdev.OpRead {
				n := q.hitLocked(r, why, b, now)
				if looked += max(n, 1); looked >= lookSlice {
					v.set.Unlock()
					locked, looked = false, 0
				}
				if n > 0 {
					continue
				}
			}
		}
		if r.Op.Writes() && !q.wrote.Load() {
			q.wrote.Store(true)
		}
		o := v.newOp(q, r, c, why, false)
		if r.Op == blockdev.OpFlush {
			if !locked {
				q.lock(len(reqs) - i)
			}
			o.askLocked()
			if !locked {
				v.set.Unlock()
			}
		}
		if r.Op == blockdev.OpWrite && locked {
			placed := o.placeLocked(b, now)
			if looked += max(len(o.keys), 1); looked >= lookSlice {
				v.set.Unlock()
				locked, looked = false, 0
			}
			if placed {
				continue
			}
		}
		b.slow = append(b.slow, o)
	}
	if locked {
		v.set.Unlock()
	}
	v.unuse(c)
	v.set.NoteRequest()
	q.send(b)
}

// lock takes the set's lock on behalf of so many requests of a batch, which wait for it together, also while a collection keeps
// them out, and returns the time.
func (q *queue) lock(requests int) (now time.Duration) {
	s := q.v.set
	if d := s.LockTimed(); d > 0 {
		s.StalledEach(cacheset.StallLock, d, requests)
	}
	s.PassLocked(requests)
	return q.v.rt.Now()
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
		q.finish(b.done...)
	}
	b.reset()
	q.batches.put(b)
}

// finish answers requests.
func (q *queue) finish(done ...*blockdev.Request) {
	q.v.set.Answered(len(done))
	q.out.Finish(done...)
}

// hitLocked adds the pieces of a read to the batch if all of it is in the cache. It returns how many these are, 0 if
// it is not.
func (q *queue) hitLocked(r *blockdev.Request, why bypass, b *batch, now time.Duration) int {
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
			h = q.hits.get()
			h.req, h.since = r, now
		}
		pt := q.parts.get()
		pt.Request = blockdev.Request{Op: blockdev.OpRead, Off: int64(p.Ptr.Sector()) * ondisk.SectorSize, Buf: piece, Purpose: r.Purpose, Owner: pt}
		pt.hit, pt.ptr = h, p.Ptr
		b.toCache = append(b.toCache, &pt.Request)
		v.set.TouchLocked(p.Ptr)
		buf = buf[len(piece):]
		at = p.End
	}
	if at < end {
		for _, pr := range b.toCache[n:] {
			p := pr.Owner.(*hitPart)
			*p = hitPart{}
			q.parts.put(p)
		}
		b.toCache = b.toCache[:n]
		if h != nil {
			h.reset()
			q.hits.put(h)
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

// arrived takes back pieces of hits, and of writes that stay in the cache.
func (q *queue) arrived(done []*blockdev.Request) {
	v := q.v
	b := q.batches.get()
	now := v.rt.Now()
	var waits cacheset.StallTotals // for the cache device
	locking := v.set.LockTimed()
	inserts := 0
	for _, r := range done {
		p, ok := r.Owner.(*hitPart)
		if !ok {
			if o := r.Owner.(*part).group.op; o.arrivedLocked(b) {
				waits.Add(now - o.since)
				if inserts++; inserts%insertSlice == 0 {
					v.set.Unlock()
					locking += v.set.LockTimed()
				}
			}
			continue
		}
		if p.good = r.Err == nil && v.set.GoodLocked(p.ptr); !p.good {
			if r.Err == nil {
				v.stats.ReadRaces++
			} else {
				v.stats.CacheReadErrors++
			}
		}
	}
	v.set.Unlock()
	if b.failed != nil { // no log under the lock
		v.tell(warnCacheWrite, b.failedTimes, b.failed)
		b.failed = nil
	}
	for _, r := range done {
		p, ok := r.Owner.(*hitPart)
		if !ok {
			continue
		}
		h := p.hit
		if !p.good {
			h.bad.Store(true)
		}
		*p = hitPart{}
		q.parts.put(p)
		if h.left.Add(-1) > 0 {
			continue
		}
		if h.bad.Load() {
			c := v.use()
			b.slow = append(b.slow, v.newOp(q, h.req, c, accepted, true))
			v.unuse(c)
		} else {
			b.done = append(b.done, h.req)
		}
		waits.Add(now - h.since)
		h.reset()
		q.hits.put(h)
	}
	for _, o := range b.over { // only now: their parts are in done
		v.putOp(o)
	}
	v.set.StalledTotals(cacheset.StallCache, waits)
	v.set.StalledEach(cacheset.StallLock, locking, len(b.done)+len(b.slow))
	q.send(b)
}

// Close waits for everything under way.
func (q *queue) Close() error {
	if !q.out.Close() {
		return blockdev.ErrClosed
	}
	q.v.set.Lock()
	q.closeTidingsLocked()
	q.v.set.Unlock()
	return q.cache.Close()
}
