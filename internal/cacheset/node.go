package cacheset

import (
	"context"
	"fmt"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
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
	switch {
	case rewrite && n.Mark&markRewrite == 0: // it may stay in s.jobs, too
		n.Mark |= markQueued | markRewrite
		s.crowded = append(s.crowded, n)
	case n.Mark&markQueued == 0:
		n.Mark |= markQueued
		s.jobs = append(s.jobs, n)
	default:
		return
	}
	s.work.Signal()
}

// write is the goroutine of a writer.
func (s *Set) write() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var batch []*btree.Node
	for {
		batch = s.nextJobsLocked(batch[:0])
		for len(batch) == 0 && s.stop.Err() == nil && s.Err() == nil {
			s.work.Wait()
			batch = s.nextJobsLocked(batch)
		}
		if s.stop.Err() != nil || s.Err() != nil {
			return
		}
		rewrite := batch[0].Mark&markRewrite != 0
		for _, n := range batch {
			n.Mark &^= markQueued | markRewrite
		}
		s.busy++
		s.mu.Unlock()
		if len(batch) == 1 {
			_ = s.settle(batch[0], rewrite) // it stops the set
		} else {
			s.settleAll(batch)
		}
		s.mu.Lock()
		s.busy--
		for i, n := range batch {
			if !n.Gone() && n.Dirty() {
				s.grownLocked(n)
			}
			batch[i] = nil
		}
		s.changed.Broadcast()
	}
}

// nextJobsLocked takes what a writer does next, and puts it in batch, which is empty: a node to be rewritten, or some to be
// appended to, or nothing. The more of these there are, the more share flushes, but not so many that other writers have
// nothing to do.
func (s *Set) nextJobsLocked(batch []*btree.Node) []*btree.Node {
	take := func(from *[]*btree.Node) (n *btree.Node) {
		n, (*from)[0] = (*from)[0], nil
		*from = (*from)[1:]
		return n
	}
	for len(s.crowded) > 0 {
		if n := take(&s.crowded); n.Mark&markRewrite != 0 {
			return append(batch, n)
		}
	}
	most := min(appendsAtOnce, 1+len(s.jobs)/writers)
	for len(s.jobs) > 0 && len(batch) < most {
		if n := take(&s.jobs); n.Mark&(markQueued|markRewrite) == markQueued { // else it was taken from s.crowded
			batch = append(batch, n)
		}
	}
	return batch
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

// settleAll is settle for nodes that are to be appended to. They share two flushes: where a flush takes ten milliseconds, and
// nearly all leaves pin the oldest journal entries, there is no other way to let these go in time.
//
// Order: that of appendTo, for all of them at once: what comes before a flush there comes before the one of all here.
// While some are frozen nobody is waited for, who might wait for them: nodes that are being written, or have no room, come
// afterwards, one by one.
func (s *Set) settleAll(nodes []*btree.Node) {
	type frozen struct {
		a    *btree.Append
		buf  *blockdev.Buffer
		list []btree.Write
	}
	var appends []frozen
	var later []*btree.Node
	for _, n := range nodes {
		s.mu.Lock()
		a, o := s.tree.Freeze(n)
		if o == btree.Done {
			s.repinLocked()
			s.stats.NodeAppends++
		}
		s.mu.Unlock()
		switch o {
		case btree.Done:
			buf := s.pool.Get(a.Bytes())
			appends = append(appends, frozen{a, buf, a.Encode(buf.Data, s.info.LogicalBlock)})
		case btree.Busy, btree.NeedsRewrite:
			later = append(later, n)
		}
	}
	err := s.Err()
	for _, last := range []bool{false, true} {
		for i := range appends {
			list := appends[i].list
			if n := len(list) - 1; !last {
				list = list[:n]
			} else {
				list = []btree.Write{{Off: list[n].Off, Data: list[n].Data}}
			}
			if err == nil {
				err = s.put(list, always)
			}
		}
		if err == nil && len(appends) > 0 {
			err = s.io.Flush()
		}
	}
	for _, f := range appends {
		f.buf.Release()
	}
	if err != nil {
		if s.stop.Err() == nil {
			s.fail(err)
		}
		return // they stay frozen: the journal has their keys
	}
	for _, f := range appends {
		s.mu.Lock()
		s.freed = s.tree.Finish(f.a, s.freed[:0])
		s.releaseLocked()
		s.mu.Unlock()
	}
	for _, n := range later {
		if s.settle(n, false) != nil {
			return
		}
	}
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

// WriteOldest writes out whatever pins journal entries up to upTo, for the journal, and begins with what pins those up to
// ahead.
func (s *Set) WriteOldest(ctx context.Context, upTo, ahead uint64) error {
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
		s.queuePinnedLocked(upTo)
		if ahead > upTo {
			s.queuePinnedLocked(ahead) // behind them, once
			ahead = 0
		}
		if err := s.changed.WaitContext(ctx); err != nil {
			return err
		}
	}
}

// queuePinnedLocked hands what pins journal entries up to seq to the writers. A node that has nothing to append waits for what
// refers to it: that is under way.
func (s *Set) queuePinnedLocked(seq uint64) {
	s.tree.EachPinned(func(n *btree.Node) bool {
		if n.OldestPin() <= seq && n.OpenBytes() > 0 {
			s.queueLocked(n, false)
		}
		return true
	})
}
