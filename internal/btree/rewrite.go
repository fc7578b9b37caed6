package btree

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Rewrite replaces nodes by fewer, by more, or by as many without what is stale: a compaction, a split, a
// coalescing. Its steps, the lock held where it says so:
//
//	Begin     lock   from here on appends to interior nodes wait
//	Prepare          memory for the copy; may be left out
//	Copy      lock   copies what is live, a slice a call; the tree knows what comes later than that
//	Assign           gives each new node its bucket
//	Encode           makes the bytes of each new node; they are written, durable
//	Install  lock   the new nodes take the old ones' place, and take over what came since and all journal pins;
//	                 the parent has got an append to write, or the tree a new root
//
// and then the parent's Freeze, write and Finish, or a journal entry with the new root and RootDurable, which
// return the old nodes, to be freed. Before Install the rewrite may be given up with Abort.
type Rewrite struct {
	t       *Tree
	victims []*Node
	most    int       // keys that may be copied
	at      Pos       // what begins before it is copied
	keys    []byte    // the copy
	marks   []mark    // where the copy may be cut
	out     []newNode // of the copy, and behind them the new root over them if there is one
	grows   bool      // there is one
	dropped []Extent  // what of a leaf the copy left out, in order
	done    bool      // installed or aborted
}

// A mark is the end of a key that was copied, or of an extent that is held: it is not in the copy, but in the way all
// the same, so that it counts when a leaf is split.
type mark struct {
	end  Pos
	keys int // bytes of the copy up to there
}

// A newNode is a node in the making.
type newNode struct {
	ref  Ref
	seq  uint64
	keys []byte
}

const (
	// A copy that takes more than splitAt of a node's blocks is split; the first of two gets splitPivot of it.
	splitAtNum, splitAtDen       = 4, 5
	splitPivotNum, splitPivotDen = 3, 5
	// Nodes that are coalesced fill the new ones to coalesceTo.
	coalesceToNum, coalesceToDen = 2, 3

	copiedKeyBytes = 24 // every key that a copy takes has one pointer
)

// Begin starts the rewrite of one node, or of several of one level that follow each other under one parent.
// Busy says that an append to one that is interior is in flight, that one is being rewritten, or is not linked
// yet; Gone that they are not what they were.
//
// Until Install the nodes may be changed, and leaves appended to.
func (t *Tree) Begin(victims ...*Node) (*Rewrite, Outcome) {
	count := 0
	for i, n := range victims {
		switch {
		case n.gone:
			return nil, Gone
		case n.rewrite != nil || !n.linked || n.listed || n.ref.Level > 0 && n.writing:
			return nil, Busy
		case i > 0 && !t.adjacent(victims[i-1], n):
			return nil, Gone
		}
		count += n.body.n + len(n.kids)
	}
	r := &Rewrite{t: t, victims: append([]*Node(nil), victims...), most: count, at: victims[0].ref.Low}
	for _, n := range victims {
		n.rewrite = r
		n.pins.late = 0
	}
	return r, Done
}

// Prepare gets the memory that the copy takes, some 500 KiB for a node of 256 KiB that is as full as can be. It needs no
// lock.
func (r *Rewrite) Prepare() {
	r.keys = make([]byte, 0, r.most*copiedKeyBytes)
	r.marks = make([]mark, 0, r.most)
}

// Copy copies up to limit keys more, and reports whether that was all. Then the nodes in the making are known:
// see Nodes.
func (r *Rewrite) Copy(limit int) bool {
	if len(r.out) > 0 {
		return true
	}
	level := r.victims[0].ref.Level
	for _, n := range r.victims {
		if !r.at.Less(n.ref.High) {
			continue
		}
		for i := range n.kids { // nothing changes them before Install, and there are few
			k := &n.kids[i]
			key := ondisk.NewChild(k.inode, k.end, k.sectors, k.ptr)
			r.keys = ondisk.AppendKey(r.keys, &key)
			r.marks = append(r.marks, mark{k.pos(), len(r.keys)})
		}
		if level == 0 {
			var all bool
			if limit, all = r.copyLeaf(n, limit); !all {
				return false
			}
		}
		r.at = n.ref.High
	}
	r.cut()
	return true
}

