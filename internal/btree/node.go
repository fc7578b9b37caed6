package btree

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Ref says where a node is and what it may hold: keys with Low < position <= High, and in leaves only extents
// that begin at Low or later.
type Ref struct {
	Level   uint8 // 0: a leaf
	Sectors uint32
	Ptr     ondisk.Ptr // start of the node's bucket
	Low     Pos
	High    Pos
}

// IsZero reports whether r names no node.
func (r *Ref) IsZero() bool { return r.Sectors == 0 }

// Key returns the key that refers to the node.
func (r *Ref) Key() ondisk.Key {
	return ondisk.NewChild(r.High.Inode, r.High.Sector, r.Sectors, r.Ptr)
}

func (r Ref) String() string {
	return fmt.Sprintf("node of level %d at sector %d gen %d, %v to %v", r.Level, r.Ptr.Sector(), r.Ptr.Gen(), r.Low, r.High)
}

// A child is what an interior node knows of one: its key, and the node where it is in memory.
type child struct {
	end     uint64
	ptr     ondisk.Ptr
	node    *Node
	inode   uint32
	sectors uint32
}

func (c *child) pos() Pos { return Pos{c.inode, c.end} }

// A Node is a node of the tree in memory. Of its methods those that change nothing may be called with the lock
// of the tree held shared.
type Node struct {
	// Mark is for who runs the set, guarded by its lock: the tree does not look at it.
	Mark uint64

	ref    Ref
	seq    uint64 // in every bset of the node
	used   uint32 // blocks that are written, or that a write in flight takes
	blocks uint32 // blocks there are
	sets   uint32 // appends that are written, or in flight

	body body    // of a leaf
	kids []child // of an interior node, sorted, live ones only

	// Of an interior node: keys that no append has taken, those of the append in flight, and pointers that are
	// dead but still on the disk, because nothing hides keys there.
	pend, flight []ondisk.Key
	dead         []ondisk.Ptr

	all    []ondisk.Key // of an interior node that was read and is not attached yet
	cached int          // children in memory

	pins pins
	link link

	slot    int // in Tree.nodes
	hot     atomic.Bool
	writing bool     // an append is in flight
	rewrite *Rewrite // that replaces the node
	full    bool     // no append may be made: the node has to be rewritten
	linked  bool     // what refers to the node is durable
	listed  bool     // the parent's key for the node is in an append that is not durable
	gone    bool     // evicted, or replaced
}

// A link is what waits until a node is linked: until the key that refers to it is durable.
type link struct {
	pin   uint64       // oldest journal entry whose keys are in the node's copy, or were written to the node since
	freed []Ref        // nodes that may be freed then
	stale []ondisk.Ptr // pointers that are on the disk until then, though not in the node
}

// Ref returns the reference to the node.
func (n *Node) Ref() Ref { return n.ref }

// Level returns 0 for a leaf.
func (n *Node) Level() int { return int(n.ref.Level) }

// Gone reports whether the node is no longer part of the tree in memory: evicted, or replaced by a rewrite.
func (n *Node) Gone() bool { return n.gone }

// Busy reports whether an append to the node is in flight, or a rewrite of it under way.
func (n *Node) Busy() bool { return n.writing || n.rewrite != nil }

// Dirty reports whether the node has anything that is not on the disk yet, or in flight to it.
func (n *Node) Dirty() bool { return n.body.open > 0 || n.body.held > 0 || len(n.pend) > 0 }

// Linked reports whether the key that refers to the node, and all that leads to it, is durable: nothing that it replaced
// can be reached any more.
func (n *Node) Linked() bool { return n.linked }

// Has reports whether the leaf may have keys of an inode on the disk, in any of its sets, or has them in memory. Both are
// one: a key covers only those of its inode, and is in memory until a rewrite, also where it has no pointer.
func (n *Node) Has(inode uint32) bool {
	k := n.body.seek(inode, 0)
	return k.c < len(n.body.chunks) && n.body.chunks[k.c].inode == inode
}

