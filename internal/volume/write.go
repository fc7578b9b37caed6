package volume

import (
	"errors"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/writeback"
)

// A route is the way that a write takes.
type route uint8

const (
	routeThrough     route = iota // to both devices
	routeAround                   // to the backing device; the cache forgets the range
	routeBack                     // to the cache, as dirty
	routeAroundDirty              // as routeAround, over dirty data: the index changes after a flush
)

// routing is what decides on a route.
type routing struct {
	flash     bool
	data      bool // a write; else zeroes or a discard, which never are in the cache
	dirty     bool // live dirty data is overwritten
	dirtyRoom bool // the set takes dirty data, of any mode
	writeback bool // the write stays in the cache, see writeback.ShouldWriteback
	why       bypass
}

func (r routing) route() route {
	switch {
	case r.flash:
		return routeBack
	case r.dirty && r.data && r.dirtyRoom:
		return routeBack
	case r.dirty:
		return routeAroundDirty
	case r.data && r.dirtyRoom && r.writeback:
		return routeBack
	case !r.data || r.why != accepted:
		return routeAround
	}
	return routeThrough
}

// write carries out a write, a write of zeroes or a discard.
func (o *op) write() error {
	v := o.v
	w := o.span()
	if o.req.Op == blockdev.OpDiscard && !v.flash && !v.back.info.CanDiscard {
		return nil // the device keeps what it has, and so does the cache
	}
	v.set.Enter()
	if !v.ranges.tryBeginWriteLocked(w) {
		begin := v.rt.Now()
		v.ranges.beginWriteLocked(w)
		v.stalled(cacheset.StallOverlap, begin)
	}
	way, cached, err := o.decideLocked(w)
	if err == nil && way != routeBack && v.awaitLocked(w) {
		way, cached, err = o.decideLocked(w)
	}
	v.ranges.toCacheLocked(w, way == routeBack)
	v.countWriteLocked(o.req)
	if err == nil {
		o.declinedLocked(way)
	}
	v.set.Unlock()
	if err == nil {
		switch way {
		case routeThrough:
			err = o.through(w, cached)
		case routeAround:
			err = o.around(w, cached)
		case routeBack:
			err = o.back(w)
		case routeAroundDirty:
			err = o.aroundDirty(w)
		}
	}
	v.set.LockRequest()
	o.endWriteLocked(w)
	v.set.Unlock()
	return err
}

// endWriteLocked ends what beginWriteLocked and beginDirtyLocked began.
func (o *op) endWriteLocked(w span) {
	v := o.v
	v.ranges.endWriteLocked(w)
	if o.dirtying {
		o.dirtying = false
		v.dirty.writes--
		if v.drainer != nil {
			v.drainer.kickLocked()
		}
	}
}

// decideLocked looks at what the index has of a range, and decides on the route.
func (o *op) decideLocked(w span) (way route, cached bool, err error) {
	cached, err = o.surveyLocked(w)
	return o.routingLocked(w, len(o.dirty) > 0).route(), cached, err
}

// routingLocked returns what decides on the route, if live dirty data is overwritten or not.
func (o *op) routingLocked(w span, dirty bool) routing {
	v := o.v
	aligned := w.start%v.block == 0 && w.end%v.block == 0
	inUse := v.set.InUseLocked()
	rt := routing{
		flash: v.flash, data: o.req.Op == blockdev.OpWrite, dirty: dirty, why: o.why,
		dirtyRoom: inUse <= writeback.CutoffWritebackSync && aligned && !o.conf.detaching,
	}
	// Nobody says of a request whether it is waited for: all are taken for such.
	rt.writeback = writeback.ShouldWriteback(writeback.Decision{
		Writeback: o.conf.Mode == ondisk.Writeback, Detaching: o.conf.detaching, InUse: inUse, Discard: !rt.data,
		PartialStripe: v.stripeDirtyLocked(w), Bypass: o.why != accepted, Sync: true,
	})
	return rt
}

