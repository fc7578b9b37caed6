package cacheset

import (
	"context"
	"fmt"
	"time"

	"github.com/ubcache/ubcache/internal/btree"
)

// An aged is a node with keys that are not on the disk.
type aged struct {
	node  *btree.Node
	since time.Duration
}

// Bits of btree.Node.Mark.
const (
	markQueued  = 1 << iota // in Set.jobs
	markRewrite             // the job there is to rewrite it
	markAging               // in Set.aging
)

// ReadNode reads a node that the tree names and has not got in memory, or waits for whoever is reading it. The
// caller looks again: the node may have come, or have been replaced meanwhile. No lock may be held. An error is that
// of the device, or matches ondisk.ErrCorrupt.
func (s *Set) ReadNode(ref btree.Ref) error { return s.readNode(ref, nil, nil) }

// ReadNodeRequest is ReadNode on behalf of a request.
func (s *Set) ReadNodeRequest(ref btree.Ref) error {
	begin := s.rt.Now()
	err := s.readNode(ref, nil, nil)
	s.stalls.add(StallNode, s.rt.Now()-begin)
	return err
}

// readNode is ReadNode. A node that it has read is shown to seen, if that is not nil, before anything can make it go
// again, with the lock held. If gentle is not nil the node is read gently, as long as it returns false and nobody else wants
// that node.
func (s *Set) readNode(ref btree.Ref, gentle func() bool, seen func()) error {
	b := s.bucketOf(ref.Ptr)
	s.mu.Lock()
	s.awaitBucketsLocked()
	if _, ok := s.loading[b]; ok {
		s.loading[b] = s.loading[b] || gentle == nil
		for ok {
			s.changed.Wait()
			_, ok = s.loading[b]
		}
		s.mu.Unlock()
		return s.Err()
	}
	if err := s.errLocked(); err != nil || !s.missesLocked(ref) {
		s.mu.Unlock()
		return err
	}
	s.loading[b] = false
	s.mu.Unlock()

	n, err := s.fetch(ref, gentle)

	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.loading, b)
	s.changed.Broadcast()
	if err == nil {
		s.stats.NodeReads++
		var o btree.Outcome
		if o, err = s.tree.Attach(n); err == nil && o == btree.Done && seen != nil {
			seen()
		}
		s.evictLocked()
	}
	if err != nil && !s.missesLocked(ref) {
		err = nil // what was read was not the node any more
	}
	return err
}

// missesLocked reports whether the tree lacks that very node.
func (s *Set) missesLocked(ref btree.Ref) bool {
	n, miss := s.tree.NodeAt(int(ref.Level), ref.Low)
	return n == nil && miss == ref
}

// fetch reads and parses a node.
func (s *Set) fetch(ref btree.Ref, gentle func() bool) (*btree.Node, error) {
	buf := s.pool.Get(int(ref.Sectors) * 512)
	defer buf.Release()
	var n *btree.Node
	hurry := func() bool { return gentle == nil || gentle() || s.loading[s.bucketOf(ref.Ptr)] }
	err := s.gently(buf.Data, int64(ref.Ptr.Sector())*512, hurry, s.io.ReadAt)
	if err == nil {
		n, err = btree.Parse(&s.geo, ref, buf.Data)
		if err != nil && n != nil && s.tornNode(ref) {
			err = nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: btree %v: %w", s.info.Name, ref, err)
	}
	return n, nil
}

// evictLocked keeps the nodes within their memory.
func (s *Set) evictLocked() {
	if s.tree.Evict(int(s.opt.NodeCache), 64) {
		return
	}
	// What has not been written cannot go.
	for i := 0; i < 8 && i < len(s.aging); i++ {
		if n := s.aging[i].node; !n.Gone() && n.OpenBytes() > 0 {
			s.queueLocked(n, false)
		}
	}
}

// grownLocked sees to it that a node that has got keys is written in time.
func (s *Set) grownLocked(n *btree.Node) {
	if n.OpenBytes() >= appendBytes {
		s.queueLocked(n, false)
		return
	}
	if n.Mark&markAging == 0 {
		n.Mark |= markAging
		s.aging = append(s.aging, aged{n, s.rt.Now()})
	}
}

// queueLocked hands a node to the writers.
func (s *Set) queueLocked(n *btree.Node, rewrite bool) {
	if rewrite {
		n.Mark |= markRewrite
	}
	if n.Mark&markQueued == 0 {
		n.Mark |= markQueued
		s.jobs = append(s.jobs, n)
		s.work.Signal()
	}
}

// write is the goroutine of a writer.
func (s *Set) write() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		for len(s.jobs) == 0 && s.stop.Err() == nil && s.Err() == nil {
			s.work.Wait()
		}
		if s.stop.Err() != nil || s.Err() != nil {
			return
		}
		n := s.jobs[0]
		s.jobs[0] = nil
		s.jobs = s.jobs[1:]
		rewrite := n.Mark&markRewrite != 0
		n.Mark &^= markQueued | markRewrite
		s.busy++
		s.mu.Unlock()
		_ = s.settle(n, rewrite) // it stops the set
		s.mu.Lock()
		s.busy--
		if !n.Gone() && n.Dirty() {
			s.grownLocked(n)
		}
		s.changed.Broadcast()
	}
}

