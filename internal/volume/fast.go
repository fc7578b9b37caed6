package volume

import (
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
)

// A write that stays in the cache, and for which nothing has to be waited, takes no goroutine, and goes with its batch:
//
//	Submit    placeLocked     registered, and given room   one hold of the lock, one submission
//	arrived   arrivedLocked   its keys are inserted        one hold of the lock, one answer
//
// The order is that of op.back. What has to wait after all, for a node, for room in a leaf or in the journal, or until
// its journal entry is durable, goes on with a goroutine, as op.finish.

// placeMost is how many sectors of a write are placed without a goroutine: there may be no room for a large one, and what
// was given to it until then would be lost.
const placeMost = 64

// insertSlice is how many writes are inserted in one hold of the lock.
const insertSlice = 64

// placeLocked adds a write's data to the batch, if the write stays in the cache and need not wait for anything. now is the
// time.
func (o *op) placeLocked(b *batch, now time.Duration) bool {
	v := o.v
	w := o.span()
	switch {
	case v.flash && v.set.SpaceWantedLocked():
		return false // it waits as others do
	case !v.flash && !v.dirty.durable || w.end-w.start > placeMost || !aligned(o.req.Buf, v.cache.align):
		return false
	case o.routingLocked(w, false).route() != routeBack || !v.ranges.tryBeginWriteLocked(w):
		return false
	}
	o.roomLocked(w, bucket.ForDirty)
	if n := len(o.keys); n == 0 || o.keys[n-1].End() < w.end {
		v.set.DropLocked(o.keys, true)
		v.ranges.endWriteLocked(w)
		return false
	}
	if !v.flash {
		o.beginDirtyLocked()
	}
	v.ranges.toCacheLocked(w, true)
	v.countWriteLocked(o.req)
	o.placed, o.since = true, now
	o.io.reset()
	o.addWrites(o.req.Buf, w.start)
	o.io.begin(0, len(o.io.parts))
	for i := range o.io.parts {
		b.toCache = append(b.toCache, &o.io.parts[i].Request)
	}
	return true
}

// arrivedLocked takes note that a part of a placed write is on the cache device. With the last one its keys are inserted;
// it reports whether it was that.
func (o *op) arrivedLocked(b *batch) bool {
	v := o.v
	if o.io.left--; o.io.left > 0 {
		return false
	}
	in := &o.in
	in.Keys, in.Epoch, in.Unjournalled, in.Pinned = o.keys, 0, false, true
	r := o.req
	if r.Err = o.io.end(); r.Err != nil {
		v.set.DropLocked(o.keys, true)
		v.stats.CacheWriteErrors++
		if n := v.warnedLocked(warnCacheWrite); n > 0 {
			b.failed, b.failedTimes = r.Err, n
		}
	} else if !v.set.TryInsertLocked(in) || r.Flags&blockdev.FUA != 0 || !v.set.Lasting() {
		b.slow = append(b.slow, o)
		return true
	} else {
		v.newest = max(v.newest, in.Seq)
		r.Err = v.set.Err()
	}
	o.endWriteLocked(o.span())
	b.done, b.over = append(b.done, r), append(b.over, o)
	return true
}

// finish makes the rest of a placed write, whose data is on the cache device.
func (o *op) finish() error {
	v := o.v
	err := v.set.InsertRest(&o.in)
	if err == nil {
		v.set.LockRequest()
		v.newest = max(v.newest, o.in.Seq)
		v.set.Unlock()
		o.seq = o.in.Seq
		err = o.settle()
	}
	v.set.LockRequest()
	o.endWriteLocked(o.span())
	v.set.Unlock()
	return err
}