// OpenBytes returns how long the set would be that an append writes, at most. The kernel appends from page-48
// bytes on.
func (n *Node) OpenBytes() int {
	w := n.body.open + 3*len(n.pend)
	if w == 0 {
		return 0
	}
	return ondisk.BSetHeaderBytes + 8*w
}

// MustRewrite reports whether no append to the node can be made, whatever it would hold.
func (n *Node) MustRewrite() bool { return n.full || n.used >= n.blocks }

// Load returns the words of the node's keys in memory, and how many a node of this size has room for.
func (n *Node) Load(g *ondisk.Geometry) (words, room int) {
	words = n.body.words
	if n.ref.Level > 0 {
		words = 3 * len(n.kids)
	}
	return words, (int(n.ref.Sectors)*ondisk.SectorSize - ondisk.BSetHeaderBytes) / 8
}

// Crowded reports whether a leaf holds more than it may: insertions wait until it was rewritten.
func (t *Tree) Crowded(n *Node) bool {
	words, room := n.Load(t.g)
	if t.tight {
		return words > room || !n.roomFor(t.g, n.body.open+splitWords)
	}
	return words > growth*room
}

// splitWords is what an insertion may add to the open set of a leaf: a key, and the rear part of one that it lies within.
const splitWords = 6

// SetTight changes whether a leaf may hold only what another append to it has room for, as a kernel's. Else it may grow
// in memory to twice its size, and nobody waits for a split.
func (t *Tree) SetTight(yes bool) { t.tight = yes }

// roomFor reports whether a set of that many words can be appended.
func (n *Node) roomFor(g *ondisk.Geometry, words int) bool {
	return !n.full && int(n.used)+blocksOf(g, words) <= int(n.blocks)
}

// blocksOf returns the blocks that a set of that many words takes.
func blocksOf(g *ondisk.Geometry, words int) int {
	return (ondisk.BSetHeaderBytes + 8*words + g.BlockBytes() - 1) / g.BlockBytes()
}

// nodeBytes is what a node takes in memory besides its content.
const nodeBytes = int(unsafe.Sizeof(Node{}))

func (n *Node) bytes() int {
	return nodeBytes + n.body.bytes() + cap(n.kids)*int(unsafe.Sizeof(child{})) +
		(cap(n.pend)+cap(n.flight))*int(unsafe.Sizeof(ondisk.Key{})) + 8*cap(n.dead)
}

// touch marks the node as used lately.
func (n *Node) touch() {
	if !n.hot.Load() {
		n.hot.Store(true)
	}
}

