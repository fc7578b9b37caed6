package cacheset

import (
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// copySlice is how many keys a rewrite copies in one hold of the lock: some 100 ns each, since what is known of a key's bucket is
// in none of the processor's caches on a large set, and nor is where the copy goes.
const copySlice = 512

// rewrite replaces a node by a copy without what is stale, or by two. It waits for buckets, and while a write of the
// node or of its parent is under way.
func (s *Set) rewrite(n *btree.Node) error {
	_, err := s.replace(true, n)
	return err
}

// replace replaces a node, or several that follow each other under one parent, by copies without what is stale: by as
// many, by more, by fewer. What is not a must gives up, and done is false, rather than take a bucket that others need,
// wait for one, or wait for others that do; and where several nodes would not become fewer.
//
// Order: the new nodes, and the data that a leaf's keys point to, are durable before anything refers to them; the
// parent's append, or the journal entry that names a new root, is durable before the old nodes' buckets are let go, and
// with them the journal entries whose keys the copies have (M1, V5). That append has all of it: the pointers to the
// copies, and a freeing key for each old node. In between a crash finds the old nodes.
func (s *Set) replace(must bool, victims ...*btree.Node) (done bool, err error) {
	s.mu.Lock()
	r, gone, err := s.beginLocked(must, victims)
	if r == nil {
		s.mu.Unlock()
		return gone, err
	}
	s.mu.Unlock()
	r.Prepare()
	s.mu.Lock()
	for !r.Copy(copySlice) {
		s.mu.Unlock()
		s.rt.Yield()
		s.mu.Lock()
	}
	var places []ondisk.Ptr
	if must || s.worthLocked(r, len(victims)) {
		places, err = s.takeMetaLocked(must, r.Nodes())
	}
	if places == nil {
		r.Abort()
		s.repinLocked()
		s.changed.Broadcast()
		s.mu.Unlock()
		return false, err
	}
	for i, p := range places {
		r.Assign(i, p, s.rt.Uint64())
	}
	s.mu.Unlock()

	for i := range places {
		buf := s.pool.Get(r.Bytes(i))
		list := r.Encode(i, buf.Data)
		for j := range list {
			list[j].FUA = false // one flush for all
		}
		err := s.put(list, func() bool { return must })
		buf.Release()
		if err != nil {
			return false, err // the set stops: nobody refers to the copy
		}
	}
	// The copies may also have keys that no append or entry had before: their data must not come later than they do.
	if err := s.io.Flush(); err != nil {
		return false, err
	}

	s.mu.Lock()
	in, done, err := s.installLocked(must, victims[0], r)
	if !done {
		r.Abort()
		for _, p := range places {
			s.table.Return(s.bucketOf(p))
		}
		s.repinLocked()
		s.changed.Broadcast()
		s.mu.Unlock()
		return must, err
	}
	if s.opt.Broken&SkipM1 != 0 {
		s.tree.DropPins(in.New)
	}
	for _, old := range in.Old {
		s.table.FreeNode(s.bucketOf(old.Ptr))
		delete(s.torn, old.Ptr)
	}
	for _, n := range in.New {
		if n.Dirty() {
			s.grownLocked(n)
		}
	}
	s.stats.NodeRewrites++
	switch {
	case len(in.Old) > 1:
		s.stats.NodesCoalesced += uint64(len(in.Old))
	case len(in.New) > 1:
		s.stats.NodeSplits++
	}
	s.repinLocked()
	s.changed.Broadcast()
	if in.Parent == nil {
		return true, s.nameRootLocked()
	}
	s.mu.Unlock()
	o, err := s.appendTo(in.Parent)
	if err == nil && o == btree.NeedsRewrite {
		err = s.rewrite(in.Parent)
	}
	return true, err
}

// worthLocked reports whether a rewrite that is not a must is of use: several nodes become fewer.
func (s *Set) worthLocked(r *btree.Rewrite, victims int) bool {
	return victims == 1 || r.Nodes() < victims || s.opt.Restless
}

// beginLocked begins a rewrite. It returns nil if it is not to be; gone says that the nodes are not what they were.
func (s *Set) beginLocked(must bool, victims []*btree.Node) (r *btree.Rewrite, gone bool, err error) {
	for {
		if err := s.Err(); err != nil {
			return nil, false, err
		}
		switch r, o := s.tree.Begin(victims...); {
		case o == btree.Done:
			return r, false, nil
		case o == btree.Gone:
			return nil, true, nil
		case !must:
			return nil, false, nil
		}
		s.changed.Wait()
	}
}

// installLocked puts copies in their place, rewriting the parent first where that has no room. done is false if they are
// of no use any more, or if it gives up. n is the first of the nodes that they replace.
func (s *Set) installLocked(must bool, n *btree.Node, r *btree.Rewrite) (in btree.Installed, done bool, err error) {
	for {
		if err := s.Err(); err != nil {
			return in, false, err
		}
		if !must && s.needMeta > 0 {
			return in, false, nil // who waits for a bucket may be whom we wait for
		}
		var o btree.Outcome
		switch in, o = r.Install(); o {
		case btree.Done:
			return in, true, nil
		case btree.Gone:
			return in, false, nil
		case btree.NeedsRewrite:
			s.mu.Unlock()
			done, err := s.replace(must, in.Parent)
			s.mu.Lock()
			if err != nil || !done {
				return in, false, err
			}
		default:
			s.changed.Wait()
		}
	}
}

// lower makes the only child of the root the root, as often as there is one. It gives up where that has to wait.
//
// Order: the journal entry that names the new root is durable before the old one's bucket is let go. The new root is a
// node that is durable, and named by a durable one, already.
func (s *Set) lower() error {
	for {
		s.mu.Lock()
		if err := s.Err(); err != nil {
			s.mu.Unlock()
			return err
		}
		old, o := s.tree.Lower()
		switch o {
		case btree.Done:
			s.table.FreeNode(s.bucketOf(old.Ptr))
			s.stats.TreesLowered++
			if err := s.nameRootLocked(); err != nil {
				return err
			}
		case btree.NeedsNode:
			s.mu.Unlock()
			if err := s.ReadNode(old); err != nil {
				return err
			}
		default:
			s.mu.Unlock()
			return nil
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

// takeMetaLocked takes n buckets for metadata, all at once; it waits for them, and lets go of the lock meanwhile. For what
// is not a must it returns nil instead, and also where others wait, or need what there is.
func (s *Set) takeMetaLocked(must bool, n int) ([]ondisk.Ptr, error) {
	s.awaitBucketsLocked()
	if !must && (s.needMeta > 0 || !s.table.CanSpare(n)) {
		return nil, nil
	}
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
		if !must {
			return nil, nil
		}
		list = list[:0]
		if err := s.Err(); err != nil {
			return nil, err
		}
		if s.stop.Err() != nil {
			return nil, ErrClosed
		}
		s.needMeta++
		s.changed.Broadcast() // for those who give up then
		s.chore.Broadcast()
		s.refill.Signal()
		if s.batchEntry == s.journal.OpenLocked() {
			s.journal.RequestEntryLocked(true) // the journal may be full until we go on
		}
		s.ready.Wait()
		s.needMeta--
		s.awaitBucketsLocked()
	}
}
