package btree

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Tree is the index of a set in memory: which ranges of which inode lie where in the cache.
//
// It has no lock of its own and does no I/O. Lookup, Scan, NodeAt and methods of nodes that change nothing may
// run side by side under a lock held shared; everything else needs it exclusively. What takes long (reading,
// parsing, encoding) is done by Parse, Append and Rewrite, on memory that is theirs, without the lock.
type Tree struct {
	g    *ondisk.Geometry
	gens Gens
	mem  memory

	root     Ref // the newest
	rootNode *Node
	nodes    []*Node // in memory, the clock's dial
	hand     int
	size     int // bytes of the nodes, as counted last
	pinned   pinHeap
	tight    bool // see SetTight
}

// New returns a tree whose root is the node at root, which is durable, and not in memory yet. gens returns the
// generation of a bucket; it is called with the lock held, and must not change anything.
func New(g *ondisk.Geometry, root Ref, gens Gens) *Tree {
	root.Low, root.High = Pos{}, MaxPos
	return &Tree{g: g, gens: gens, root: root}
}

// Root returns the reference to the root, for the journal entry that is written next: the node it names is on
// the disk.
func (t *Tree) Root() Ref { return t.root }

// An Outcome says how a change of the tree went.
type Outcome uint8

const (
	// Done: the change is made.
	Done Outcome = iota
	// NeedsNode: a node has to be read first. Nothing has changed.
	NeedsNode
	// NeedsRoom: the leaf holds as much as it may in memory; it has to be rewritten first. Nothing has changed.
	NeedsRoom
	// NoMatch: nothing of what should be replaced is there. Nothing has changed.
	NoMatch
	// Nothing: there is nothing to write.
	Nothing
	// NeedsRewrite: an append does not fit into the node; it has to be rewritten. Nothing has changed.
	NeedsRewrite
	// Busy: a write or a rewrite of the node that is under way has to end first. Nothing has changed.
	Busy
	// Gone: the node is no longer part of the tree, or no longer where it was. Nothing has changed.
	Gone
)

var outcomeText = [...]string{"done", "needs a node", "needs room", "no match", "nothing", "needs a rewrite", "busy", "gone"}

func (o Outcome) String() string { return outcomeText[o] }

// descend returns the node of that level whose range has p. Where one on the way is not in memory it returns
// nil, and its reference.
func (t *Tree) descend(level uint8, p Pos) (*Node, Ref) {
	n := t.rootNode
	if n == nil {
		return nil, t.root
	}
	for n.ref.Level > level {
		n.touch()
		i := n.find(p)
		if n.kids[i].node == nil {
			return nil, n.childRef(i)
		}
		n = n.kids[i].node
	}
	n.touch()
	return n, Ref{}
}

// parent returns the parent of a node that is in memory, and the node's index in it; nil for the root.
func (t *Tree) parent(n *Node) (*Node, int) {
	if n == t.rootNode {
		return nil, 0
	}
	p := t.rootNode
	for {
		i := p.find(n.ref.Low)
		if p.kids[i].node == n {
			return p, i
		}
		if p = p.kids[i].node; p == nil || p.ref.Level == 0 {
			panic(fmt.Sprintf("btree: %v is not where it belongs", n.ref))
		}
	}
}

// A Piece is what the tree says of the sectors from Start to End of an inode.
type Piece struct {
	Start, End uint64
	Ptr        ondisk.Ptr // where Start lies in the cache; meaningful where Cached
	Cached     bool       // the range has a pointer; whether it is stale, the generation of its bucket says
	Known      bool       // an extent of the tree says it, be it one without pointer; else it is a hole
	Dirty      bool
}

// Lookup says what there is at sector from: the extent that covers it, or the hole before the next one, both
// cut off at to, and at the end of the leaf where that comes first. Where a node is missing, miss names it, and
// the piece means nothing. It does not allocate.
func (t *Tree) Lookup(inode uint32, from, to uint64) (p Piece, miss Ref) {
	n, miss := t.descend(0, Pos{inode, from})
	if n == nil {
		return p, miss
	}
	p = Piece{Start: from, End: to}
	if n.ref.High.Inode == inode {
		p.End = min(to, n.ref.High.Sector)
	}
	b := &n.body
	k := b.seek(inode, from)
	if k.c == len(b.chunks) || b.chunks[k.c].inode != inode {
		return p, Ref{}
	}
	x := b.at(k)
	if x.Start > from {
		p.End = min(p.End, x.Start)
		return p, Ref{}
	}
	p.End = min(p.End, x.End())
	p.Known = true
	if x.HasPtr() && !t.mem.holds.void(x.hold) {
		p.Ptr, p.Cached, p.Dirty = x.Ptr.Advance(from-x.Start), true, x.Dirty()
	}
	return p, Ref{}
}

