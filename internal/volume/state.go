package volume

import (
	"context"
	"errors"
	"fmt"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A dirtyState says whether data may become dirty now. The superblock must say so first: a dirty key may be on the disk
// only while the state there is DIRTY (F 10).
type dirtyState struct {
	durable bool // the state is DIRTY on the disk, and stays so while writes are under way
	writes  int  // under way, that make data dirty
	clean   bool // the state is not DIRTY on the disk
	doubt   bool // a write of the superblock has failed: what is on the disk is not known. Guarded by Volume.changing.
}

// storeSuper makes a superblock the backing device's. v.changing is held, or nobody else knows the volume yet.
func (v *Volume) storeSuper(sb *ondisk.Superblock) error {
	err := cacheset.WriteSuperblock(v.bio, sb, v.flushBacking)
	v.set.Lock()
	defer v.set.Unlock()
	v.dirty.doubt, v.dirty.clean = err != nil, err == nil && sb.State() != ondisk.StateDirty
	if err != nil {
		return err
	}
	v.super.Store(sb)
	return nil
}

// makeDirty makes the state DIRTY.
//
// Order (F 16): the state is durable before a dirty key enters the open journal entry.
func (v *Volume) makeDirty() error {
	v.changing.Lock()
	defer v.changing.Unlock()
	if (v.dirty.doubt || v.super.Load().State() != ondisk.StateDirty) && v.set.Broken()&cacheset.SkipDirtyState == 0 {
		super := *v.super.Load()
		super.SetState(ondisk.StateDirty)
		if err := v.storeSuper(&super); err != nil {
			v.wake() // what the superblock says now is not known: the drainer has to say CLEAN again
			return fmt.Errorf("marking the backing device as dirty: %w", err)
		}
	}
	v.set.Lock()
	v.dirty.durable = true
	v.set.Unlock()
	return nil
}

// cleanLocked reports whether no data of the volume is dirty, and none is becoming so.
func (v *Volume) cleanLocked() bool { return v.dirtyLocked() == 0 && v.dirty.writes == 0 }

// makeClean makes the state CLEAN if nothing is dirty, and reports whether it is that.
//
// Order (F 16): what was dirty is durable on the backing device before its clean keys are journalled (see flight.run and
// op.aroundDirty); these keys are durable before the state is CLEAN; and writes that make data dirty wait until that is
// written, and write DIRTY again.
func (v *Volume) makeClean() (bool, error) {
	v.changing.Lock()
	defer v.changing.Unlock()
	if !v.dirty.doubt && v.super.Load().State() != ondisk.StateDirty || v.config.Load().detached {
		return true, nil
	}
	v.set.Lock()
	if !v.cleanLocked() {
		v.set.Unlock()
		return false, nil
	}
	v.dirty.durable = false
	v.set.Unlock()
	var err error
	if v.set.Broken()&(cacheset.EarlyClean|cacheset.SkipV3) == 0 {
		err = v.set.Sync()
	}
	if err == nil {
		super := *v.super.Load()
		super.SetState(ondisk.StateClean)
		err = v.storeSuper(&super)
	}
	if err != nil {
		return false, fmt.Errorf("marking the backing device as clean: %w", err)
	}
	v.set.Lock()
	v.set.CleanLocked()
	v.set.Unlock()
	return true, nil
}

// Detach writes all dirty data back and gives the volume's slot up; from then on the volume is its backing device, and
// no more. If ctx ends first, or data cannot be written back, all is as before.
//
// Order (F 16): nothing is added to the cache, and no data becomes dirty; dirty data is written back; the backing device
// is flushed, and the clean keys are durable; the superblock says NONE, durable; then requests may go past the index; when
// nobody goes by the index any more, the slot is retired, and becomes another volume's some time (cacheset, dead.go).
func (v *Volume) Detach(ctx context.Context) error {
	if v.flash {
		return ErrNoBacking
	}
	free := v.publish(func(c *conf) bool {
		free := !c.detached && !c.detaching
		c.detaching = true
		return free
	})
	if !free {
		return ErrDetached
	}
	err := v.drain(ctx)
	if err == nil {
		err = v.WriteBack(ctx)
	}
	if err != nil {
		v.stay()
		return err
	}
	return v.within(ctx, func() error {
		if err := v.leave(); err != nil {
			v.stay()
			return err
		}
		return v.giveUpSlot()
	})
}

// stay ends a detach that does not come about.
func (v *Volume) stay() {
	v.publish(func(c *conf) bool {
		c.detaching = false
		return true
	})
}

// within does what has to be done to its end once it has begun; when ctx ends before, it goes on by itself.
func (v *Volume) within(ctx context.Context, do func() error) error {
	var err error
	over := false
	v.running.Go("volume change", func() {
		e := do()
		v.set.Lock()
		err, over = e, true
		v.drainer.done.Broadcast()
		v.set.Unlock()
	})
	v.set.Lock()
	defer v.set.Unlock()
	for !over {
		if cerr := v.drainer.done.WaitContext(ctx); cerr != nil {
			return fmt.Errorf("it cannot be stopped any more, and goes on: %w", cerr)
		}
	}
	return err
}

// leave makes the state NONE. Nothing is dirty, nor can it become so.
func (v *Volume) leave() error {
	if err := v.flushBacking(); err != nil {
		return err
	}
	if err := v.set.Sync(); err != nil {
		return err
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	v.set.Lock()
	clean := v.cleanLocked()
	v.set.Unlock()
	if !clean {
		return errors.New("there is dirty data although none could be made") // a bug
	}
	super := *v.super.Load()
	super.SetState(ondisk.StateNone)
	super.SetUUID = ondisk.UUID{}
	if err := v.storeSuper(&super); err != nil {
		return err
	}
	v.publish(func(c *conf) bool {
		c.detaching, c.detached = false, true
		return true
	})
	return nil
}

// giveUpSlot retires the slot of a volume, when nobody goes by its inode any more: requests that came before the volume was
// detached are over, with their fills, and so are the batches of writeback. What comes later does not look at the inode.
//
// Where that does not come about, since a device hangs or the set is closed, the slot is retired when the backing device
// is attached again: its superblock says NONE.
func (v *Volume) giveUpSlot() error {
	err := v.drain(v.stop)
	v.set.Lock()
	for err == nil && len(v.drainer.idle) < flights {
		err = v.drainer.done.WaitContext(v.stop)
	}
	if err == nil {
		v.dirty.durable = false
		v.set.UnbackLocked(v.inode)
		v.left = true
	}
	v.set.Unlock()
	if err == nil {
		now := uint32(v.rt.WallTime().Unix())
		err = v.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
			retire(&slots[v.inode], now)
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("the volume is detached, but its slot in the set could not be given up: %w", err)
	}
	return nil
}

// Detached reports whether the volume is its backing device and no more, and whether it is about to be.
func (v *Volume) Detached() (is, becoming bool) {
	c := v.config.Load()
	return c.detached, c.detaching
}

// uncached carries out a read or a write of a volume that is detached.
func (o *op) uncached() error {
	v := o.v
	r := o.req
	if r.Op == blockdev.OpDiscard && !v.back.info.CanDiscard {
		return nil
	}
	v.set.LockRequest()
	if r.Op == blockdev.OpRead {
		v.countReadLocked(r, bypassMode, false)
	} else {
		v.countWriteLocked(r)
	}
	v.set.Unlock()
	w := o.span()
	if r.Op == blockdev.OpRead {
		o.io.reset()
		o.io.add(false, blockdev.Request{Op: r.Op, Off: backOff(w.start), Buf: r.Buf})
		return o.io.run()
	}
	if err := o.toBacking(w); err != nil {
		return err
	}
	return o.kept()
}