// settle brings a node to the disk. The set stops if that cannot be done: others may wait for it.
func (s *Set) settle(n *btree.Node, rewrite bool) error {
	o, err := btree.NeedsRewrite, error(nil)
	if !rewrite {
		o, err = s.appendTo(n)
	}
	if err == nil && o == btree.NeedsRewrite {
		err = s.rewrite(n)
	}
	if err != nil && s.stop.Err() == nil {
		s.fail(err)
	}
	return err
}

// appendTo writes what a node has got since it was written last. It waits while a write of the node is under way.
// Outcomes are those of Freeze but Busy.
//
// Order: the data that the keys point to is flushed, then the append is made so that it cannot be torn (btree.Write),
// then the journal may let go of the keys.
func (s *Set) appendTo(n *btree.Node) (btree.Outcome, error) {
	s.mu.Lock()
	var a *btree.Append
	for {
		if err := s.Err(); err != nil {
			s.mu.Unlock()
			return btree.Gone, err
		}
		var o btree.Outcome
		if a, o = s.tree.Freeze(n); o == btree.Done {
			break
		} else if o != btree.Busy {
			s.mu.Unlock()
			return o, nil
		}
		s.changed.Wait()
	}
	s.repinLocked()
	s.stats.NodeAppends++
	s.mu.Unlock()

	buf := s.pool.Get(a.Bytes())
	err := s.put(a.Encode(buf.Data, s.info.LogicalBlock), always)
	buf.Release()
	if err != nil {
		return btree.Done, err
	}
	s.mu.Lock()
	s.freed = s.tree.Finish(a, s.freed[:0])
	s.releaseLocked()
	s.mu.Unlock()
	return btree.Done, nil
}

// releaseLocked lets the buckets in s.freed go, and the journal entries that nobody needs any more.
func (s *Set) releaseLocked() {
	for _, r := range s.freed {
		s.table.Release(s.bucketOf(r.Ptr))
	}
	s.repinLocked()
	s.changed.Broadcast()
}

// put carries out the writes of a node, in order. A write that fails is repeated, with the same bytes; a flush is not: the
// device may say once only that it has lost what the node's keys point to. Nor would a write with FUA be, so what has to
// be durable is written, then flushed.
func (s *Set) put(list []btree.Write, hurry func() bool) (err error) {
	for try := range writeTries {
		if try > 0 {
			s.log.Warn("a write of a btree node failed and is repeated", "set", s.UUID().String(), "err", err)
			s.rt.Sleep(retryPause)
		}
		var again bool
		if again, err = s.putOnce(list, hurry); !again {
			return err
		}
	}
	return err
}

func (s *Set) putOnce(list []btree.Write, hurry func() bool) (again bool, err error) {
	for _, w := range list {
		if w.Flush {
			if err := s.io.Flush(); err != nil {
				return false, err
			}
		}
		write := func(p []byte, off int64) error { return s.io.WriteAt(p, off, 0) }
		if err := s.gently(w.Data, w.Off, hurry, write); err != nil {
			return true, err
		}
		if w.FUA {
			if err := s.io.Flush(); err != nil {
				return false, err
			}
		}
	}
	return false, nil
}

// WriteOldest writes out whatever pins journal entries up to upTo, for the journal.
func (s *Set) WriteOldest(ctx context.Context, upTo uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if err := s.Err(); err != nil {
			return err
		}
		if oldest, _ := s.tree.OldestPin(); oldest == 0 || oldest > upTo {
			s.repinLocked()
			return nil
		}
		// A node that has nothing to append waits for what refers to it: that is under way.
		s.tree.EachPinned(func(n *btree.Node) bool {
			if n.OldestPin() <= upTo && n.OpenBytes() > 0 {
				s.queueLocked(n, false)
			}
			return true
		})
		if err := s.changed.WaitContext(ctx); err != nil {
			return err
		}
	}
}