// declinedLocked counts a write in writeback mode that goes to the backing device because of how much is in use. Those
// that are bypassed are counted as such.
func (o *op) declinedLocked(way route) {
	if o.conf.Mode == ondisk.Writeback && !o.v.flash && o.req.Op == blockdev.OpWrite && o.why == accepted && way != routeBack {
		o.v.stats.DeclinedFull++
	}
}

func (v *Volume) countWriteLocked(r *blockdev.Request) {
	switch r.Op {
	case blockdev.OpDiscard:
		v.stats.Discards++
	case blockdev.OpWriteZeroes:
		v.stats.Zeroes++
	default:
		v.stats.Writes++
		v.stats.WrittenSectors += uint64(len(r.Buf)) / ondisk.SectorSize
	}
}

// surveyLocked finds out what of a range the index has: whether any of it has a pointer, good or not, and which parts
// are dirty. It lets the lock go now and then, and to read nodes: what it has seen by then cannot become dirty, nor be
// filled, since the write is registered.
func (o *op) surveyLocked(w span) (cached bool, err error) {
	v := o.v
	o.dirty = o.dirty[:0]
	for at, n := w.start, 1; at < w.end; n++ {
		if n%lookSlice == 0 {
			v.set.Unlock() // for whoever waits
			v.rt.Yield()
			v.set.Enter()
		}
		p, miss := v.set.LookupLocked(v.inode, at, w.end)
		if !miss.IsZero() {
			v.set.Unlock()
			err := v.set.ReadNodeRequest(miss)
			v.set.Enter()
			if err != nil {
				return false, err
			}
			continue
		}
		if p.Cached {
			cached = true
			if p.Dirty && v.set.GoodLocked(p.Ptr) {
				if n := len(o.dirty); n > 0 && o.dirty[n-1].end == p.Start {
					o.dirty[n-1].end = p.End
				} else {
					o.dirty = append(o.dirty, span{p.Start, p.End})
				}
			}
		}
		at = p.End
	}
	return cached, nil
}

// through writes to both devices.
//
// Order, strict: clean data in the cache is invalidated, durably; the backing device and the cache are written; the key
// is inserted, and stays off the disk until the backing device was flushed. With the kernel's order nothing waits. With
// FUA the backing device is flushed before the key is inserted.
func (o *op) through(w span, cached bool) error {
	v := o.v
	if cached && o.conf.Strict {
		if err := o.invalidateFirst(w); err != nil {
			return err
		}
	}
	v.set.LockRequest()
	v.set.AwaitBucketsLocked(true)
	o.roomLocked(w, bucket.ForClean)
	if n := len(o.keys); n == 0 || o.keys[n-1].End() < w.end {
		v.stats.NoRoom++
	}
	v.set.Unlock()
	data := o.req.Buf
	o.io.reset()
	o.io.add(false, blockdev.Request{Op: blockdev.OpWrite, Off: backOff(w.start), Buf: data})
	o.addWrites(data, w.start)
	o.beginBelow()
	if err := o.io.run(); err != nil {
		if err := o.io.parts[0].Err; err != nil {
			return o.lost(w, err)
		}
		v.cacheFailed(err)
		o.stripFailed()
	}
	epoch := o.epoch()
	if o.req.Flags&blockdev.FUA != 0 {
		if err := o.flushBelow(); err != nil {
			return o.lost(w, err)
		}
		epoch = 0 // it is durable there
	}
	// What found no room is invalidated.
	from := w.start
	if n := len(o.keys); n > 0 {
		from = o.keys[n-1].End()
	}
	o.keys = appendInvalidations(o.keys, v.inode, span{from, w.end})

	in := &o.in
	in.Keys, in.Epoch, in.Unjournalled, in.Pinned, in.Guard = o.keys, epoch, false, true, o
	err := o.insert()
	in.Guard = nil
	switch {
	case err != nil:
		return err
	case in.Stopped:
		o.keys = o.keys[:0]
		return o.lost(w, errForeignFlush)
	}
	return o.settle()
}

