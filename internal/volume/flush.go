package volume

import (
	"errors"

	"github.com/ubcache/ubcache/internal/blockdev"
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

// flushBacking flushes the backing device and lets the clean keys of earlier epochs go to the disk. Source: B 9.14.
func (v *Volume) flushBacking() error {
	v.set.Lock()
	v.begun++
	n := v.begun
	v.set.Unlock()
	var g group
	g.init(v, &v.back, &v.cache)
	g.add(false, blockdev.Request{Op: blockdev.OpFlush})
	err := g.run()
	v.set.Lock()
	defer v.set.Unlock()
	if err != nil {
		return err
	}
	v.flushed = max(v.flushed, n)
	v.set.FlushDoneLocked(v.inode, n)
	return nil
}
