package btree

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Write is one write to the cache device. Those of a list are made in order, each after the one before it is
// done.
type Write struct {
	Off   int64  // bytes
	Data  []byte // part of what was encoded
	Flush bool   // flush the device's cache first: what was written before must be durable before this is
	FUA   bool   // durable when done
}

// An Append is a set of keys on its way to the end of a node. It is frozen: the node goes on changing while the
// append is encoded and written. There is one at a time for a node.
type Append struct {
	node  *Node
	ref   Ref
	block uint32 // of the node where the set begins
	seq   uint64
	magic uint64
	size  int // of a block, in bytes
	keys  []byte
}

// Node returns the node that is appended to.
func (a *Append) Node() *Node { return a.node }

// Bytes returns how long the append is, in whole blocks.
func (a *Append) Bytes() int {
	return (ondisk.BSetHeaderBytes + len(a.keys) + a.size - 1) / a.size * a.size
}

// Encode makes the append's bytes in b, which is Bytes long, and returns how to write them. atomic is what the
// device writes whole or not at all, in bytes: its logical block.
//
// A set longer than that is written back to front: first all but the beginning, then, behind a flush, the
// beginning, which has the number by which a reader knows that the node goes on. So a node is never torn. The
// flush also covers the data that the keys point to; where a write without a flush has Flush set, the caller may
// leave it out if a journal entry has made that data durable. It needs no lock. Source: F 5.10.
func (a *Append) Encode(b []byte, atomic int) []Write {
	b = b[:a.Bytes()]
	n := ondisk.EncodeBSet(b, a.magic, a.seq, a.ref.Ptr, a.keys)
	clear(b[n:])
	off := int64(a.ref.Ptr.Sector())*ondisk.SectorSize + int64(a.block)*int64(a.size)
	if n <= atomic {
		return []Write{{Off: off, Data: b, Flush: a.ref.Level == 0, FUA: true}}
	}
	return []Write{
		{Off: off + int64(atomic), Data: b[atomic:]},
		{Off: off, Data: b[:atomic], Flush: true, FUA: true},
	}
}

// Freeze takes what a node has got since its last append: the extents that are open, and those whose hold has
// passed. The caller encodes and writes it, and calls Finish. Outcomes: Done, Nothing, Busy while an append is in
// flight, NeedsRewrite where it does not fit, Gone.
//
// The node's journal pins stay until Finish.
func (t *Tree) Freeze(n *Node) (*Append, Outcome) {
	switch {
	case n.gone:
		return nil, Gone
	case n.writing || n.rewrite != nil && n.ref.Level > 0:
		return nil, Busy
	}
	before := n.bytes()
	var keys []byte
	if n.ref.Level > 0 {
		if len(n.pend) == 0 {
			return nil, Nothing
		}
		if !n.roomFor(t.g, 3*len(n.pend)) {
			return nil, NeedsRewrite
		}
		sortKeys(n.pend)
		for i := range n.pend {
			keys = ondisk.AppendKey(keys, &n.pend[i])
		}
		n.pend, n.flight = n.flight[:0], n.pend
	} else {
		words := t.openWords(n)
		if words == 0 {
			return nil, Nothing
		}
		if !n.roomFor(t.g, words) {
			return nil, NeedsRewrite
		}
		keys = t.takeOpen(n, make([]byte, 0, 8*words))
		n.pins.flight, n.pins.open = n.pins.open, 0
		t.pinned.update(n)
	}
	a := &Append{node: n, ref: n.ref, block: n.used, seq: n.seq, magic: t.g.BSetMagic(), size: t.g.BlockBytes(), keys: keys}
	n.used += uint32(a.Bytes() / a.size)
	n.sets++
	n.writing = true
	t.size += n.bytes() - before
	return a, Done
}

// openWords returns the words of the set that takeOpen makes.
func (t *Tree) openWords(n *Node) (words int) {
	if n.body.held == 0 {
		return n.body.open
	}
	t.eachOpen(n, func(_ cursor, x *Extent) { words += x.words() })
	return words
}

// eachOpen calls fn with what an append has to say: as it goes to the disk, with the hold and without the
// pointer where that must wait.
func (t *Tree) eachOpen(n *Node, fn func(k cursor, x *Extent)) {
	b := &n.body
	var x Extent // one for all: fn makes it escape
	for c := range b.chunks {
		for i, e := range b.chunks[c].e {
			if e.a&flagOpen == 0 && (e.hold() == 0 || t.mem.holds.blocks(e.hold())) {
				continue
			}
			x = b.chunks[c].at(i)
			if t.mem.holds.blocks(x.hold) {
				x.Ptr, x.flags = 0, x.flags&^flagPtr
			} else {
				x.hold = 0
			}
			fn(cursor{c, i}, &x)
		}
	}
}

