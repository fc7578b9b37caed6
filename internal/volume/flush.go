package volume

import (
	"errors"
	"sync/atomic"

	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/rt"
)

// A device may say once only, to whatever is flushed next, that it has lost writes. So all that makes the backing device
// flush goes through flushBacking, also what is a write with FUA to us, and a superblock: it is written, then the device
// is flushed. A failed flush then concerns
//
//	writes under way    fail, unless a flush has made them durable before (op.kept)
//	writes acknowledged each queue is told by its next flush (tellLocked)
//	writeback           the data stays dirty (flushSince)
//	clean keys          those that wait for a flush count no more, and fills under way are void
//
// The cache device has this in package cacheset: after a failed flush the set has failed.

// flush makes durable what was acknowledged before it was submitted, on both devices. Dirty data stays where it is: the
// backing device has a flush only if a request has written to it since the last one.
//
// The backing device comes first, so that an entry that the journal writes may say what is in the cache.
func (o *op) flush() error {
	v := o.v
	v.set.LockRequest()
	v.stats.Flushes++
	due := !v.flash && v.wrote >= v.flushed
	v.set.Unlock()
	var err error
	if due {
		begin := v.rt.Now()
		err = v.flushBacking()
		v.stalled(cacheset.StallBacking, begin)
	}
	v.set.LockRequest()
	err = o.tellLocked(err)
	v.set.Unlock()
	if err != nil || o.conf.detached {
		return err
	}
	return v.set.SyncRequest()
}

// A tidings is what a flush goes by to find out whether it has to tell of a failed one.
type tidings struct {
	told uint64 // failed flushes that its queue was told of when it came
	seen uint64 // that there were then
	out  uint64 // acks.out then
}

// acks counts the writes that were acknowledged with nothing but the backing device to keep them.
type acks struct {
	given  uint64        // decided on; guarded by the set's lock
	failed uint64        // the same when a flush failed last
	out    atomic.Uint64 // with the client
}

// askLocked prepares a flush for tellLocked, when it is submitted.
func (o *op) askLocked() {
	o.tidings = tidings{told: o.q.told, seen: o.v.flushFails, out: o.v.acks.out.Load()}
}

// tellLocked returns what to answer a flush, for which the backing device was flushed with the outcome err: also that it has
// failed one of which the queue was not told when the flush came. The next flush of the queue tells it once more if
// a write was acknowledged between the submission of this one and the failure: it may be lost, and this flush does not
// answer for it.
func (o *op) tellLocked(err error) error {
	v, q := o.v, o.q
	if v.flushFails == o.tidings.told {
		return err
	}
	to := v.flushFails
	if v.acks.failed != o.tidings.out {
		to = o.tidings.seen
	}
	if to > q.told {
		if q.told <= v.told {
			v.told = max(v.told, to)
		}
		q.told = to
	}
	if err == nil {
		err = v.flushing.err
	}
	return err
}

// closeTidingsLocked hands what a queue was not told of on to the next that is made: a client may come back.
func (q *queue) closeTidingsLocked() {
	if q.wrote.Load() {
		q.v.told = min(q.v.told, q.told)
	}
}

// untoldLocked returns what nobody was told of who had to be.
func (v *Volume) untoldLocked() error {
	if v.told == v.flushFails {
		return nil
	}
	return v.flushing.err
}

// flushErrors returns how many flushes of the backing device have failed, for flushSince.
func (v *Volume) flushErrors() uint64 {
	v.set.Lock()
	defer v.set.Unlock()
	return v.flushFails
}

// errForeignFlush is why data does not count as durable although the flush behind it has succeeded.
var errForeignFlush = errors.New("another flush failed meanwhile, and the device may have lost writes with that")

// flushSince is flushBacking, behind writes that came after flushErrors returned before.
func (v *Volume) flushSince(before uint64) error {
	err := v.flushBacking()
	if err == nil && v.flushErrors() != before {
		err = errForeignFlush
	}
	return err
}

// beginBelow says that the request writes to the backing device from now on.
func (o *op) beginBelow() {
	v := o.v
	v.set.LockRequest()
	if !o.below {
		o.below, o.fails = true, v.flushFails
	}
	v.set.Unlock()
}

// flushBelow makes durable what the request has written to the backing device.
func (o *op) flushBelow() error {
	begin := o.v.rt.Now()
	err := o.v.flushSince(o.fails)
	o.v.stalled(cacheset.StallBacking, begin)
	if err == nil {
		o.below = false
	}
	return err
}

// WantedLocked reports whether the backing device has not lost what the request has written there.
func (o *op) WantedLocked() bool { return !o.below || o.v.flushFails == o.fails }

// kept returns why a write cannot be acknowledged: the flush that would tell of its loss is over. If it can it will be.
func (o *op) kept() error {
	o.v.set.LockRequest()
	defer o.v.set.Unlock()
	if !o.WantedLocked() {
		return errForeignFlush
	}
	if o.acked = o.below; o.acked {
		o.v.acks.given++
	}
	return nil
}

// A flushing is what is known of the flushes of the backing device. They are made one at a time, so that what one of them
// says is known before the next begins; who waits for the same one shares it.
type flushing struct {
	over       rt.Cond // one is
	busy       bool
	ended      uint64 // number of the last one that is
	lastFailed uint64 // number of the last one that has failed
	err        error  // of that
}

// flushBacking flushes the backing device and lets the clean keys of earlier epochs go to the disk. Source: B 9.14.
func (v *Volume) flushBacking() error {
	v.set.Lock()
	defer v.set.Unlock()
	s := &v.flushing
	want := v.begun + 1
	for s.busy && s.ended < want {
		s.over.Wait()
	}
	if s.ended < want {
		s.busy = true
		v.begun++
		n := v.begun
		v.set.Unlock()
		err := v.bio.Flush()
		v.set.Lock()
		s.busy, s.ended = false, n
		if err != nil {
			v.flushFails++
			v.acks.failed = v.acks.given
			s.lastFailed, s.err = n, err
			v.set.FlushFailedLocked(v.inode) // all epochs: none is younger than this flush
			v.ranges.voidFillsLocked()
		} else {
			v.flushed = max(v.flushed, n)
			if !v.left {
				v.set.FlushDoneLocked(v.inode, n)
			}
		}
		s.over.Broadcast()
	}
	if s.lastFailed >= want {
		return s.err
	}
	return nil
}