// copyLeaf copies the leaf's extents from r.at on, at most limit. It returns what is left of limit, and whether
// that was all of the leaf; if not, it has moved r.at on.
func (r *Rewrite) copyLeaf(n *Node, limit int) (left int, all bool) {
	b := &n.body
	k := b.seek(r.at.Inode, r.at.Sector)
	if k.c < len(b.chunks) {
		if x := b.at(k); x.Pos().Less(r.at) {
			k = b.next(k) // it is late
		}
	}
	for ; k.c < len(b.chunks); k.c, k.i = k.c+1, 0 {
		h := &b.chunks[k.c]
		for ; k.i < len(h.e); k.i++ {
			if limit == 0 {
				r.at = Pos{h.inode, h.start(k.i)}
				return 0, false
			}
			limit--
			x := h.at(k.i)
			copied := r.t.copies(&x)
			if copied {
				r.keys = appendExtent(r.keys, &x)
			} else {
				r.dropped = append(r.dropped, x)
			}
			if copied || x.HasPtr() && r.t.mem.holds.blocks(x.hold) {
				r.marks = append(r.marks, mark{Pos{x.Inode, x.End()}, len(r.keys)})
			}
		}
	}
	return limit, true
}

// adjacent reports whether b follows a under the same parent, both being in memory.
func (t *Tree) adjacent(a, b *Node) bool {
	if a == t.rootNode || b == t.rootNode || a.ref.Level != b.ref.Level || a.ref.High != b.ref.Low {
		return false
	}
	p, _ := t.parent(a)
	q, _ := t.parent(b)
	return p == q
}

// copies reports whether an extent goes to the disk with a copy: there it has nothing to hide. What is held does
// not, and follows later.
func (t *Tree) copies(x *Extent) bool {
	return x.HasPtr() && !t.mem.holds.blocks(x.hold) &&
		ondisk.GenAfter(t.gens(t.g.Bucket(x.Ptr.Sector())), x.Ptr.Gen()) == 0
}

// pieces returns how many new nodes take so many keys from so many old nodes, and how many the first gets; the
// others share what is left. However small a node is, each has room for an append when it is new.
func (r *Rewrite) pieces(keys, old int) (n, first int) {
	most := keysIn(r.t.g, splitBlocks(r.t.g))
	switch pivot := (keys*splitPivotNum + splitPivotDen - 1) / splitPivotDen; {
	case old > 1:
		n = Coalesced(r.t.g, keys)
		return n, (keys + n - 1) / n
	case keys > most && pivot <= most:
		return 2, pivot
	}
	n = max(1, (keys+most-1)/most)
	return n, (keys + n - 1) / n
}

// Coalesced returns how many nodes several whose live keys are so many become when they are coalesced.
func Coalesced(g *ondisk.Geometry, keys int) int {
	most := min(keysIn(g, splitBlocks(g)), keysIn(g, int(g.NodeSectors/g.BlockSectors))*coalesceToNum/coalesceToDen)
	return max(1, (keys+most-1)/most)
}

// splitBlocks returns how many blocks a copy may take without being split.
func splitBlocks(g *ondisk.Geometry) int {
	return max(1, int(g.NodeSectors/g.BlockSectors)*splitAtNum/splitAtDen)
}

// keysIn returns how many keys with a pointer fit in a set of that many blocks.
func keysIn(g *ondisk.Geometry, blocks int) int {
	return (blocks*g.BlockBytes() - ondisk.BSetHeaderBytes) / copiedKeyBytes
}