// epoch notes that the backing device has got the write, and returns the epoch of its keys.
func (o *op) epoch() uint64 {
	v := o.v
	v.set.LockRequest()
	defer v.set.Unlock()
	v.wrote = v.begun
	if !o.conf.Strict {
		return 0
	}
	return v.begun
}

// stripFailed takes the pointers from the keys whose data the cache device did not take.
func (o *op) stripFailed() {
	v := o.v
	v.set.LockRequest()
	defer v.set.Unlock()
	part := 1
	for i := range o.keys {
		k := &o.keys[i]
		if o.io.parts[part].Err != nil {
			v.set.DropLocked(o.keys[i:i+1], true)
			*k = ondisk.NewInvalidation(k.Inode(), k.End(), k.Size())
		}
		part++
	}
}

// lost gives up a write that the backing device has not taken, or has lost: nobody knows what is there now, so the cache
// must not say.
func (o *op) lost(w span, err error) error {
	v := o.v
	v.set.LockRequest()
	v.wrote = v.begun // perhaps in part
	v.set.DropLocked(o.keys, true)
	v.set.Unlock()
	o.keys = appendInvalidations(o.keys[:0], v.inode, w)
	in := &o.in
	in.Keys, in.Unjournalled, in.Pinned = o.keys, false, false
	return errors.Join(err, o.insert())
}

// insert changes the index.
func (o *op) insert() error {
	v := o.v
	err := v.set.Insert(&o.in)
	v.set.LockRequest()
	v.newest = max(v.newest, o.in.Seq)
	v.set.Unlock()
	o.seq = max(o.seq, o.in.Seq)
	return err
}

// settle returns when a write may be acknowledged: all that it changed in the index counts, in several steps perhaps. One
// with FUA waits for what changed the index before it, too: an invalidation of its range may not be durable, although it
// was acknowledged.
func (o *op) settle() error {
	v := o.v
	var err error
	if o.req.Flags&blockdev.FUA == 0 {
		err = v.set.Acknowledge(o.seq)
	} else {
		v.set.LockRequest()
		seq := max(o.seq, v.newest)
		v.set.Unlock()
		err = v.set.WaitDurableRequest(seq)
	}
	if err != nil {
		return err
	}
	return o.kept()
}

// appendInvalidations appends keys that say that nothing of a range is cached.
func appendInvalidations(keys []ondisk.Key, inode uint32, w span) []ondisk.Key {
	for at := w.start; at < w.end; {
		n := min(w.end-at, maxKey)
		at += n
		keys = append(keys, ondisk.NewInvalidation(inode, at, uint32(n)))
	}
	return keys
}

// invalidateFirst invalidates a range of clean data before the backing device is written; it waits until that is
// durable if a crash would bring back what was there.
func (o *op) invalidateFirst(w span) error {
	v := o.v
	exposed, err := o.forget(w)
	if err != nil {
		return err
	}
	if !o.conf.Strict || !exposed {
		return v.set.Acknowledge(o.in.Seq)
	}
	v.set.LockRequest()
	v.stats.InvalidationWaits++
	v.set.Unlock()
	return v.set.WaitDurableRequest(o.in.Seq)
}

