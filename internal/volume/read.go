package volume

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A piece is a part of a read that comes from one place.
type piece struct {
	span
	ptr   ondisk.Ptr // in the cache, its bucket held
	hit   bool
	dirty bool
	fill  *fill // registered: a copy goes to the cache
	buf   *blockdev.Buffer
	part  int // of the group
}

// read carries out a read that does not hit as a whole, and finishes the request before the cache gets its copy.
func (o *op) read() {
	v := o.v
	r := o.req
	err := o.look()
	if err == nil {
		err = o.fetch()
	}
	v.set.LockRequest()
	var epoch uint64
	for i := range o.pieces {
		p := &o.pieces[i]
		if p.hit {
			v.set.LetGoLocked(p.ptr)
		}
		if p.fill != nil && err != nil {
			v.ranges.endFillLocked(p.fill)
		}
	}
	if v.config.Load().Strict && v.wrote >= v.flushed {
		epoch = v.begun
	}
	v.set.Unlock()
	r.Err = err
	o.q.finish(r) // r and its buffer are the submitter's again
	o.req = nil
	o.waitedFor(false)
	for i := range o.pieces {
		p := &o.pieces[i]
		if p.fill == nil {
			continue
		}
		if err == nil {
			o.store(p, epoch)
			v.set.Lock()
			v.ranges.endFillLocked(p.fill)
			v.set.Unlock()
		}
		v.fillRoom.Release(int64(p.end-p.start) * ondisk.SectorSize)
		if p.buf != nil {
			p.buf.Release()
		}
		o.fills = append(o.fills, p.fill)
		*p = piece{}
	}
}

// look finds the pieces of the read. Buckets of hits are held, and fills registered, from then on.
//
// A large read is looked up in slices, with the lock let go between them.
func (o *op) look() error {
	v := o.v
	w := o.span()
	fills := o.why == accepted && !o.retry && !v.flash
	v.set.Enter()
	defer v.set.Unlock()
	allHit := true
	for at, n := w.start, 1; at < w.end; n++ {
		if n%lookSlice == 0 {
			v.set.Unlock()
			v.rt.Yield()
			v.set.Enter()
		}
		t, miss := v.set.LookupLocked(v.inode, at, w.end)
		if !miss.IsZero() {
			v.set.Unlock()
			err := v.set.ReadNodeRequest(miss)
			v.set.Enter()
			if err != nil {
				return err
			}
			continue
		}
		p := piece{span: span{at, t.End}}
		if t.Cached && v.set.HoldLocked(t.Ptr) {
			p.hit, p.ptr, p.dirty = true, t.Ptr, t.Dirty
			v.set.TouchLocked(t.Ptr)
		} else {
			allHit = false
			// Nothing goes over a pointer that a crash would make good again: a write that finds the fill there would
			// not know of it.
			if fills && !(t.Cached && v.set.EvictingLocked(t.Ptr)) {
				p.end = min(p.end, at+fillMost)
				o.beginFillLocked(&p)
			}
		}
		o.pieces = append(o.pieces, p)
		at = p.end
	}
	if !o.retry {
		v.countReadLocked(o.req, o.why, allHit)
	}
	return nil
}

// beginFillLocked registers a fill for a piece, if that may be.
func (o *op) beginFillLocked(p *piece) {
	v := o.v
	n := int64(p.end-p.start) * ondisk.SectorSize
	if v.down(p.start) != p.start || v.down(p.end) != p.end || !v.fillRoom.TryAcquire(n) {
		v.stats.FillsSkipped++
		return
	}
	var f *fill
	if last := len(o.fills) - 1; last >= 0 {
		f, o.fills = o.fills[last], o.fills[:last]
	} else {
		f = new(fill)
	}
	f.span = p.span
	if !v.ranges.beginFillLocked(f) {
		v.fillRoom.Release(n)
		o.fills = append(o.fills, f)
		return
	}
	p.fill = f
}