// cut makes nodes of the copy. They end at the end of a key, the last where the last of the old nodes does.
func (r *Rewrite) cut() {
	keys, marks := r.keys, r.marks
	n, first := r.pieces(len(marks), len(r.victims))
	level, low := r.victims[0].ref.Level, r.victims[0].ref.Low
	high := r.victims[len(r.victims)-1].ref.High
	total, from := len(marks), 0
	for m := range n - 1 {
		to := first // marks of this node and those before it
		if m > 0 {
			to += (total - first) * m / (n - 1)
		}
		end := marks[to-1]
		r.out = append(r.out, newNode{ref: Ref{Level: level, Low: low, High: end.end}, keys: keys[from:end.keys:end.keys]})
		low, from = end.end, end.keys
	}
	r.marks = nil
	r.out = append(r.out, newNode{ref: Ref{Level: level, Low: low, High: high}, keys: keys[from:]})
	if r.grows = r.victims[0] == r.t.rootNode && n > 1; r.grows {
		r.out = append(r.out, newNode{ref: Ref{Level: level + 1, High: MaxPos}})
	}
	for i := range r.out {
		r.out[i].ref.Sectors = r.t.g.NodeSectors
	}
}

// Nodes returns how many new nodes there are, each of which needs a bucket. Where several nodes are coalesced
// and as many would take their place, the rewrite is of no use but to drop what is stale.
func (r *Rewrite) Nodes() int { return len(r.out) }

// Sectors returns the size of each.
func (r *Rewrite) Sectors() uint32 { return r.out[0].ref.Sectors }

// Assign gives the ith new node its place, the start of a bucket with its generation, and a random number. It
// needs no lock. All are assigned before any is encoded.
//
// The number by which readers know the sets of the node is made so that no word of a key equals it.
func (r *Rewrite) Assign(i int, p ondisk.Ptr, random uint64) {
	r.out[i].ref.Ptr = p
	r.out[i].seq = random | 1<<63 | 1<<50
}

// Bytes returns how long the ith new node is, in whole blocks.
func (r *Rewrite) Bytes(i int) int {
	g := r.t.g
	return blocksOf(g, r.words(i)) * g.BlockBytes()
}

func (r *Rewrite) words(i int) int {
	if r.grows && i == len(r.out)-1 {
		return 3 * i
	}
	return len(r.out[i].keys) / 8
}

// Encode makes the bytes of the ith new node in b, which is Bytes(i) long, and returns how to write them. It
// needs no lock. Source: F 5.10.
func (r *Rewrite) Encode(i int, b []byte) []Write {
	b = b[:r.Bytes(i)]
	o := &r.out[i]
	keys := o.keys
	if r.grows && i == len(r.out)-1 {
		keys = make([]byte, 0, 24*i)
		for j := range i {
			k := r.out[j].ref.Key()
			keys = ondisk.AppendKey(keys, &k)
		}
	}
	n := ondisk.EncodeBSet(b, r.t.g.BSetMagic(), o.seq, o.ref.Ptr, keys)
	clear(b[n:])
	return []Write{{Off: int64(o.ref.Ptr.Sector()) * ondisk.SectorSize, Data: b, FUA: true}}
}

// Abort gives the rewrite up, with the lock held. Nothing of it is in the tree; its buckets are the caller's.
func (r *Rewrite) Abort() {
	if r.done {
		return
	}
	r.done = true
	for _, n := range r.victims {
		n.rewrite, n.pins.late = nil, 0
		r.t.pinned.update(n)
		b := &n.body
		for k := (cursor{}); k.c < len(b.chunks); k = b.next(k) {
			if b.chunks[k.c].e[k.i].a&flagLate != 0 {
				x := b.at(k)
				x.flags &^= flagLate
				b.set(&r.t.mem, k, &x)
			}
		}
	}
}

// Installed is what came of an Install.
type Installed struct {
	// Parent has to be appended to: Freeze, write, Finish. Nil where the tree has a new root, Tree.Root, for a
	// journal entry and RootDurable. For NeedsRewrite it is the node to rewrite first.
	Parent *Node
	New    []*Node // what is in the old nodes' place, the new root not among them
	Old    []Ref   // the old nodes: the generation of each one's bucket is to be raised by one, now
}

