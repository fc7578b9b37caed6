package cacheset

import (
	"time"

	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/ondisk"
)

const (
	sweepOld   = 10               // a leaf with a pointer older than that is rewritten
	sweepHurry = 80               // from this lag on a sweep does not pause
	sweepPause = time.Millisecond // after each node that has to be read
	sweepRetry = 10 * time.Second // after a sweep that could not be finished
)

// sweepLoop is the goroutine that finds out how old the pointers in the index really are, before a bucket's
// generation is so far ahead of them that it must rest. It reads each node once, about once for each time that the
// whole cache is evicted, and holds nobody up. Source: B 9.5.
func (s *Set) sweepLoop() {
	for s.rest(tickEvery) == nil && s.Err() == nil {
		s.mu.Lock()
		due := s.table.SweepDue() || s.opt.Restless
		s.mu.Unlock()
		if !due {
			continue
		}
		if err := s.sweep(); err != nil && s.stop.Err() == nil && s.Err() == nil {
			s.log.Warn("a sweep of generations ended early", "set", s.UUID().String(), "err", err)
			_ = s.rt.SleepContext(s.stop, sweepRetry)
		}
	}
}

// sweep walks all nodes, the leaves first, each level in key order: what is moved meanwhile keeps its position. It
// ends when the journal does not need anything older than its beginning.
func (s *Set) sweep() error {
	shadow := s.table.NewShadow()
	s.mu.Lock()
	begin := s.journal.OpenLocked()
	s.table.SweepBegin(begin, shadow)
	s.mu.Unlock()
	err := s.sweepNodes()
	if err == nil {
		err = s.WriteOldest(s.stop, begin)
	}
	for err == nil {
		if err = s.journal.WriteEntry(s.stop); err != nil {
			break
		}
		s.mu.Lock()
		_, last := s.journal.DurableLocked()
		ready, more := s.table.SweepEnd(last)
		for ready && more {
			s.mu.Unlock()
			s.rt.Yield()
			s.mu.Lock()
			_, more = s.table.SweepEnd(last)
		}
		s.refill.Signal()
		s.mu.Unlock()
		if ready {
			return nil
		}
	}
	s.mu.Lock()
	s.table.SweepAbort()
	s.mu.Unlock()
	return err
}

func (s *Set) sweepNodes() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for level := 0; level <= int(s.tree.Root().Level); level++ {
		for at := (btree.Pos{}); s.stop.Err() == nil; {
			n, miss := s.tree.NodeAt(level, at)
			if n != nil {
				s.sweepNodeLocked(n)
				at = n.Ref().High
				open := n.OpenBytes() > 0
				s.mu.Unlock() // for whoever waits
				if open {
					// What its open keys hide is on the disk until they are there, too.
					if err := s.settle(n, false); err != nil {
						s.mu.Lock()
						return err
					}
				}
				s.rt.Yield()
				s.mu.Lock()
				continue
			}
			if miss.IsZero() {
				break
			}
			hurry := s.table.MaxLag() >= sweepHurry || s.needMeta > 0
			s.mu.Unlock()
			err := s.ReadNode(miss)
			if err == nil && !hurry {
				err = s.rest(sweepPause)
			}
			s.mu.Lock()
			if err != nil {
				return err
			}
		}
	}
	return s.stop.Err()
}

// sweepNodeLocked sees a node's pointers that count nothing, and has the node rewritten where some are old: nothing in
// an interior node hides one, so there it is any.
func (s *Set) sweepNodeLocked(n *btree.Node) {
	oldest := uint8(0)
	n.EachPtr(func(p ondisk.Ptr) {
		if b, ok := s.table.Bucket(p); ok {
			if age := ondisk.GenAfter(s.table.Gen(b), p.Gen()); age != 0 {
				oldest = max(oldest, age)
				s.table.SweepSee(p)
			}
		}
	})
	if n.Level() > 0 && oldest > 0 || oldest > sweepOld {
		s.queueLocked(n, true)
	}
}
