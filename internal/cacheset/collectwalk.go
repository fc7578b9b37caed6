package cacheset

import (
	"time"

	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// markSlice is how many pointers are seen in one hold of the lock. Each takes some 70 ns on a large cache, for what is known of
// its bucket is in none of the processor's caches.
const markSlice = 1024

// A counted is a node that the walk has counted and not yet seen: one of the window.
type counted struct {
	seen
	high   btree.Pos
	oldest uint8 // how many generations the oldest pointer is behind
}

// collectNodesLocked walks the whole index, in key order, and marks what it finds. It reports whether it has come to the
// end; an error says that it cannot, since there is a node that could not be read in writeTries slices. It lets go of the
// lock.
//
//	slice: the gate is shut
//	  from the root down to where the last slice ended: interior nodes are marked, again and again
//	  leaves, four at a time in view: coalesced if they fit in one node fewer, marked, rewritten if they are old or bad,
//	  their open keys handed to the writers
//	the gate is opened; what was handed over is waited for; a pause
func (s *Set) collectNodesLocked() (whole bool, err error) {
	c := &s.gc
	g := &gate{}
	g.opened.Init(&s.mu)
	s.gate = g
	defer func() { s.gate = nil }()
	failed := 0
	for at := (btree.Pos{}); ; {
		c.written, c.err = c.written[:0], nil
		g.shutLocked(s.rt.Now())
		at, whole = s.collectSliceLocked(at)
		held := g.openLocked(s.rt.Now())
		c.stats.Holds++
		c.stats.TotalHold += held
		c.stats.LongestHold = max(c.stats.LongestHold, held)
		s.awaitWrittenLocked()
		if whole || s.endLocked() {
			return whole, nil
		}
		if failed++; c.err == nil {
			failed = 0
		} else if failed == writeTries {
			return false, c.err
		}
		s.sleepLocked()
	}
}

// endLocked reports whether the collection is to be given up.
func (s *Set) endLocked() bool {
	return s.gc.pacer == nil || s.closed || s.stop.Err() != nil || s.Err() != nil
}

// awaitWrittenLocked waits for the appends of the slice. It gives up where writers wait for buckets, which may come only
// when the collection is over.
func (s *Set) awaitWrittenLocked() {
	for _, n := range s.gc.written {
		for !n.Gone() && (n.Mark&markQueued != 0 || n.Busy()) && s.needMeta == 0 && !s.endLocked() {
			s.changed.Wait()
		}
	}
}

// collectSliceLocked sees nodes from at on until the policy lets go. It returns where to go on.
func (s *Set) collectSliceLocked(at btree.Pos) (next btree.Pos, whole bool) {
	c := &s.gc
	from := c.seen
	c.run = c.run[:0]
	for first := true; !s.endLocked(); first = false {
		if !s.enterLocked(at, first) {
			return at, at == btree.MaxPos
		}
		s.tidyRunLocked(0, at)
		c.err = nil // of nodes that are not due yet
		n := s.readyLocked(0, at)
		if n == nil {
			return at, at == btree.MaxPos
		}
		at = s.markLeafLocked(n, at)
		c.seen++
		if at == btree.MaxPos {
			return at, true
		}
		if s.yieldLocked(c.seen - from) {
			return at, false
		}
	}
	return at, false
}

// readyLocked returns the node of a level at a position, read if it has to be; nil where there is none, or if it cannot be
// read: then c.err says why.
func (s *Set) readyLocked(level int, at btree.Pos) *btree.Node {
	for !s.endLocked() {
		n, miss := s.tree.NodeAt(level, at)
		if n != nil {
			return n
		}
		if miss.IsZero() {
			return nil
		}
		s.mu.Unlock()
		err := s.ReadNode(miss)
		s.mu.Lock()
		if err != nil {
			s.gc.err = err
			return nil
		}
	}
	return nil
}

// enterLocked marks the interior nodes on the way down to a position: those that begin there, and with all those that
// the walk is in the middle of, too. It reports whether they could be read.
func (s *Set) enterLocked(at btree.Pos, all bool) bool {
	root := s.tree.Root()
	if all {
		s.marks.Mark(root.Ptr, root.Sectors, false, true)
	}
	for level := int(root.Level); level > 0; level-- {
		n := s.readyLocked(level, at)
		if n == nil {
			return false
		}
		fresh := n.Ref().Low == at
		if !fresh && !all {
			continue
		}
		if fresh {
			s.tidyRunLocked(level, at)
			if n = s.readyLocked(level, at); n == nil {
				return false
			}
		}
		s.eachPtrLocked(n, func(p ondisk.Ptr) { s.marks.Mark(p, root.Sectors, false, true) })
		words, room := n.Load(&s.geo)
		s.gc.stats.walked.Words += uint64(words)
		s.gc.stats.walked.Room += uint64(room)
		s.gc.seen++
	}
	return true
}

// tidyRunLocked coalesces the node at a position with those that follow, if they fit in one fewer, and rewrites it if its
// pointers are old or most of its keys bad. It gives up where it would have to wait for a bucket.
func (s *Set) tidyRunLocked(level int, at btree.Pos) {
	c := &s.gc
	for range runNodes { // what was rewritten may still have to wait until what it replaced is gone from the disk
		if s.endLocked() || !s.windowLocked(level, at) {
			return
		}
		x := &c.run[0]
		run := make([]seen, len(c.run))
		for i := range c.run {
			run[i] = c.run[i].seen
		}
		nodes := choose(&s.geo, run, false)
		if nodes == 0 {
			return
		}
		s.mu.Unlock()
		list := s.find(chore{low: x.low, ptr: x.ptr, level: uint8(level), nodes: uint8(nodes)})
		done := false
		if len(list) > 0 {
			var err error
			if done, err = s.replace(false, list...); err != nil && s.stop.Err() == nil {
				s.fail(err) // what was to be replaced waits for that write
			}
		}
		s.mu.Lock()
		if !done {
			return
		}
		if nodes == 1 {
			s.stats.NodesStale++
		}
		c.run = c.run[:0]
	}
}

// windowLocked counts the node at a position and the three that follow under the same parent, as far as they are not counted
// yet. It reports whether there is one.
func (s *Set) windowLocked(level int, at btree.Pos) bool {
	c := &s.gc
	known := 0
	for known < len(c.run) && (level > 0 || c.run[known].low != at) {
		known++
	}
	c.run = c.run[:copy(c.run, c.run[known:])]
	var parent *btree.Node
	next := at
	for i := 0; i < runNodes; i++ {
		n := s.readyLocked(level, next)
		if n == nil {
			break
		}
		p := s.tree.Parent(n)
		if i == 0 {
			parent = p
		} else if p != parent || p == nil {
			break
		}
		if i < len(c.run) && c.run[i].ptr != n.Ref().Ptr {
			c.run = c.run[:i] // it was replaced
		}
		if i == len(c.run) {
			c.run = append(c.run, s.countLocked(n))
			if n.Gone() {
				c.run = c.run[:i]
				break
			}
		}
		if next = c.run[i].high; next == btree.MaxPos {
			break
		}
	}
	return len(c.run) > 0
}

// eachPtrLocked calls fn with the pointers of a node. It lets go of the lock now and then.
func (s *Set) eachPtrLocked(n *btree.Node, fn func(p ondisk.Ptr)) {
	pause := func() {
		s.mu.Unlock()
		s.charge(markSlice * markTime)
		s.mu.Lock()
	}
	for at := n.OtherPtrs(0, s.opt.markKeys, fn); at > 0 && !n.Gone(); at = n.OtherPtrs(at, s.opt.markKeys, fn) {
		pause()
	}
	for at := n.Ref().Low; at != n.Ref().High && !n.Gone(); {
		if at = n.KeyPtrs(at, s.opt.markKeys, fn); at != n.Ref().High {
			pause()
		}
	}
}

// countLocked counts the good keys of a node, and how old its pointers are. It lets go of the lock now and then.
func (s *Set) countLocked(n *btree.Node) counted {
	x := counted{high: n.Ref().High}
	x.low, x.ptr = n.Ref().Low, n.Ref().Ptr
	words, room := n.Load(&s.geo)
	x.words = words
	bad := 0
	see := func(p ondisk.Ptr) {
		if b, ok := s.table.Bucket(p); ok {
			if age := ondisk.GenAfter(s.table.Gen(b), p.Gen()); age != 0 {
				x.oldest = max(x.oldest, age)
				bad++
				return
			}
		}
		x.live++
	}
	s.eachPtrLocked(n, see)
	x.must = x.oldest > sweepOld // interior nodes too, unlike in a sweep. Source: B 3.3
	if n.Level() > 0 {
		x.stale = bad > x.live
	} else {
		x.stale = mostlyStale(x.live, words, room)
	}
	return x
}

// markLeafLocked marks what the keys of a leaf point to, and hands its open keys to the writers. It returns where the leaf
// ends. It lets go of the lock now and then.
func (s *Set) markLeafLocked(n *btree.Node, at btree.Pos) btree.Pos {
	c := &s.gc
	w := &c.stats.walked
	high := n.Ref().High
	words, room := n.Load(&s.geo)
	w.Words += uint64(words)
	w.Room += uint64(room)
	for at.Less(high) && !s.endLocked() {
		next, miss := s.tree.Scan(at, high, markSlice, func(x btree.Extent) bool {
			if x.HasPtr() {
				s.marks.Mark(x.Ptr, uint32(x.Size), x.Dirty(), false)
				if s.GoodLocked(x.Ptr) {
					w.Keys++
					w.Data += uint64(x.Size)
				}
			}
			return true
		})
		at = next
		s.mu.Unlock()
		var err error
		if !miss.IsZero() { // it was let go meanwhile
			err = s.ReadNode(miss)
		} else {
			s.charge(time.Duration(min(words/keyWords, markSlice)) * markTime)
		}
		s.mu.Lock()
		if err != nil {
			c.err = err
			return at
		}
	}
	if !n.Gone() && n.OpenBytes() > 0 {
		s.queueLocked(n, false)
		c.written = append(c.written, n)
	}
	return at
}