// Install puts the new nodes, which are durable, in the place of the old ones. Busy says that an append to an
// old node is in flight, or the parent being rewritten: try again when that is over. NeedsRewrite: the parent has
// no room for the keys. Gone: the old nodes no longer have one parent; only Abort is left.
func (r *Rewrite) Install() (in Installed, o Outcome) {
	t := r.t
	if r.done {
		return in, Gone
	}
	if len(r.out) == 0 {
		panic("btree: a rewrite is installed that has not been copied")
	}
	first := r.victims[0]
	for i, n := range r.victims {
		if n.writing {
			return in, Busy
		}
		if i > 0 && !t.adjacent(r.victims[i-1], n) {
			return in, Gone
		}
	}
	copies := r.out
	if r.grows {
		copies = r.out[:len(r.out)-1]
	}
	p, at := t.parent(first)
	if p != nil {
		switch {
		case p.rewrite != nil:
			return in, Busy
		case !p.roomFor(t.g, 3*(len(p.pend)+len(copies)+len(r.victims))):
			return Installed{Parent: p}, NeedsRewrite
		}
	}
	r.done = true
	kids := r.makeNodes(copies)
	for _, n := range r.victims {
		in.Old = append(in.Old, n.ref)
		t.drop(n)
	}
	in.New = kids
	if p == nil {
		t.installRoot(r, kids, in.Old)
		return in, Done
	}
	before := p.bytes()
	list := make([]child, len(kids))
	for i, n := range kids {
		list[i] = child{end: n.ref.High.Sector, ptr: n.ref.Ptr, node: n, inode: n.ref.High.Inode, sectors: n.ref.Sectors}
		n.listed = true
		p.pend = append(p.pend, n.ref.Key())
	}
	for i := range in.Old {
		p.pend = append(p.pend, freeingKey(&in.Old[i]))
		p.dead = append(p.dead, in.Old[i].Ptr)
	}
	p.kids = append(p.kids[:at], append(list, p.kids[at+len(in.Old):]...)...)
	p.cached += len(kids) - len(in.Old)
	t.size += p.bytes() - before
	in.Parent = p
	return in, Done
}

// installRoot makes what the root was rewritten to the root, or a new one over it.
func (t *Tree) installRoot(r *Rewrite, kids []*Node, old []Ref) {
	root := kids[0]
	if r.grows {
		o := &r.out[len(r.out)-1]
		root = r.newNode(o, r.words(len(r.out)-1))
		for _, n := range kids {
			root.kids = append(root.kids, child{end: n.ref.High.Sector, ptr: n.ref.Ptr, node: n, inode: n.ref.High.Inode, sectors: n.ref.Sectors})
		}
		root.cached = len(kids)
		t.admit(root)
	}
	root.link.freed = append(root.link.freed, old...)
	t.root, t.rootNode = root.ref, root
}

func (r *Rewrite) newNode(o *newNode, words int) *Node {
	n := &Node{ref: o.ref, seq: o.seq, used: uint32(blocksOf(r.t.g, words)), blocks: o.ref.Sectors / r.t.g.BlockSectors, sets: 1}
	n.hot.Store(true)
	return n
}

// makeNodes makes the new nodes in memory: what the old ones hold now.
func (r *Rewrite) makeNodes(copies []newNode) []*Node {
	t := r.t
	nodes := make([]*Node, len(copies))
	for i := range copies {
		nodes[i] = r.newNode(&copies[i], len(copies[i].keys)/8)
	}
	if r.victims[0].ref.Level == 0 {
		r.moveExtents(nodes)
	} else {
		r.moveChildren(nodes)
	}
	// Nothing that the old nodes kept the journal for may be let go before the new ones are linked; and what
	// came since the copy not before it is appended, too.
	var pin, late uint64
	var stale []ondisk.Ptr
	for _, n := range r.victims {
		pin = oldest(pin, n.pins.open, n.link.pin)
		late = oldest(late, n.pins.late)
		stale = append(stale, n.dead...)
	}
	for i := range r.dropped {
		if x := &r.dropped[i]; x.HasPtr() {
			stale = append(stale, x.Ptr)
		}
	}
	for _, n := range nodes {
		n.link.pin = pin
		if n.body.open > 0 {
			n.pins.open = late
		}
		n.link.stale = stale // each has all: who walks the level may have passed the first when the others come
		t.admit(n)
		t.pinned.update(n)
	}
	return nodes
}