// Scan calls fn with the extents that end after from and begin before to, in order, those without pointer too,
// until it has visited limit of them or fn returns false. It returns where to go on: at to when it is through.
// Where a node is missing, miss names it, and next is where it begins.
func (t *Tree) Scan(from, to Pos, limit int, fn func(x Extent) bool) (next Pos, miss Ref) {
	for from.Less(to) {
		n, miss := t.descend(0, from)
		if n == nil {
			return from, miss
		}
		b := &n.body
		for k := b.seek(from.Inode, from.Sector); k.c < len(b.chunks); k = b.next(k) {
			x := b.at(k)
			if !x.Pos().Less(to) {
				return to, Ref{}
			}
			if limit == 0 {
				return x.Pos(), Ref{}
			}
			limit--
			if !fn(x) {
				return Pos{x.Inode, x.End()}, Ref{}
			}
		}
		from = n.ref.High
		if from == MaxPos {
			break
		}
	}
	return to, Ref{}
}

// NodeAt returns the node of that level whose range has p, or the reference to what is missing on the way.
// With p = the High of the node before it walks a
// level. Both are zero where there is no such node: the tree is lower, or p its end.
func (t *Tree) NodeAt(level int, p Pos) (n *Node, miss Ref) {
	if level > int(t.root.Level) || !p.Less(MaxPos) {
		return nil, Ref{}
	}
	return t.descend(uint8(level), p)
}

// Parent returns the parent of a node, nil for the root.
func (t *Tree) Parent(n *Node) *Node {
	if n.gone {
		return nil
	}
	p, _ := t.parent(n)
	return p
}

// Lower makes the only child of the root the root, which the caller has a journal entry name, for RootDurable: the level
// of a root stands in the journal alone, and the last child on each level has the position that a root has (F 5.1). old
// is the root that was: the generation of its bucket is to be raised by one, now.
//
// Outcomes: Done; Nothing where the root has more children, or is a leaf; Busy where it or its child is being written or
// rewritten, or is not linked; NeedsNode where the child is not in memory, with its reference as old.
//
// The child counts as not linked until then, so that what leads to it on the disk is not let go.
func (t *Tree) Lower() (old Ref, o Outcome) {
	root := t.rootNode
	if root == nil {
		return t.root, NeedsNode
	}
	if root.ref.Level == 0 || len(root.kids) != 1 {
		return old, Nothing
	}
	child := root.kids[0].node
	switch {
	case child == nil:
		return root.childRef(0), NeedsNode
	case root.Busy() || !root.linked || len(root.pend) > 0 || child.rewrite != nil || !child.linked || child.listed:
		return old, Busy
	}
	old = root.ref
	child.linked = false
	child.link.freed = append(child.link.freed, old)
	child.link.stale = root.dead
	t.root, t.rootNode = child.ref, child
	t.drop(root)
	return old, Done
}

// Siblings appends n and up to max-1 of the nodes that follow it under the same parent to list, as far as they
// are in memory.
func (t *Tree) Siblings(list []*Node, n *Node, max int) []*Node {
	if n.gone {
		return list
	}
	list = append(list, n)
	p, i := t.parent(n)
	if p == nil {
		return list
	}
	for i++; len(list) < max && i < len(p.kids) && p.kids[i].node != nil; i++ {
		list = append(list, p.kids[i].node)
	}
	return list
}

// Blocked reports whether neither the disk nor a write under way has the pointer of a held extent: its backing
// device was not flushed yet. It is for the extents of a Change, before anything else is inserted.
func (t *Tree) Blocked(x *Extent) bool { return t.mem.holds.blocks(x.hold) }

// Holding reports whether extents of an inode wait for a flush of its backing device.
func (t *Tree) Holding(inode uint32) bool { return t.mem.holds.waiting(inode) }

// FlushDone says that the flush of that number of the inode's backing device is done: extents of earlier epochs
// may go to the disk with their pointers.
func (t *Tree) FlushDone(inode uint32, flush uint64) { t.mem.holds.done(inode, flush) }

// FlushFailed says that a flush of an inode's backing device has failed, the youngest that has begun: the pointers of
// all its extents that are held count no more, for the device may have lost what they are a copy of. They are not on the
// disk, nor do they get there; Lost finds the extents, so that something can take their place.
func (t *Tree) FlushFailed(inode uint32) { t.mem.holds.failed(inode) }

// Losing reports whether there are extents that Lost finds.
func (t *Tree) Losing(inode uint32) bool { return t.mem.holds.losing(inode) }

// Lost appends keys of an inode whose pointers count no more, as they were inserted. It looks at some of the nodes in
// memory, from number from on; next is where to go on, 0 when it is through. Nodes that change their number meanwhile it
// may miss.
func (t *Tree) Lost(list []ondisk.Key, inode uint32, from int) (found []ondisk.Key, next int) {
	for steps := 0; from < len(t.nodes); from++ {
		if steps >= lostSteps {
			return list, from
		}
		steps++
		n := t.nodes[from]
		if n.body.held == 0 {
			continue
		}
		for c := range n.body.chunks {
			h := &n.body.chunks[c]
			if h.inode != inode {
				continue
			}
			steps += len(h.e) / 8
			for i, e := range h.e {
				if t.mem.holds.void(e.hold()) {
					x := h.at(i)
					list = append(list, x.Key())
				}
			}
		}
	}
	return list, 0
}

// lostSteps is how many nodes, or eight extents each, Lost looks at.
const lostSteps = 4096