// find returns the index of the child whose range has position p: the first with a greater one.
func (n *Node) find(p Pos) int {
	lo, hi := 0, len(n.kids)
	for lo < hi {
		m := int(uint(lo+hi) >> 1)
		if k := &n.kids[m]; k.inode < p.Inode || k.inode == p.Inode && k.end <= p.Sector {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}

// childRef returns the reference to the ith child.
func (n *Node) childRef(i int) Ref {
	k := &n.kids[i]
	r := Ref{Level: n.ref.Level - 1, Sectors: k.sectors, Ptr: k.ptr, Low: n.ref.Low, High: k.pos()}
	if i > 0 {
		r.Low = n.kids[i-1].pos()
	}
	return r
}

// Pin says that the oldest of the keys just inserted into the leaf are in journal entry seq: the entry is needed
// until they are on the disk. seq is not below that of earlier calls.
func (t *Tree) Pin(n *Node, seq uint64) {
	if n.pins.open == 0 {
		n.pins.open = seq
	}
	if n.rewrite != nil && n.pins.late == 0 {
		n.pins.late = seq
	}
	t.pinned.update(n)
}

// EachPtr calls fn with every pointer that the node has on the disk or in memory, also where it is stale, dead
// or a copy has just left it out: all that a bucket's oldest generation has to reckon with.
func (n *Node) EachPtr(fn func(p ondisk.Ptr)) {
	n.KeyPtrs(n.ref.Low, n.body.n+len(n.kids), fn)
	n.OtherPtrs(0, len(n.dead)+len(n.link.stale), fn)
}

// KeyPtrs calls fn with the pointers of the node's keys in memory that end after from, and visits no more than limit keys. It
// returns where to go on: at the node's end when it is through. What is there all the time between two calls is not left out.
func (n *Node) KeyPtrs(from Pos, limit int, fn func(p ondisk.Ptr)) (next Pos) {
	for i := n.find(from); i < len(n.kids); i++ {
		if limit == 0 {
			return n.kids[i-1].pos()
		}
		limit--
		fn(n.kids[i].ptr)
	}
	b := &n.body
	k := b.seek(from.Inode, from.Sector)
	for ; k.c < len(b.chunks); k.c, k.i = k.c+1, 0 {
		h := &b.chunks[k.c]
		for ; k.i < len(h.e); k.i++ {
			if limit == 0 {
				return Pos{h.inode, h.start(k.i)}
			}
			limit--
			if e := h.e[k.i]; e.a&flagPtr != 0 {
				fn(entryPtr(e))
			}
		}
	}
	return n.ref.High
}

// OtherPtrs calls fn with those pointers of EachPtr that are in no key in memory, from number from on, limit at most. It
// returns where to go on, 0 when it is through. It may show some twice if the node changes between two calls; what is
// there all the time is not left out.
func (n *Node) OtherPtrs(from, limit int, fn func(p ondisk.Ptr)) (next int) {
	// The first list only grows, the second goes at once: a number means the same pointer later, or an earlier one.
	at, end, past := from, from+limit, 0
	for _, list := range [][]ondisk.Ptr{n.dead, n.link.stale} {
		for ; at >= past && at < min(end, past+len(list)); at++ {
			fn(list[at-past])
		}
		past += len(list)
	}
	if at < past {
		return at
	}
	return 0
}

// Stats are counts of one node.
type Stats struct {
	Keys       int   // in memory
	LiveWords  int   // of keys with a pointer that is not stale
	StaleWords int   // of all others: stale, dead, without pointer
	MaxAge     uint8 // of any pointer: generations behind its bucket
	Used       int   // blocks written
	Blocks     int   // blocks there are
}

// SetStats are counts of the sets of nodes in memory, those that were written, and those that will be.
type SetStats struct {
	Nodes, Written, Unwritten    uint64
	WrittenBytes, UnwrittenBytes uint64 // of keys
}

// AddSets adds those of some nodes, from number from on, and returns where to go on: 0 when it is through. Nodes that change
// their number meanwhile it may miss.
func (t *Tree) AddSets(s *SetStats, from int) (next int) {
	end := min(from+lostSteps, len(t.nodes))
	for _, n := range t.nodes[from:end] {
		words, _ := n.Load(t.g)
		open := n.body.open + 3*len(n.pend)
		s.Nodes++
		s.Written += uint64(n.sets)
		if open > 0 {
			s.Unwritten++
		}
		s.UnwrittenBytes += 8 * uint64(open)
		s.WrittenBytes += 8 * uint64(max(words-open, 0))
	}
	if end < len(t.nodes) {
		return end
	}
	return 0
}

// Gens returns the generation of a bucket.
type Gens func(bucket uint64) uint8

// Stats walks the node.
func (n *Node) Stats(g *ondisk.Geometry, gens Gens) Stats {
	s := Stats{Keys: n.body.n + len(n.kids), Used: int(n.used), Blocks: int(n.blocks)}
	total := n.body.words + 3*len(n.kids) + 3*len(n.dead)
	n.EachPtr(func(p ondisk.Ptr) {
		age := ondisk.GenAfter(gens(g.Bucket(p.Sector())), p.Gen())
		if age == 0 {
			s.LiveWords += 3
		}
		s.MaxAge = max(s.MaxAge, age)
	})
	s.StaleWords = total - s.LiveWords
	return s
}
