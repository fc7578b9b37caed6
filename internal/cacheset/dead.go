package cacheset

import (
	"errors"
	"time"

	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A slot whose device was detached, or whose volume was deleted, is retired. Its number is the inode of keys that may be
// in the index still, so nobody gets it, until all of them are gone; then it is zeroed, and can be had again. A set of
// 64 KiB buckets has 512 slots for its life.
//
// Order, each step durable before the next that names it:
//
//  1. The slot is retired. By then nobody goes by the inode any more: no request, no fill, no batch of writeback, no flush
//     of the backing device (volume, giveUpSlot). So no key of it comes but those of step 2.
//  2. What has a pointer is covered by keys without one, which are journalled. So the buckets are free by the usual rule
//     (V1), and the counts are right at each moment.
//  3. Each leaf that has a key of the inode is rewritten: a copy leaves out what has no pointer. The pointer to the copy,
//     and all that leads there, is durable (btree.Node.Linked).
//  4. An entry is durable that needs none of those that may have a key of the inode, step 2's included.
//  5. The array with the slot zeroed is written, and named by an entry. Only then ChangeSlots lets go of its lock, and
//     somebody may take the slot.
//
// Why that is enough. Who starts from the disk, we or a kernel, sees what the leaves have that can be reached from the root
// of the newest entry, and the keys of the entries that it needs. A kernel asks no more of an inode that it gives away than
// that nothing is found there: it counts what is dirty of it, and serves it.
//
//   - In a leaf a key of an inode is covered by keys of the same inode alone, and those without pointer stay in memory, as
//     they do on the disk, until a rewrite. So the entries of the inode that a leaf has in memory cover exactly the ranges
//     of the keys that are physically in its sets, old sets included: where there is no entry, there is no key. A node whose
//     last append was torn was rewritten at the start (mend). What an append or a copy under way has is in memory, too.
//   - A leaf that has none gets none after that, by 1: the walk need not come back.
//   - A node that was replaced can be reached until its parent's append is durable. That is what step 3 waits for.
//   - The position of an interior node's key may be one in the inode: it says where a leaf ends, and holds nothing.
//   - Entries of the journal: none that is needed has a key, by 4, and last_seq never goes back. In the mapping are only
//     entries behind the newest durable one.
//
// A crash, or a stop, before 5 leaves the slot retired, and the next start begins with 2 again. Its replay may bring keys
// back that were gone, in their order, those of step 2 last; it is over before we look. A crash in 5 leaves one of the two
// arrays, and either is true.

const (
	dropLook  = 256         // extents looked at, and covered, in one hold of the lock
	dropMost  = 32768       // sectors that a key covers, the kernel's limit
	dropRetry = time.Minute // after keys that could not be removed
)

// dropDead is the goroutine that frees retired slots. Source: B 9.4, F 8.3.
func (s *Set) dropDead() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.errLocked() == nil {
		list := s.retiredLocked()
		if !s.serving || len(list) == 0 {
			s.dead.Wait()
			continue
		}
		s.mu.Unlock()
		err := s.freeSlots(list)
		s.mu.Lock()
		if err == nil || s.errLocked() != nil {
			continue
		}
		s.log.Warn("what a volume that is no more had in the cache could not be removed; this is tried again", "set", s.UUID().String(), "err", err)
		s.stuck = true
		s.slotFreed.Broadcast()
		ctx, cancel := s.rt.WithTimeout(s.stop, dropRetry)
		_ = s.dead.WaitContext(ctx)
		cancel()
		s.stuck = false
	}
}

// retiredLocked returns the retired slots.
func (s *Set) retiredLocked() (list []uint32) {
	for i := range s.slots {
		if s.slots[i].Retired() {
			list = append(list, uint32(i))
		}
	}
	return list
}

// freeSlots frees retired slots, all that it can: what cannot be read keeps one of them, not the others.
func (s *Set) freeSlots(list []uint32) error {
	s.mu.Lock()
	last := s.journal.OpenLocked() // no later entry has keys, but for what dropInode inserts
	s.mu.Unlock()
	free := list[:0]
	var errs []error
	for _, inode := range list {
		seq, err := s.dropInode(inode)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		free, last = append(free, inode), max(last, seq)
	}
	if len(free) == 0 {
		return errors.Join(errs...)
	}
	if s.opt.Broken&EarlySlot == 0 {
		if err := s.expire(last); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
	s.mu.Lock()
	for _, inode := range free {
		s.dirty[inode] = dirtyMap{} // the walk has found nothing, whatever was counted
	}
	s.mu.Unlock()
	err := s.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
		for _, inode := range free {
			slots[inode] = ondisk.UUIDEntry{}
		}
		return nil
	})
	if err == nil {
		s.mu.Lock()
		s.stats.SlotsFreed += uint64(len(free))
		s.slotFreed.Broadcast()
		s.mu.Unlock()
		s.log.Info("slots of volumes that are no more can be used again", "set", s.UUID().String(), "slots", len(free))
	}
	return errors.Join(append(errs, err)...)
}