// moveExtents deals the extents of the old leaves out to the new ones. What was copied is on the disk; what came
// since is open. What was left out and has nothing more to hide is gone, and so are invalidations.
func (r *Rewrite) moveExtents(nodes []*Node) {
	d := dealer{t: r.t, nodes: nodes, dropped: r.dropped}
	for _, n := range r.victims {
		for c := range n.body.chunks {
			h := &n.body.chunks[c]
			if h.plain() && d.whole(h) {
				h.e = nil // it has a new owner
				continue
			}
			for i := range h.e {
				d.one(h.at(i))
			}
		}
	}
	for _, n := range nodes {
		if c := len(n.body.chunks); c > 0 {
			n.body.grow(&r.t.mem, c-1, len(n.body.chunks[c-1].e))
		}
	}
}

// A dealer puts extents, which come in order, into new leaves.
type dealer struct {
	t       *Tree
	nodes   []*Node  // of which the first may be full already
	dropped []Extent // what the copy left out and lies ahead
}

// to moves on to the leaf and the left-out extent that matter at p.
func (d *dealer) to(p Pos) {
	for len(d.dropped) > 0 && !p.Less(Pos{d.dropped[0].Inode, d.dropped[0].End()}) {
		d.dropped = d.dropped[1:]
	}
	for !p.Less(d.nodes[0].ref.High) {
		d.nodes = d.nodes[1:]
	}
}

// whole deals out a plain chunk at once, if all of it was copied and goes to one leaf.
func (d *dealer) whole(h *chunk) bool {
	last := h.at(len(h.e) - 1)
	end := Pos{h.inode, last.End()}
	d.to(Pos{h.inode, h.first})
	if d.nodes[0].ref.High.Less(end) || len(d.dropped) > 0 && d.dropped[0].Pos().Less(end) {
		return false
	}
	d.nodes[0].body.adopt(h)
	return true
}

func (d *dealer) one(x Extent) {
	d.to(x.Pos())
	if x.flags&flagLate != 0 {
		x.flags = x.flags&^flagLate | flagOpen
	} else {
		left := len(d.dropped) > 0 && !x.Pos().Less(d.dropped[0].Pos())
		if left && x.hold == 0 {
			return
		}
		x.flags &^= flagOpen
		if !left {
			x.hold = 0 // it had passed when the copy was made
		}
	}
	for {
		n := d.nodes[0]
		end := n.ref.High
		if end.Inode != x.Inode || x.End() <= end.Sector {
			n.body.push(&d.t.mem, &x)
			return
		}
		front := x.clip(x.Start, end.Sector) // it came since the copy, without regard to the pivot
		n.body.push(&d.t.mem, &front)
		x = x.clip(end.Sector, x.End())
		d.nodes = d.nodes[1:]
	}
}

// moveChildren deals the children of the old nodes out to the new ones. All of their keys are in the copies.
func (r *Rewrite) moveChildren(nodes []*Node) {
	to := 0
	for _, n := range r.victims {
		for i := range n.kids {
			k := n.kids[i]
			for nodes[to].ref.High.Less(k.pos()) {
				to++
			}
			nodes[to].kids = append(nodes[to].kids, k)
			if k.node != nil {
				nodes[to].cached++
				k.node.listed = false
			}
		}
		// What an append would have freed is freed when the copies are linked, all at once.
		for i := range n.pend {
			if k := &n.pend[i]; k.IsFreeing() {
				nodes[0].link.freed = append(nodes[0].link.freed, freedBy(k))
			}
		}
		nodes[0].link.freed = append(nodes[0].link.freed, n.link.freed...)
	}
	if last := nodes[len(nodes)-1]; len(last.kids) == 0 || last.kids[len(last.kids)-1].pos() != last.ref.High {
		panic(fmt.Sprintf("btree: the children of %v do not reach to its end", last.ref))
	}
}
