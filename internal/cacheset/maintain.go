package cacheset

import (
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// The index is kept small and its pointers young by one walk over all nodes, the sweep (sweep.go), and by the chores that
// it finds: nodes to rewrite, and runs of neighbours to coalesce. Both are off every request's way. Source: B 9.6.
//
//	sweeper    walks, slowly; waits where there are many chores
//	   | chores: places, not nodes: what is evicted meanwhile is read again, what has changed is left alone
//	   v
//	tidiers    copy, write, swap (rewrite.go), as the writers do where a leaf has no room
//
// The writers do not do it themselves: a leaf that has to be split, or written for the journal, would have to wait its
// turn. A chore that can be left, for the next walk finds it again, gives up where buckets or others' waits are at stake.

const (
	tidiers     = 2
	runNodes    = 4       // neighbours that are coalesced at a time
	runGrowth   = 2       // words of a run, in nodes: what is swapped under the lock is no more than a leaf may hold
	choresFull  = 8       // the sweeper waits when there are so many
	choresLimit = 1 << 12 // it may not wait in a hurry: then so many at most, and those that must be done alone

	sweepOld = 10 // a node with a pointer older than that is rewritten

	// emptiedShare: a walk is due when, since the last one, so many keys went that they would fill one of so many of
	// all nodes. The nodes that are in the way are never much more than that, and a walk, which reads all, comes after
	// a share of the index has changed and not sooner. Overwriting counts nothing, nor does what is evicted: what is
	// cached instead has its keys rewrite the leaves, and when all was evicted once a sweep is due anyway.
	emptiedShare = 8
)

// A chore is a node to rewrite, or a run of neighbours to coalesce. With nodes 0 it is to see whether the tree may be
// lower.
type chore struct {
	low   btree.Pos  // of the first
	ptr   ondisk.Ptr // of the first: else it is another one by now
	level uint8
	nodes uint8
	must  bool // there are pointers that are too old
}

// A seen is a node that the walk has been over.
type seen struct {
	node        *btree.Node // to be forgotten again; nil if it was in memory before
	low         btree.Pos
	ptr         ondisk.Ptr
	live, words int // keys; words of all keys
	must, stale bool
}

// choose says what is to be done with the first of a run of neighbours: with nodes 2 or more of them, coalesce these; with
// 1, rewrite it; with 0, nothing. Nodes are coalesced that fit into one fewer at 2/3, the more of them the better. always
// is for tests: all there are, of use or not.
func choose(g *ondisk.Geometry, run []seen, always bool) (nodes int) {
	room := (int(g.NodeSectors)*ondisk.SectorSize - ondisk.BSetHeaderBytes) / 8
	live, words := 0, 0
	for i := range run {
		live += run[i].live
		words += run[i].words
		if i > 0 && words > runGrowth*room {
			break
		}
		if i > 0 && (always || btree.Coalesced(g, live) <= i) {
			nodes = i + 1
		}
	}
	if nodes == 0 && (run[0].must || run[0].stale) {
		return 1
	}
	return nodes
}

// mostlyStale reports whether a leaf has more words that say nothing, since they are stale or have no pointer, than others,
// and so many that a rewrite is worth it.
func mostlyStale(live, words, room int) bool {
	stale := words - 3*live
	return 2*stale > words && stale > room/8
}

// addChoreLocked hands on what the walk has found. Where there is much already it waits, and lets go of the lock; in a
// hurry it does not, and leaves out what the next walk finds again.
func (s *Set) addChoreLocked(w *walk, c chore) {
	for len(s.chores) >= choresFull && !s.hurryLocked(w) && !s.closed && s.stop.Err() == nil && s.Err() == nil {
		s.chore.Wait()
	}
	if len(s.chores) >= choresLimit || len(s.chores) >= choresFull && !c.must {
		return
	}
	s.chores = append(s.chores, c)
	s.chore.Broadcast()
}

// tidy is the goroutine of a tidier.
func (s *Set) tidy() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		for (len(s.chores) == 0 || s.closed) && s.stop.Err() == nil && s.Err() == nil {
			s.chore.Wait()
		}
		if s.stop.Err() != nil || s.Err() != nil {
			return
		}
		c := s.chores[0]
		s.chores = s.chores[:copy(s.chores, s.chores[1:])]
		s.busy++
		s.tidying++
		s.mu.Unlock()
		if err := s.do(c); err != nil && s.stop.Err() == nil {
			s.fail(err)
		}
		s.mu.Lock()
		s.busy--
		s.tidying--
		s.chore.Broadcast()
		s.changed.Broadcast()
	}
}

// do does a chore. A node that cannot be read is left as it is: who needs it gets the error.
func (s *Set) do(c chore) error {
	nodes := s.find(c)
	if len(nodes) == 0 {
		return s.lower()
	}
	done := false
	if len(nodes) > 1 || !c.must {
		var err error
		if done, err = s.replace(false, nodes...); err != nil {
			return err
		}
	}
	if done || !c.must {
		s.mu.Lock()
		if done && len(nodes) == 1 {
			s.stats.NodesStale++
		}
		s.mu.Unlock()
		return s.lower()
	}
	for _, n := range nodes {
		if err := s.rewrite(n); err != nil {
			return err
		}
		s.mu.Lock()
		s.stats.NodesStale++
		s.mu.Unlock()
	}
	return s.lower() // when all else is done, so that the last of those that held it up does it
}

// find returns the nodes of a chore as far as they are what they were: all in memory at one moment, and still of one
// parent.
func (s *Set) find(c chore) []*btree.Node {
	if c.nodes == 0 {
		return nil
	}
	var list []*btree.Node
	for try := 0; try < 2*runNodes; try++ {
		s.mu.Lock()
		n, miss := s.tree.NodeAt(int(c.level), c.low)
		if n != nil {
			if n.Ref().Ptr != c.ptr {
				s.mu.Unlock()
				return nil
			}
			list = s.tree.Siblings(list[:0], n, int(c.nodes))
			last := list[len(list)-1]
			if len(list) == int(c.nodes) {
				s.mu.Unlock()
				return list
			}
			if n, miss = s.tree.NodeAt(int(c.level), last.Ref().High); n != nil || miss.IsZero() {
				s.mu.Unlock()
				return list[:1] // the run is not under one parent any more
			}
		}
		s.mu.Unlock()
		if miss.IsZero() || s.ReadNode(miss) != nil {
			return nil
		}
	}
	return nil
}

// nodesLocked returns how many nodes there are, or a few more: those that wait to be freed count too.
func (s *Set) nodesLocked() int {
	return max(s.table.Counts()[bucket.Meta]-2*s.table.PrioSets()-1, 1)
}

// emptiedLocked reports whether so many keys went that it is worth looking for nodes to coalesce.
func (s *Set) emptiedLocked() bool {
	room := (int(s.geo.NodeSectors)*ondisk.SectorSize - ondisk.BSetHeaderBytes) / 8 / keyWords
	nodes := s.nodesLocked()
	return nodes > 2 && s.emptied >= room*max(nodes/emptiedShare, 1)
}