// dropInode removes all keys of an inode that nobody uses from the leaves, on the disk too, leaf by leaf and with the lock
// let go in between. It returns the newest journal entry that has a key of it.
func (s *Set) dropInode(inode uint32) (last uint64, err error) {
	in := &Insertion{}
	at, from := btree.Pos{Inode: inode}, uint64(0) // where the leaf begins, and what is to be looked at next
	for over := false; !over; {
		s.mu.Lock()
		if err := s.errLocked(); err != nil {
			s.mu.Unlock()
			return last, err
		}
		n, miss := s.tree.NodeAt(0, at)
		if n == nil {
			s.mu.Unlock()
			if miss.IsZero() {
				return last, nil
			}
			if err := s.ReadNode(miss); err != nil {
				return last, err
			}
			continue
		}
		end, to := n.Ref().High, uint64(ondisk.MaxOffset)
		if end.Inode == inode {
			to = end.Sector
		}
		if from < to {
			in.Keys, from = s.coverLocked(in.Keys[:0], inode, from, to)
			s.mu.Unlock()
			if len(in.Keys) > 0 {
				if err := s.Insert(in); err != nil {
					return last, err
				}
				last = max(last, in.Seq)
				if err := s.rest(sweepPause); err != nil {
					return last, err
				}
			}
			continue
		}
		if (n.Has(inode) || !n.Linked()) && s.opt.Broken&EarlySlot == 0 {
			if !n.Busy() && n.Has(inode) {
				s.queueLocked(n, true)
			}
			s.changed.Wait()
		} else {
			at, over = end, end.Inode != inode || to == ondisk.MaxOffset
		}
		s.mu.Unlock()
	}
	return last, nil
}

// coverLocked appends keys that cover what has a pointer in [from, to) of an inode, which are of one leaf, and returns where
// to go on: it looks at some hundred extents.
func (s *Set) coverLocked(keys []ondisk.Key, inode uint32, from, to uint64) ([]ondisk.Key, uint64) {
	var start, end, stop uint64
	next, miss := s.tree.Scan(btree.Pos{Inode: inode, Sector: from}, btree.Pos{Inode: inode, Sector: to}, dropLook, func(x btree.Extent) bool {
		switch {
		case !x.HasPtr():
			return true
		case end != 0 && x.End()-start <= dropMost:
		case len(keys) == insertGroup-1:
			stop = x.Start
			return false
		default:
			if end != 0 {
				keys = append(keys, ondisk.NewInvalidation(inode, end, uint32(end-start)))
			}
			start = x.Start
		}
		end = x.End()
		return true
	})
	if end != 0 {
		keys = append(keys, ondisk.NewInvalidation(inode, end, uint32(end-start)))
	}
	switch {
	case stop != 0:
		return keys, stop
	case !miss.IsZero(): // it is in memory, as the caller knows
		return keys, from
	}
	return keys, next.Sector
}

// expire returns when no entry up to seq is needed any more, by an entry that is durable.
func (s *Set) expire(seq uint64) error {
	for {
		if err := s.WriteOldest(s.stop, seq, 0); err != nil {
			return err
		}
		if err := s.journal.WriteEntry(s.stop); err != nil {
			return err
		}
		s.mu.Lock()
		_, last := s.journal.DurableLocked()
		s.noticeLocked()
		s.mu.Unlock()
		if last > seq {
			return nil
		}
	}
}

// WaitSlot waits until there is a slot that nobody has, for who found none. It returns false if there will be none: no
// retired one is left, or what it had in the cache cannot be removed.
func (s *Set) WaitSlot() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.errLocked() == nil {
		for i := range s.slots {
			if s.slots[i].Unused() {
				return true
			}
		}
		if s.stuck || len(s.retiredLocked()) == 0 {
			return false
		}
		s.slotFreed.Wait()
	}
	return false
}
