package btree

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// Parse makes a node of its bytes as read, the whole of its sectors, which it does not keep. ref says which node
// was asked for. It needs no lock.
//
// An error matches ondisk.ErrCorrupt: what a kernel would refuse the node for (F 5.3), or a key that breaks the
// format or lies outside of the node. If the node is not nil all the same, the last of its sets is bad in a way
// that a torn write explains, and the node is what it was before that write: whether it may be used, only the
// journal can tell (F 5.3, the table). It takes no append then.
//
// Before an interior node is attached its pointers must have raised the generations of their buckets: see
// EachRef. Sources: F 5.3, 5.5.
func Parse(g *ondisk.Geometry, ref Ref, b []byte) (*Node, error) {
	if len(b) != int(ref.Sectors)*ondisk.SectorSize {
		panic(fmt.Sprintf("btree: %d bytes for a node of %d sectors", len(b), ref.Sectors))
	}
	key := ref.Key()
	d := ondisk.DecodeNode(b, g, &key)
	if d.Err != nil && !d.Torn {
		return nil, d.Err
	}
	n := &Node{ref: ref, seq: d.Seq, used: d.Used, blocks: ref.Sectors / g.BlockSectors, sets: uint32(len(d.Sets)), linked: true, full: d.Err != nil}
	var err error
	if ref.Level > 0 {
		err = n.parseInterior(g, d)
	} else {
		err = n.parseLeaf(g, d)
	}
	if err != nil {
		return nil, err
	}
	return n, d.Err
}

func (n *Node) corrupt(s *ondisk.BSet, k ondisk.Key, reason string, args ...any) error {
	return &ondisk.CorruptError{
		Structure: "bset", Sector: int64(n.ref.Ptr.Sector()) + int64(s.Block)*int64(n.ref.Sectors/n.blocks), Field: "key",
		Reason: fmt.Sprintf("%v, in the %v: ", k, n.ref) + fmt.Sprintf(reason, args...),
	}
}

func (n *Node) parseInterior(g *ondisk.Geometry, d *ondisk.Node) error {
	for i := range d.Sets {
		s := &d.Sets[i]
		var last Pos
		for b := s.Data; len(b) > 0; {
			k, size, err := ondisk.DecodeKey(b)
			if err != nil {
				return err
			}
			b = b[size:]
			p := Pos{k.Inode(), k.End()}
			switch f := g.NodeFault(&k); {
			case f != ondisk.FaultNone:
				return n.corrupt(s, k, "%v", f)
			case !k.P[0].Available() || g.Remainder(k.P[0].Sector()) != 0:
				return n.corrupt(s, k, "no child is there")
			case k.IsFreeing():
			case p.Less(last) || !n.ref.Low.Less(p) || n.ref.High.Less(p):
				return n.corrupt(s, k, "is not where it belongs")
			default:
				last = p
			}
			n.all = append(n.all, k)
		}
	}
	return nil
}

func (n *Node) parseLeaf(g *ondisk.Geometry, d *ondisk.Node) error {
	var m memory
	inexact := false // words on the disk are more than those of the entries
	for i := range d.Sets {
		s := &d.Sets[i]
		var last Pos
		for b := s.Data; len(b) > 0; {
			k, size, err := ondisk.DecodeKey(b)
			if err != nil {
				return err
			}
			b = b[size:]
			if k.Size() == 0 {
				continue
			}
			if f := g.LeafFault(&k); f != ondisk.FaultNone {
				return n.corrupt(s, k, "%v", f)
			}
			x := extentOf(&k)
			inexact = inexact || x.words() != k.Words()
			end := Pos{x.Inode, x.End()}
			if x.Pos().Less(last) || x.Pos().Less(n.ref.Low) || n.ref.High.Less(end) {
				return n.corrupt(s, k, "is not where it belongs")
			}
			last = end
			if i == 0 {
				n.body.push(&m, &x)
			} else {
				n.overlay(&m, x)
			}
		}
	}
	if c := len(n.body.chunks); c > 0 {
		n.body.grow(&m, c-1, len(n.body.chunks[c-1].e))
	}
	// An append must not put its header behind blocks that the keys before it, merged, do not fit in.
	if inexact || blocksOf(g, n.body.words) > int(n.used) && n.body.n > 0 {
		n.full = true
	}
	return nil
}

