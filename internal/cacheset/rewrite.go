package cacheset

import (
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// copySlice is how many keys a rewrite copies in one hold of the lock, some 10 ns each.
const copySlice = 4096

// rewrite replaces a node by a copy without what is stale, or by two. It waits for buckets, and while a write of the
// node or of its parent is under way.
//
// Order: the new nodes, and the data that a leaf's keys point to, are durable before anything refers to them; the
// parent's append, or the journal entry that names a new root, is durable before the old node's bucket is let go, and
// with it the journal entries whose keys the copy has (M1, V5). In between a crash finds the old node.
func (s *Set) rewrite(n *btree.Node) error {
	s.mu.Lock()
	r, err := s.beginLocked(n)
	if r == nil {
		s.mu.Unlock()
		return err
	}
	for !r.Copy(copySlice) {
		s.mu.Unlock()
		s.rt.Yield()
		s.mu.Lock()
	}
	places, err := s.takeMetaLocked(r.Nodes())
	if err != nil {
		r.Abort()
		s.changed.Broadcast()
		s.mu.Unlock()
		return err
	}
	for i, p := range places {
		r.Assign(i, p, s.rt.Uint64())
	}
	s.mu.Unlock()

	for i := range places {
		buf := s.pool.Get(r.Bytes(i))
		err := s.put(r.Encode(i, buf.Data))
		buf.Release()
		if err != nil {
			return err // the set stops: nobody refers to the copy
		}
	}
	if n.Level() == 0 {
		// The copy may have keys that no append or entry had before: their data must not come later than they do.
		if err := s.io.Flush(); err != nil {
			return err
		}
	}

	s.mu.Lock()
	in, done, err := s.installLocked(n, r)
	if !done {
		r.Abort()
		for _, p := range places {
			s.table.Return(s.bucketOf(p))
		}
		s.changed.Broadcast()
		s.mu.Unlock()
		return err
	}
	if s.opt.Broken&SkipM1 != 0 {
		s.tree.DropPins(in.New)
	}
	for _, old := range in.Old {
		s.table.FreeNode(s.bucketOf(old.Ptr))
	}
	for _, n := range in.New {
		if n.Dirty() {
			s.grownLocked(n)
		}
	}
	s.stats.NodeRewrites++
	if len(in.New) > 1 {
		s.stats.NodeSplits++
	}
	delete(s.torn, n.Ref().Ptr)
	s.repinLocked()
	s.changed.Broadcast()
	if in.Parent == nil {
		return s.nameRootLocked()
	}
	s.mu.Unlock()
	o, err := s.appendTo(in.Parent)
	if err == nil && o == btree.NeedsRewrite {
		err = s.rewrite(in.Parent)
	}
	return err
}

// beginLocked begins a rewrite. It returns nil if the node is gone.
func (s *Set) beginLocked(n *btree.Node) (*btree.Rewrite, error) {
	for {
		if err := s.Err(); err != nil {
			return nil, err
		}
		switch r, o := s.tree.Begin(n); o {
		case btree.Done:
			return r, nil
		case btree.Gone:
			return nil, nil
		}
		s.changed.Wait()
	}
}

// installLocked puts a copy in its place, rewriting the parent first where that has no room. done is false if the
// copy is of no use any more.
func (s *Set) installLocked(n *btree.Node, r *btree.Rewrite) (in btree.Installed, done bool, err error) {
	for {
		if err := s.Err(); err != nil {
			return in, false, err
		}
		if s.tree.Parent(n) == nil && !n.Gone() && s.journal.UrgentEntriesLocked() == 0 {
			// A root that cannot be named would keep its pins: others have to go first.
			s.changed.Wait()
			continue
		}
		var o btree.Outcome
		switch in, o = r.Install(); o {
		case btree.Done:
			return in, true, nil
		case btree.Gone:
			return in, false, nil
		case btree.NeedsRewrite:
			s.mu.Unlock()
			err := s.rewrite(in.Parent)
			s.mu.Lock()
			if err != nil {
				return in, false, err
			}
		default:
			s.changed.Wait()
		}
	}
}

// nameRootLocked has a journal entry written that names the new root, and lets the old one go. It lets go of the lock.
func (s *Set) nameRootLocked() error {
	root := s.tree.Root()
	seq := s.journal.RequestEntryLocked(true)
	s.mu.Unlock()
	if err := s.journal.WaitDurable(s.stop, seq); err != nil {
		return err
	}
	s.mu.Lock()
	s.freed = s.tree.RootDurable(root, s.freed[:0])
	s.releaseLocked()
	s.mu.Unlock()
	return nil
}

// takeMetaLocked takes n buckets for metadata, all at once; it waits for them, and lets go of the lock meanwhile.
func (s *Set) takeMetaLocked(n int) ([]ondisk.Ptr, error) {
	list := make([]ondisk.Ptr, 0, n)
	for {
		for len(list) < n && s.table.CanAllocate() >= n-len(list) {
			b, gen, ok := s.table.Allocate(bucket.ForMeta)
			if !ok {
				break // some of the ready ones have been put aside
			}
			list = append(list, ondisk.MakePtr(gen, s.geo.BucketStart(uint64(b)), s.super.NrThisDev))
		}
		if len(list) == n {
			if s.table.NeedBatch() {
				s.refill.Signal()
			}
			return list, nil
		}
		for _, p := range list { // others may have enough in them
			s.table.Return(s.bucketOf(p))
		}
		list = list[:0]
		if err := s.Err(); err != nil {
			return nil, err
		}
		if s.stop.Err() != nil {
			return nil, ErrClosed
		}
		s.needMeta++
		s.refill.Signal()
		if s.batchEntry == s.journal.OpenLocked() {
			s.journal.RequestEntryLocked(true) // the journal may be full until we go on
		}
		s.ready.Wait()
		s.needMeta--
	}
}