// forget invalidates what the index has of a range, good or not, some of it at a time: the range may be as large as a
// volume. Nothing is added meanwhile, since the write is registered. exposed says that a crash would bring back something
// before entry o.in.Seq is durable.
func (o *op) forget(w span) (exposed bool, err error) {
	v := o.v
	in := &o.in
	in.Unjournalled, in.Pinned, in.Seq = false, false, 0
	for at := w.start; at < w.end; {
		o.keys = o.keys[:0]
		var gone span
		v.set.Enter()
		for n := 0; at < w.end && n < lookSlice; n++ {
			p, miss := v.set.LookupLocked(v.inode, at, w.end)
			if !miss.IsZero() {
				v.set.Unlock()
				if err := v.set.ReadNodeRequest(miss); err != nil {
					return exposed, err
				}
				v.set.Enter()
				continue
			}
			switch at = p.End; {
			case !p.Cached:
			case gone.end == p.Start && gone.end > 0:
				gone.end = p.End
			default:
				o.keys = appendInvalidations(o.keys, v.inode, gone)
				gone = span{p.Start, p.End}
			}
		}
		v.set.Unlock()
		if o.keys = appendInvalidations(o.keys, v.inode, gone); len(o.keys) == 0 {
			v.rt.Yield()
			continue
		}
		seq := in.Seq
		in.Keys = o.keys
		if err := o.insert(); err != nil {
			return exposed, err
		}
		in.Seq = max(in.Seq, seq)
		exposed = exposed || in.Exposed
	}
	o.keys = o.keys[:0]
	return exposed, nil
}

// around writes to the backing device alone.
func (o *op) around(w span, cached bool) error {
	if cached {
		if err := o.invalidateFirst(w); err != nil {
			return err
		}
	}
	if err := o.toBacking(w); err != nil {
		return err
	}
	return o.settle()
}

// toBacking makes a part of the request on the backing device, which is flushed then if the request has FUA.
func (o *op) toBacking(w span) error {
	v := o.v
	if err := v.set.Err(); err != nil && !o.conf.detached {
		return err // what invalidated the range before may be lost
	}
	o.io.reset()
	r := blockdev.Request{
		Op: o.req.Op, Off: backOff(w.start), Len: int64(w.end-w.start) * ondisk.SectorSize, Flags: o.req.Flags &^ blockdev.FUA,
	}
	if r.Op == blockdev.OpWrite {
		from := o.span().start
		r.Buf = o.req.Buf[(w.start-from)*ondisk.SectorSize : (w.end-from)*ondisk.SectorSize]
	}
	o.io.add(false, r)
	o.beginBelow()
	err := o.io.run()
	v.set.LockRequest()
	v.wrote = v.begun
	v.set.Unlock()
	if err == nil && o.req.Flags&blockdev.FUA != 0 {
		err = o.flushBelow()
	}
	return err
}

// aroundDirty writes to the backing device over dirty data. A key that became durable while the write is not would
// lose both at a power cut: the flushed old data and the new.
//
// Order: clean parts are invalidated; the dirty keys are durable, or a power cut would bring back what they cover, clean
// perhaps, over what is on the backing device then; the backing device is written, then flushed; then the dirty parts go.
func (o *op) aroundDirty(w span) error {
	var dirty []span
	for _, d := range o.dirty {
		if d.overlaps(w) {
			dirty = append(dirty, span{max(d.start, w.start), min(d.end, w.end)})
		}
	}
	at := w.start
	for _, d := range append(dirty, span{w.end, w.end}) {
		if at < d.start {
			if err := o.invalidateFirst(span{at, d.start}); err != nil {
				return err
			}
		}
		at = d.end
	}
	o.v.set.LockRequest()
	seq := o.v.set.DirtyEntryLocked(o.v.inode)
	o.v.set.Unlock()
	if err := o.v.set.WaitDurableRequest(seq); err != nil {
		return err
	}
	if err := o.toBacking(w); err != nil {
		return err
	}
	if o.below {
		if err := o.flushBelow(); err != nil {
			return err
		}
	}
	o.keys = o.keys[:0]
	for _, d := range dirty {
		o.keys = appendInvalidations(o.keys, o.v.inode, d)
	}
	in := &o.in
	in.Keys, in.Unjournalled, in.Pinned = o.keys, false, false
	if err := o.insert(); err != nil {
		return err
	}
	return o.settle()
}