// takeOpen appends the keys of the open set to b; they are no longer open.
func (t *Tree) takeOpen(n *Node, b []byte) []byte {
	t.eachOpen(n, func(k cursor, x *Extent) {
		b = appendExtent(b, x)
		now := n.body.at(k)
		now.flags &^= flagOpen
		if now.hold != x.hold && n.rewrite != nil && x.Pos().Less(n.rewrite.at) {
			now.flags |= flagLate // the copy has been taken without it
		}
		now.hold = x.hold
		n.body.set(&t.mem, k, &now)
	})
	return b
}

// appendExtent appends the words of the extent's key.
func appendExtent(b []byte, x *Extent) []byte {
	const header = uint64(1) << 63
	high := header | uint64(x.flags&flagPtr)<<60 | uint64(x.flags&flagDirty)<<35 | uint64(x.Size)<<20 | uint64(x.Inode)
	b = binary.LittleEndian.AppendUint64(b, high)
	b = binary.LittleEndian.AppendUint64(b, x.End())
	if x.flags&flagPtr != 0 {
		b = binary.LittleEndian.AppendUint64(b, uint64(x.Ptr))
	}
	return b
}

// Finish says that the writes of an append are done: its keys are durable. It returns the nodes whose buckets
// are free now, if the append was what replaced them, appended to freed: nothing on the disk needs them any
// more. A write that failed is made again, with the same bytes, or the set stops.
func (t *Tree) Finish(a *Append, freed []Ref) []Ref {
	n := a.node
	if !n.writing {
		panic("btree: an append is finished twice")
	}
	n.writing = false
	if n.ref.Level == 0 {
		if !n.linked { // the node is of no use to a reader yet
			n.link.pin = oldest(n.link.pin, n.pins.flight)
		}
		n.pins.flight = 0
		t.pinned.update(n)
		return freed
	}
	before := n.bytes()
	for i := range n.flight {
		k := &n.flight[i]
		if k.IsFreeing() {
			n.link.freed = append(n.link.freed, freedBy(k))
			continue
		}
		at := n.find(Pos{k.Inode(), k.End() - 1})
		kid := n.kids[at].node
		if kid == nil || kid.ref.Ptr != k.P[0] {
			panic(fmt.Sprintf("btree: child %v was replaced before it was linked", k))
		}
		kid.listed = false
		if n.linked {
			freed = t.becomeLinked(kid, freed)
		}
	}
	n.flight = n.flight[:0]
	if n.linked {
		freed = n.takeFreed(freed)
	}
	t.size += n.bytes() - before
	return freed
}

// RootDurable says that a journal entry that names root is durable. It returns the nodes whose buckets are free
// now, as Finish does.
func (t *Tree) RootDurable(root Ref, freed []Ref) []Ref {
	if t.rootNode == nil || t.root.Ptr != root.Ptr || t.rootNode.linked {
		return freed
	}
	return t.becomeLinked(t.rootNode, freed)
}

// becomeLinked says that the key that refers to n, and all that leads to it, is durable.
func (t *Tree) becomeLinked(n *Node, freed []Ref) []Ref {
	n.linked = true
	n.link.pin, n.link.stale = 0, nil
	t.pinned.update(n)
	freed = n.takeFreed(freed)
	for i := range n.kids {
		if kid := n.kids[i].node; kid != nil && !kid.linked && !kid.listed {
			freed = t.becomeLinked(kid, freed)
		}
	}
	return freed
}

// takeFreed moves what the node's link was waited for with.
func (n *Node) takeFreed(freed []Ref) []Ref {
	freed = append(freed, n.link.freed...)
	n.link.freed = nil
	return freed
}

// freeingKey returns the key that says a node is gone: its bucket's generation is one ahead of the pointer to
// it. Source: F 5.6.
func freeingKey(r *Ref) ondisk.Key {
	return ondisk.NewChild(0, 0, r.Sectors, ondisk.MakePtr(r.Ptr.Gen()+1, r.Ptr.Sector(), r.Ptr.Dev()))
}

// freedBy returns what a freeing key frees; Low, High and Level are not known.
func freedBy(k *ondisk.Key) Ref {
	p := k.P[0]
	return Ref{Sectors: k.Size(), Ptr: ondisk.MakePtr(p.Gen()-1, p.Sector(), p.Dev())}
}

// sortKeys sorts the keys of an interior node by position; those of one position keep their order.
func sortKeys(list []ondisk.Key) {
	slices.SortStableFunc(list, func(a, b ondisk.Key) int { return a.ComparePos(&b) })
}