// overlay lays x over what the sets before it say.
func (n *Node) overlay(m *memory, x Extent) {
	b := &n.body
	from := b.seek(x.Inode, x.Start)
	to := from
	var list [3]Extent
	in := 0
	var right Extent
	for to.c < len(b.chunks) {
		o := b.at(to)
		if o.Inode != x.Inode || o.Start >= x.End() {
			break
		}
		if o.Start < x.Start {
			list[0], in = o.clip(o.Start, x.Start), 1
		}
		if o.End() > x.End() {
			right = o.clip(x.End(), o.End())
		}
		to = b.next(to)
	}
	list[in], in = x, in+1
	if right.Size > 0 {
		list[in], in = right, in+1
	}
	b.splice(m, from, to, list[:in])
}

// EachRef calls fn with every pointer of an interior node that was parsed and is not attached yet, the freeing
// keys' too: each raises the generation of its bucket where it is newer. Source: F 5.6.
func (n *Node) EachRef(fn func(p ondisk.Ptr)) {
	for i := range n.all {
		fn(n.all[i].P[0])
	}
}

// EachChild calls fn with the references to the children of an interior node, in order, those in memory too.
func (n *Node) EachChild(fn func(r Ref)) {
	for i := range n.kids {
		fn(n.childRef(i))
	}
}

// EachExtent calls fn with the extents of a leaf, in order, those without pointer too.
func (n *Node) EachExtent(fn func(x *Extent)) {
	for c := range n.body.chunks {
		for i := range n.body.chunks[c].e {
			x := n.body.chunks[c].at(i)
			fn(&x)
		}
	}
}

// resolve makes children of the keys that are live and remembers the pointers that are not.
func (n *Node) resolve(g *ondisk.Geometry, gens Gens) error {
	live := n.all[:0]
	for i := range n.all {
		k := &n.all[i]
		p := k.P[0]
		switch {
		case ondisk.GenAfter(gens(g.Bucket(p.Sector())), p.Gen()) != 0:
			n.dead = append(n.dead, p)
		case !k.IsFreeing():
			live = append(live, *k)
		}
	}
	n.all = nil
	sortKeys(live)
	n.kids = make([]child, len(live))
	for i := range live {
		k := &live[i]
		if i > 0 && k.ComparePos(&live[i-1]) == 0 {
			return fmt.Errorf("%v: %w: children %v and %v have one position, and both are live", n.ref, ondisk.ErrCorrupt, &live[i-1], k)
		}
		n.kids[i] = child{end: k.End(), ptr: k.P[0], inode: k.Inode(), sectors: k.Size()}
	}
	if len(live) == 0 || n.kids[len(live)-1].pos() != n.ref.High {
		return fmt.Errorf("%v: %w: its %d live children do not reach to its end", n.ref, ondisk.ErrCorrupt, len(live))
	}
	return nil
}

// Attach makes a node that Parse returned part of the tree in memory. Gone says that the tree has no place for
// it: it is there already, or was replaced since, and the caller may look again. An error says that the children
// of an interior node are not what they have to be; it matches ondisk.ErrCorrupt.
func (t *Tree) Attach(n *Node) (Outcome, error) {
	var p *Node
	i := 0
	if n.ref.Level == t.root.Level {
		if t.rootNode != nil || n.ref.Ptr != t.root.Ptr {
			return Gone, nil
		}
	} else {
		if n.ref.Level > t.root.Level {
			return Gone, nil
		}
		if p, _ = t.descend(n.ref.Level+1, n.ref.Low); p == nil {
			return Gone, nil
		}
		i = p.find(n.ref.Low)
		if p.kids[i].node != nil || p.childRef(i) != n.ref {
			return Gone, nil
		}
	}
	if n.ref.Level > 0 {
		if err := n.resolve(t.g, t.gens); err != nil {
			return Gone, err
		}
	}
	n.hot.Store(true)
	t.admit(n)
	if p == nil {
		t.rootNode = n
		return Done, nil
	}
	p.kids[i].node = n
	p.cached++
	return Done, nil
}
