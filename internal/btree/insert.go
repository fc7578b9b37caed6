package btree

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Change says what an insertion did, exactly: for accounts and for the journal. One that is used again and
// again makes insertions free of allocations.
type Change struct {
	Leaf *Node // that has changed, or that has no room
	Miss Ref   // the node that has to be read, for NeedsNode

	// Removed are the parts of older extents that Stored took the place of, in order, clipped to its range.
	Removed []Extent
	// Stored is what the leaf has got: the key, or its part up to the leaf's end or as far as it matched. This,
	// not the key, belongs in the journal. It has no pointer if there was no hold to be had (see Insert).
	Stored Extent
	// Rest is the part of the key behind the leaf's end, still to be inserted, if More is set.
	Rest ondisk.Key
	More bool
}

// growth is how many times what fits on disk a leaf may hold in memory.
const growth = 2

// Insert stores a leaf key, whatever is there; k is not changed. What lies behind the end of the leaf is left to
// the caller: see Change.Rest.
//
// With epoch not 0, which is for clean keys only, the pointer goes to the disk only after a flush of the backing
// device with a number greater than epoch: see FlushDone. Until then a write of the leaf says that the range is
// not cached.
//
// It allocates nothing but memory for the leaf to grow. Source: F 5.7.
func (t *Tree) Insert(k *ondisk.Key, epoch uint64, c *Change) Outcome {
	x := checked(k)
	n, miss := t.descend(0, x.Pos())
	if n == nil {
		c.Miss = miss
		return NeedsNode
	}
	c.Leaf = n
	if t.Crowded(n) {
		return NeedsRoom
	}
	c.More = false
	if end := n.ref.High; end.Inode == x.Inode && end.Sector < x.End() {
		c.Rest, c.More = *k, true
		c.Rest.CutFront(end.Sector)
		x = x.clip(x.Start, end.Sector)
	}
	t.put(n, x, epoch, c)
	return Done
}

// Replace stores k in the place of old, as far as the tree says from k's start on what old says: the same range
// cached at the same place, as dirty or clean as old. k lies within old's range. What follows a difference is
// not replaced, and More is set only where all up to the leaf's end matched. Source: F 5.9.
func (t *Tree) Replace(old, k *ondisk.Key, epoch uint64, c *Change) Outcome {
	was, x := checked(old), checked(k)
	if x.Inode != was.Inode || x.Start < was.Start || x.End() > was.End() {
		panic(fmt.Sprintf("btree: %v cannot replace %v", *k, *old))
	}
	n, miss := t.descend(0, x.Pos())
	if n == nil {
		c.Miss = miss
		return NeedsNode
	}
	c.Leaf, c.More = n, false
	end := x.End()
	if n.ref.High.Inode == x.Inode {
		end = min(end, n.ref.High.Sector)
	}
	same := n.matches(&was, x.Start, end)
	if same == x.Start {
		return NoMatch
	}
	if t.Crowded(n) {
		return NeedsRoom
	}
	if same == end && end < x.End() {
		c.Rest, c.More = *k, true
		c.Rest.CutFront(end)
	}
	t.put(n, x.clip(x.Start, same), epoch, c)
	return Done
}

// checked converts a key that somebody wants to insert.
func checked(k *ondisk.Key) Extent {
	if k.Size() == 0 || uint64(k.Size()) > k.End() || k.End() > ondisk.MaxOffset || k.Ptrs() > 1 || k.Ptrs() == 1 && !k.P[0].Available() {
		panic(fmt.Sprintf("btree: %v cannot be inserted", *k)) // of a copy, so that k need not be on the heap
	}
	return extentOf(k)
}

// matches returns how far from start on, at most to end, the leaf says what was says.
func (n *Node) matches(was *Extent, start, end uint64) uint64 {
	b := &n.body
	for k := b.seek(was.Inode, start); start < end && k.c < len(b.chunks); k = b.next(k) {
		x := b.at(k)
		if x.Inode != was.Inode || x.Start > start || (x.flags^was.flags)&(flagPtr|flagDirty) != 0 {
			break
		}
		if x.HasPtr() && x.Ptr.Advance(start-x.Start) != was.Ptr.Advance(start-was.Start) {
			break
		}
		start = min(x.End(), end)
	}
	return start
}

// put stores x, which lies within the leaf, and reports what it took the place of.
//
// What is left of older extents keeps its state: an append that is on the disk still says it. Only where x lies
// strictly inside of one must its rear part go to the disk together with x. So the keys of the sets on the disk,
// merged, never are more than the keys of these sets, and fit in their blocks. Source: F 5.7, F 14 #19.
func (t *Tree) put(n *Node, x Extent, epoch uint64, c *Change) {
	x.flags |= flagOpen
	if n.rewrite != nil && x.Pos().Less(n.rewrite.at) {
		x.flags |= flagLate
	}
	if epoch != 0 && x.HasPtr() {
		if x.Dirty() {
			panic("btree: a dirty extent need not wait for the backing device")
		}
		if x.hold = t.mem.holds.take(x.Inode, epoch); x.hold == 0 {
			x.Ptr, x.flags = 0, x.flags&^flagPtr // cached for nothing; rather a miss than what may come back older
		}
	}
	c.Leaf, c.Stored, c.Removed = n, x, c.Removed[:0]
	before, b := n.body.bytes(), &n.body
	from := b.seek(x.Inode, x.Start)
	to := from
	var left, right Extent
	for to.c < len(b.chunks) {
		o := b.at(to)
		if o.Inode != x.Inode || o.Start >= x.End() {
			break
		}
		c.Removed = append(c.Removed, o.clip(max(o.Start, x.Start), min(o.End(), x.End())))
		if o.Start < x.Start {
			left = o.clip(o.Start, x.Start)
		}
		if o.End() > x.End() {
			right = o.clip(x.End(), o.End())
			if o.Start < x.Start {
				right.flags |= x.flags & (flagOpen | flagLate)
			}
		}
		to = b.next(to)
	}
	// Neighbours that one key can say are one entry.
	var list [3]Extent
	in := 0
	if left.Size == 0 {
		if k, ok := b.prev(from); ok {
			if o := b.at(k); n.mayJoin(&o, &x) && o.joins(&x, t.g) {
				from, left = k, o
			}
		}
	}
	if left.Size > 0 {
		if n.mayJoin(&left, &x) && left.joins(&x, t.g) {
			x = extend(left, x.Size)
		} else {
			list[in], in = left, in+1
		}
	}
	if right.Size == 0 && to.c < len(b.chunks) {
		if o := b.at(to); x.joins(&o, t.g) {
			right, to = o, b.next(to)
		}
	}
	if right.Size > 0 && x.joins(&right, t.g) {
		x, right.Size = extend(x, right.Size), 0
	}
	list[in], in = x, in+1
	if right.Size > 0 {
		list[in], in = right, in+1
	}
	b.splice(&t.mem, from, to, list[:in])
	t.size += b.bytes() - before
}

// mayJoin reports whether l and r are on the same side of what a rewrite has copied.
func (n *Node) mayJoin(l, r *Extent) bool {
	return n.rewrite == nil || l.Pos().Less(n.rewrite.at) == r.Pos().Less(n.rewrite.at)
}

// extend returns x with more sectors.
func extend(x Extent, more uint16) Extent {
	x.Size += more
	return x
}
