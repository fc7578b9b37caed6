package cacheset

import (
	"errors"
	"time"

	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

const (
	sweepAim   = 76                   // a sweep is to be over at this lag, so that it is at 80; from there on it does not rest
	sweepPause = 4 * time.Millisecond // after each node that has to be read, at most
	sweepRetry = 10 * time.Second     // after a sweep that could not be finished
)

// sweepLoop is the goroutine that finds out how old the pointers in the index really are, before a bucket's
// generation is so far ahead of them that it must rest, and which nodes there are chores for (maintain.go). It reads each
// node once, about once for each time that the whole cache is evicted, and holds nobody up. Source: B 9.5.
func (s *Set) sweepLoop() {
	again := false
	for {
		if (again || s.opt.Restless) && s.rest(tickEvery) != nil {
			return
		}
		s.mu.Lock()
		for !again && !s.sweepDueLocked() && s.stop.Err() == nil && s.Err() == nil {
			s.lagging.Wait() // the ticker ends that each second, the refiller when a sweep is due
		}
		emptied, coalesced := s.emptied, s.stats.NodesCoalesced
		s.mu.Unlock()
		if s.stop.Err() != nil || s.Err() != nil {
			return
		}
		again = false
		if err := s.sweep(); err != nil {
			if s.stop.Err() == nil && s.Err() == nil && !errors.Is(err, ErrClosed) {
				s.log.Warn("a sweep of generations ended early", "set", s.UUID().String(), "err", err)
				_ = s.rt.SleepContext(s.stop, sweepRetry)
			}
			continue
		}
		s.mu.Lock()
		s.emptied -= emptied
		// Where many nodes became fewer, those may become fewer still: each walk that is followed by another leaves at
		// least one of 32 nodes less.
		s.awaitChoresLocked()
		again = int(s.stats.NodesCoalesced-coalesced) > s.nodesLocked()/emptiedShare
		again = again || s.sweepDueLocked() // what it has found is written now, but the next one is no hurry
		s.mu.Unlock()
	}
}

// sweepDueLocked reports whether it is time for a sweep. While another policy collects, that is what tidies the index, and
// sweeps are for the limit of the format alone.
func (s *Set) sweepDueLocked() bool {
	if !s.serving || s.closed {
		return false
	}
	if s.gc.pacer != nil && !s.opt.Restless {
		return s.table.MaxLag() >= bucket.SweepLag
	}
	asked := s.gc.asked
	s.gc.asked = false
	return asked || s.opt.Restless || s.table.SweepDue() || s.emptiedLocked()
}

// awaitChoresLocked waits until what the walk has found is done, unless somebody waits for a bucket.
func (s *Set) awaitChoresLocked() {
	for (len(s.chores) > 0 || s.tidying > 0) && s.needMeta == 0 && !s.closed && s.stop.Err() == nil && s.Err() == nil {
		s.chore.Wait()
	}
}

// sweep walks all nodes, the leaves first, each level in key order: what is moved meanwhile keeps its position. It
// ends when the journal does not need anything older than its beginning.
func (s *Set) sweep() error {
	shadow := s.table.NewShadow()
	s.mu.Lock()
	begin := s.journal.OpenLocked()
	s.table.SweepBegin(begin, shadow)
	w := &walk{lag: s.table.MaxLag()}
	err := s.sweepNodesLocked(w)
	s.endRunLocked(w)
	if err == nil {
		s.index = w.total
		s.addChoreLocked(w, chore{level: s.tree.Root().Level})
	}
	s.mu.Unlock()
	if err == nil {
		err = s.WriteOldest(s.stop, begin, 0)
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

// A walk is a sweep's way through the nodes.
type walk struct {
	lag   int // the greatest when it began
	total IndexSize

	// The node that is being looked at, and what was found in it so far.
	node    *btree.Node
	read    bool // it had to be read
	others  int  // of its pointers that no key in memory has, so many were seen
	whole   bool // all of those were
	live    int
	oldest  uint8
	reading bool // the next one had to be

	parent *btree.Node
	level  uint8
	run    []seen // neighbours of that level under that parent, for which nothing is decided
	high   btree.Pos
}

// An IndexSize is what a walk over the index has found.
type IndexSize struct {
	Nodes, Keys int // keys with a pointer that is good
	UsedPercent int // of the nodes' room that keys take, good or not
	words, room int
}

// sweepNodesLocked makes the walk. It lets go of the lock.
func (s *Set) sweepNodesLocked(w *walk) error {
	for level := 0; level <= int(s.tree.Root().Level); level++ {
		for at := (btree.Pos{}); s.stop.Err() == nil && !s.closed; {
			n, miss := s.tree.NodeAt(level, at)
			if n != nil {
				at = s.sweepSliceLocked(w, n, at)
				done := w.whole && at == n.Ref().High
				open := done && n.OpenBytes() > 0
				if done {
					s.sweptLocked(w, n)
				}
				s.mu.Unlock() // for whoever waits
				if open {
					// What its open keys hide is on the disk until they are there, too.
					if err := s.settle(n, false); err != nil {
						if s.stop.Err() == nil {
							err = s.fail(err) // the node waits for that write
						}
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
			pause := s.paceLocked(w)
			w.reading = true
			s.mu.Unlock()
			err := s.readNode(miss, func() bool { return s.hurryLocked(w) }, nil)
			if err == nil && pause > 0 {
				err = s.rest(pause)
			}
			s.mu.Lock()
			if err != nil {
				return err
			}
		}
	}
	w.total.UsedPercent = w.total.words * 100 / max(w.total.room, 1)
	if s.closed {
		return ErrClosed
	}
	return s.stop.Err()
}

// sweepSliceLocked sees pointers of a node, markSlice at most: first those that no key in memory has, then, once w.whole is
// set, those of the keys from at on. It returns where to go on. A child whose pointer comes to the others meanwhile was a good
// one when the sweep began, and so of no age that counts.
func (s *Set) sweepSliceLocked(w *walk, n *btree.Node, at btree.Pos) btree.Pos {
	see := func(p ondisk.Ptr) {
		if b, ok := s.table.Bucket(p); ok {
			if age := ondisk.GenAfter(s.table.Gen(b), p.Gen()); age != 0 {
				w.oldest = max(w.oldest, age)
				s.table.SweepSee(p)
				return
			}
		}
		w.live++
	}
	if w.node != n { // or another one is in its place since the last slice, and may have left something out
		w.node, w.read, w.reading, w.live, w.oldest = n, w.reading, false, 0, 0
		w.others, w.whole = 0, false
	}
	if !w.whole {
		w.others = n.OtherPtrs(w.others, s.opt.markKeys, see)
		w.whole = w.others == 0
		return at
	}
	return n.KeyPtrs(at, s.opt.markKeys, see)
}

// sweptLocked decides what is to be done with nodes that were seen. It may let go of the lock.
func (s *Set) sweptLocked(w *walk, n *btree.Node) {
	s.stats.NodesSwept++
	words, room := n.Load(&s.geo)
	w.total.Nodes++
	if n.Level() == 0 {
		w.total.Keys += w.live
	}
	w.total.words += words
	w.total.room += room
	x := seen{low: n.Ref().Low, ptr: n.Ref().Ptr, live: w.live, words: words}
	if w.read {
		x.node = n
	}
	if n.Level() > 0 {
		x.must = w.oldest > 0 // nothing in an interior node hides an old pointer
	} else {
		x.must, x.stale = w.oldest > sweepOld, mostlyStale(w.live, words, room)
	}
	w.node = nil
	high := n.Ref().High
	if p := s.tree.Parent(n); p != w.parent || n.Ref().Level != w.level || w.high != x.low {
		s.endRunLocked(w)
		w.parent, w.level = p, n.Ref().Level
	}
	w.run, w.high = append(w.run, x), high
	if len(w.run) == runNodes {
		s.decideLocked(w)
	}
}

// endRunLocked decides about all that is left of a run.
func (s *Set) endRunLocked(w *walk) {
	for len(w.run) > 0 {
		s.decideLocked(w)
	}
}

// decideLocked decides about the first nodes of a run.
func (s *Set) decideLocked(w *walk) {
	x := w.run[0]
	nodes := choose(&s.geo, w.run, s.opt.Restless)
	c := chore{low: x.low, ptr: x.ptr, level: w.level, nodes: uint8(nodes)}
	for i := range nodes {
		c.must = c.must || w.run[i].must
	}
	if nodes == 0 && x.node != nil {
		s.tree.Forget(x.node) // others are wanted more
	}
	w.run = w.run[:copy(w.run, w.run[max(nodes, 1):])]
	if nodes > 0 && (s.gc.pacer == nil || c.must) {
		s.addChoreLocked(w, c)
	}
}

// hurryLocked reports whether a sweep may not wait.
func (s *Set) hurryLocked(w *walk) bool { return s.paceLocked(w) == 0 }

// paceLocked returns how long the sweep rests after a node that it has to read.
func (s *Set) paceLocked(w *walk) time.Duration {
	if s.needMeta > 0 || s.needSpace > 0 {
		return 0 // the sweep may be what buckets wait for
	}
	return sweepRest(w.lag, s.table.MaxLag(), w.total.Nodes, s.nodesLocked())
}

// sweepRest returns how long a sweep rests that began with a lag of first, when the lag is lag, and done of total nodes
// have been seen.
//
// It has to be over before the lag is 80, and aims at a little less. used is how much of the way from first to there the lag has gone, done
// how much of the walk is made: going on like that, the walk ends when used/done of that way are gone. Up to a half the
// rest is full, above it shrinks, and at the whole there is none; then nothing faster can be done. Where the lag does
// not grow, as in a sweep for other reasons, the rest is full.
//
// With 256 KiB a node, read at 1.3 GB/s, a full rest makes 62 MB/s. 375 GB with 1.5 GB of nodes, its 10 000 free buckets
// reused at 4 000 a second: 24 s to walk, and the lag takes 2.5 s a step, so 80 s from 48 to 80: a full rest all the way.
// 6 TB with 38 GB of nodes and 164 000 buckets: 10 min, and 22. With only 1 000 buckets left in the first, 8 s for the
// way: at a step of 0.25 s the rest is cut to some 0.8 ms, and with 200, 1.6 s, there is none, which makes 1.2 s.
func sweepRest(first, lag, done, total int) time.Duration {
	if lag >= sweepAim {
		return 0
	}
	if lag <= first {
		return sweepPause
	}
	used := float64(lag-first) / float64(sweepAim-first)
	part := float64(done) / float64(max(total, done, 1))
	if part <= used {
		return 0
	}
	return time.Duration(float64(sweepPause) * min(1, 2*(1-used/part)))
}