// instead writes to the backing device what there is no room for in the cache.
func (o *op) instead(w span) error {
	v := o.v
	v.set.Enter()
	v.ranges.toCacheLocked(o.span(), false)
	v.awaitLocked(w)
	cached, err := o.surveyLocked(w)
	v.set.Unlock()
	switch {
	case err != nil:
		return err
	case len(o.dirty) > 0:
		return o.aroundDirty(w)
	}
	return o.around(w, cached)
}

// beginDirty returns when the superblock says DIRTY, and goes on saying so until the write is over.
func (o *op) beginDirty() error {
	v := o.v
	v.set.LockRequest()
	for !v.dirty.durable {
		v.set.Unlock()
		begin := v.rt.Now()
		if err := v.makeDirty(); err != nil {
			return err
		}
		v.stalled(cacheset.StallSuperblock, begin)
		v.set.LockRequest()
	}
	o.beginDirtyLocked()
	v.set.Unlock()
	return nil
}

// beginDirtyLocked says that the write makes data dirty: the superblock says DIRTY until it is over.
func (o *op) beginDirtyLocked() {
	o.dirtying = true
	o.v.dirty.writes++
}

// back writes to the cache alone: the data is dirty. Zeroes and discards of a flash-only volume are what is not in the
// index.
//
// Order: the backing superblock says DIRTY; the data; the key.
func (o *op) back(w span) error {
	v := o.v
	if !v.flash {
		if err := o.beginDirty(); err != nil {
			return err
		}
	}
	in := &o.in
	in.Epoch, in.Unjournalled, in.Pinned = 0, false, true
	if o.req.Op != blockdev.OpWrite {
		if _, err := o.forget(w); err != nil {
			return err
		}
		return o.settle()
	}
	for at := w.start; at < w.end; {
		if err := o.room(span{at, w.end}); err != nil {
			v.warn(warnNoSpace, err)
			return err
		}
		if len(o.keys) == 0 {
			return o.instead(span{at, w.end})
		}
		end := o.keys[len(o.keys)-1].End()
		o.io.reset()
		o.addWrites(o.req.Buf[(at-w.start)*ondisk.SectorSize:], at)
		if err := o.io.run(); err != nil {
			v.cacheFailed(err)
			v.set.LockRequest()
			v.set.DropLocked(o.keys, true)
			v.set.Unlock()
			return err
		}
		in.Keys = o.keys
		if err := o.insert(); err != nil {
			return err
		}
		at = end
	}
	return o.settle()
}

// room gives room in the cache to some of a range, at least: a large write may need more buckets than are ready at a time.
// Where there is none now it waits for more. With a backing device there is another way in the end, then there are no keys;
// without one it waits for as long as there are more to come, but not for ever.
func (o *op) room(w span) error {
	v := o.v
	v.set.LockRequest()
	defer v.set.Unlock()
	o.keys = o.keys[:0]
	if !v.flash || !v.set.SpaceWantedLocked() {
		o.roomLocked(w, bucket.ForDirty)
	}
	if len(o.keys) > 0 {
		return nil
	}
	v.set.WantSpaceLocked(true)
	defer v.set.WantSpaceLocked(false)
	begin := v.rt.Now()
	for tries := 0; tries < spaceTries || v.flash && v.rt.Now()-begin < spaceLong; tries++ {
		v.set.Unlock()
		err := v.set.WaitSpace()
		v.set.LockRequest()
		if err != nil {
			break
		}
		if o.roomLocked(w, bucket.ForDirty); len(o.keys) > 0 {
			return nil
		}
	}
	v.stats.NoRoom++
	if o.conf.Mode == ondisk.Writeback && !v.flash && o.why == accepted {
		v.stats.DeclinedNoRoom++
	}
	if !v.flash {
		return nil
	}
	if err := v.set.Err(); err != nil {
		return errors.Join(ErrNoSpace, err)
	}
	return ErrNoSpace
}
