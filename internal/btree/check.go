package btree

import (
	"errors"
	"fmt"
)

// Check walks everything in memory and returns what is wrong with it: not what the disk says, but what the tree
// must hold to at any time. It is for tests and for builds that check their invariants: it looks at every entry.
func (t *Tree) Check() error {
	var errs []error
	bad := func(n *Node, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%v: %s", n.ref, fmt.Sprintf(format, args...)))
	}
	size, pinned, seen := 0, 0, 0
	refs := make([]int, len(t.mem.holds.list))
	var walk func(n *Node)
	walk = func(n *Node) {
		seen++
		size += n.bytes()
		if n.slot >= len(t.nodes) || t.nodes[n.slot] != n {
			bad(n, "is not in its slot")
		}
		if n.gone || n.used > n.blocks {
			bad(n, "gone %v, %d of %d blocks used", n.gone, n.used, n.blocks)
		}
		if want := oldest(n.pins.open, n.pins.flight, n.pins.late, n.link.pin); n.pins.oldest != want || want != 0 != (n.pins.at > 0) {
			bad(n, "pins %d, the heap has %d at %d", want, n.pins.oldest, n.pins.at)
		}
		if n.pins.at > 0 {
			pinned++
			if t.pinned[n.pins.at-1] != n || n.pins.at > 1 && t.pinned.less(n.pins.at, n.pins.at/2) {
				bad(n, "is not where the heap should have it")
			}
		}
		if n.ref.Level == 0 {
			if err := n.body.check(n.ref.Low, n.ref.High, n.rewrite != nil, refs); err != nil {
				bad(n, "%v", err)
			}
			return
		}
		cached, last := 0, n.ref.Low
		for i := range n.kids {
			k := &n.kids[i]
			if !last.Less(k.pos()) {
				bad(n, "child %d ends at %v, the one before it at %v", i, k.pos(), last)
			}
			last = k.pos()
			if k.node == nil {
				continue
			}
			cached++
			if r := n.childRef(i); k.node.ref != r {
				bad(n, "child %d is %v, and takes itself for %v", i, r, k.node.ref)
				continue
			}
			walk(k.node)
		}
		if last != n.ref.High || cached != n.cached {
			bad(n, "children end at %v; %d are in memory, %d are counted", last, cached, n.cached)
		}
	}
	if t.rootNode != nil {
		if t.rootNode.ref != t.root {
			bad(t.rootNode, "the root should be %v", t.root)
		}
		walk(t.rootNode)
	}
	if size != t.size || seen != len(t.nodes) || pinned != len(t.pinned) {
		errs = append(errs, fmt.Errorf("%d bytes in %d nodes, %d pinned; counted are %d, %d, %d", size, seen, pinned, t.size, len(t.nodes), len(t.pinned)))
	}
	for i, n := range refs {
		if h := &t.mem.holds.list[i]; n != h.refs {
			errs = append(errs, fmt.Errorf("hold %d has %d entries, counted are %d", i+1, n, h.refs))
		}
	}
	return errors.Join(errs...)
}

// check looks at the entries of a leaf, and adds up those of each hold in refs.
func (b *body) check(low, high Pos, rewritten bool, refs []int) error {
	var sum body
	last := low
	for c := range b.chunks {
		h := &b.chunks[c]
		sum.slots += cap(h.e)
		if len(h.e) == 0 || len(h.e) > chunkMax || cap(h.e)%chunkStep != 0 || h.first != h.start(0) {
			return fmt.Errorf("chunk %d has %d entries, room for %d, and begins at %d, not %d", c, len(h.e), cap(h.e), h.first, h.start(0))
		}
		for i := range h.e {
			x := h.at(i)
			end := Pos{x.Inode, x.End()}
			if x.Size == 0 || x.Pos().Less(last) || high.Less(end) {
				return fmt.Errorf("%v is not in its place: the one before ends at %v", x, last)
			}
			last = end
			if !x.HasPtr() && (x.Ptr != 0 || x.Dirty() || x.hold != 0) || x.Dirty() && x.hold != 0 || x.flags&flagLate != 0 && !rewritten {
				return fmt.Errorf("%v has flags %x, hold %d", x, x.flags, x.hold)
			}
			sum.n++
			sum.words += x.words()
			if x.flags&flagOpen != 0 {
				sum.open += x.words()
			}
			if x.hold != 0 {
				sum.held++
				refs[x.hold-1]++
			}
		}
	}
	if sum.n != b.n || sum.words != b.words || sum.open != b.open || sum.held != b.held || sum.slots != b.slots {
		return fmt.Errorf("%d entries, %d words, %d open, %d held, %d slots; counted are %d, %d, %d, %d, %d",
			sum.n, sum.words, sum.open, sum.held, sum.slots, b.n, b.words, b.open, b.held, b.slots)
	}
	return nil
}