// fetch reads the pieces into the request's memory.
func (o *op) fetch() error {
	v := o.v
	w := o.span()
	g := &o.io
	g.reset()
	for i := range o.pieces {
		p := &o.pieces[i]
		dest := o.req.Buf[(p.start-w.start)*ondisk.SectorSize : (p.end-w.start)*ondisk.SectorSize]
		p.part = len(g.parts)
		switch {
		case p.hit:
			g.add(true, blockdev.Request{Op: blockdev.OpRead, Off: int64(p.ptr.Sector()) * ondisk.SectorSize, Buf: dest})
		case v.flash:
			clear(dest)
			p.part = -1
		case p.fill != nil:
			p.buf = v.pool.Get(len(dest))
			g.add(false, blockdev.Request{Op: blockdev.OpRead, Off: backOff(p.start), Buf: p.buf.Data})
		default:
			g.add(false, blockdev.Request{Op: blockdev.OpRead, Off: backOff(p.start), Buf: dest})
		}
	}
	if err := g.run(); err != nil {
		if err := o.fallBack(); err != nil {
			return err
		}
	}
	for i := range o.pieces {
		if p := &o.pieces[i]; p.fill != nil {
			copy(o.req.Buf[(p.start-w.start)*ondisk.SectorSize:], p.buf.Data)
		}
	}
	return nil
}

// fallBack reads what the cache device failed to give from the backing device, where that has it too.
func (o *op) fallBack() error {
	v := o.v
	w := o.span()
	g := &o.io
	for i := range o.pieces {
		p := &o.pieces[i]
		if p.part < 0 || g.parts[p.part].Err == nil {
			continue
		}
		err := g.parts[p.part].Err
		if p.hit {
			v.warn(warnCacheRead, fmt.Errorf("sector %d: %w", p.ptr.Sector(), err))
			if !o.retry { // else it was counted when it failed first
				v.set.LockRequest()
				v.stats.CacheReadErrors++
				v.set.Unlock()
			}
		}
		if !p.hit || p.dirty || v.flash {
			return err
		}
		var second group
		second.init(v, &v.back, &v.cache)
		second.request = true
		second.add(false, blockdev.Request{
			Op: blockdev.OpRead, Off: backOff(p.start), Buf: o.req.Buf[(p.start-w.start)*ondisk.SectorSize : (p.end-w.start)*ondisk.SectorSize],
		})
		if err := second.run(); err != nil {
			return err
		}
	}
	return nil
}

// store writes a fill's data to the cache and inserts its keys, unless a write has voided it. What fails here is a
// miss the next time, and nothing else. The keys are not journalled.
func (o *op) store(p *piece, epoch uint64) {
	v := o.v
	v.set.Lock()
	v.set.AwaitBucketsLocked(false)
	if p.fill.void || v.closed.Load() {
		v.stats.MissCollisions++
		v.set.Unlock()
		return
	}
	o.roomLocked(p.span, bucket.ForClean)
	if len(o.keys) == 0 {
		v.stats.FillsSkipped++
	}
	v.set.Unlock()
	if len(o.keys) == 0 {
		return
	}
	o.io.reset()
	o.addWrites(p.buf.Data, p.start)
	err := o.io.run()
	if err != nil {
		v.cacheFailed(err)
		v.set.Lock()
		v.set.DropLocked(o.keys, true)
		v.set.Unlock()
		return
	}
	in := &o.in
	in.Keys, in.Epoch, in.Unjournalled, in.Pinned, in.Guard = o.keys, epoch, true, true, p.fill
	_ = v.set.Insert(in) // the set logs why it has stopped
	in.Guard = nil
	if in.Stopped {
		v.set.Lock()
		v.stats.MissCollisions++
		v.set.Unlock()
	}
}

// roomLocked makes the keys for a range in the cache, as far as there is room.
func (o *op) roomLocked(w span, kind bucket.Use) {
	v := o.v
	o.keys = o.keys[:0]
	for at := w.start; at < w.end; {
		p, n := v.set.SpaceLocked(kind, v.inode, at, uint32(min(w.end-at, maxKey)), uint32(v.unit()), o.q.point)
		if n == 0 {
			return
		}
		at += uint64(n)
		o.keys = append(o.keys, ondisk.NewExtent(v.inode, at, n, p, kind == bucket.ForDirty))
	}
}

// addWrites adds the writes of the keys' data to the group; data begins at sector from.
func (o *op) addWrites(data []byte, from uint64) {
	for i := range o.keys {
		k := &o.keys[i]
		if k.Ptrs() == 0 {
			continue
		}
		o.io.add(true, blockdev.Request{
			Op: blockdev.OpWrite, Off: int64(k.P[0].Sector()) * ondisk.SectorSize,
			Buf: data[(k.Start()-from)*ondisk.SectorSize : (k.End()-from)*ondisk.SectorSize],
		})
	}
}
