package volume

import (
	"errors"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// flush makes durable what was acknowledged before it was submitted, on both devices. Dirty data stays where it is: the
// backing device has a flush only if a request has written to it since the last one. It also tells of a flush that
// nobody was told of: what a device has lost it may say once only.
//
// The backing device comes first, so that an entry that the journal writes may say what is in the cache.
func (v *Volume) flush() error {
	v.set.Lock()
	v.stats.Flushes++
	before := v.failed
	v.failed = nil
	due := !v.flash && (v.wrote >= v.flushed || before != nil)
	v.set.Unlock()
	if due {
		if err := errors.Join(before, v.flushBacking()); err != nil {
			return err
		}
	}
	return v.set.Sync()
}

// flushUntold is flushBacking where no client waits for its outcome.
func (v *Volume) flushUntold() error {
	err := v.flushBacking()
	if err != nil {
		v.set.Lock()
		v.failed = err
		v.set.Unlock()
	}
	return err
}

// flushErrors returns how many flushes of the backing device have failed, for flushSince.
func (v *Volume) flushErrors() uint64 {
	v.set.Lock()
	defer v.set.Unlock()
	return v.flushFails
}

// errForeignFlush is why data does not count as durable although the flush behind it has succeeded.
var errForeignFlush = errors.New("another flush failed meanwhile, and the device may have lost writes with that")

// flushSince is flushUntold, behind writes that came after flushErrors returned before: a device may say once only, to
// anyone, that it has lost them.
func (v *Volume) flushSince(before uint64) error {
	err := v.flushUntold()
	if err == nil && v.flushErrors() != before {
		err = errForeignFlush
	}
	return err
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
		var g group
		g.init(v, &v.back, &v.cache)
		g.add(false, blockdev.Request{Op: blockdev.OpFlush})
		err := g.run()
		v.set.Lock()
		s.busy, s.ended = false, n
		if err != nil {
			v.flushFails++
			s.lastFailed, s.err = n, err
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
