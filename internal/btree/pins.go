package btree

// pins are the oldest journal entries that keys of a node need which are not on the disk, 0 where none does.
type pins struct {
	open   uint64 // keys that no append has taken
	flight uint64 // keys of the append in flight
	late   uint64 // keys that the copy of the rewrite under way lacks, though an append may have taken them

	oldest uint64 // as the heap knows it
	at     int    // place in the heap, plus one
}

func oldest(list ...uint64) uint64 {
	var m uint64
	for _, s := range list {
		if s != 0 && (m == 0 || s < m) {
			m = s
		}
	}
	return m
}

// A pinHeap has the nodes that pin journal entries, the oldest on top.
type pinHeap []*Node

// update puts the node where its pins want it.
func (h *pinHeap) update(n *Node) {
	want := oldest(n.pins.open, n.pins.flight, n.pins.late, n.link.pin)
	if want == n.pins.oldest {
		return
	}
	n.pins.oldest = want
	switch {
	case want == 0:
		h.remove(n)
	case n.pins.at == 0:
		*h = append(*h, n)
		n.pins.at = len(*h)
		h.up(n.pins.at)
	default:
		h.down(h.up(n.pins.at))
	}
}

func (h *pinHeap) remove(n *Node) {
	at := n.pins.at
	if at == 0 {
		return
	}
	last := (*h)[len(*h)-1]
	(*h)[len(*h)-1] = nil
	*h = (*h)[:len(*h)-1]
	n.pins.at = 0
	if last != n {
		(*h)[at-1], last.pins.at = last, at
		h.down(h.up(at))
	}
}

// up and down take and return places counted from one.
func (h pinHeap) up(i int) int {
	for i > 1 && h.less(i, i/2) {
		h.swap(i, i/2)
		i /= 2
	}
	return i
}

func (h pinHeap) down(i int) int {
	for {
		c := 2 * i
		if c > len(h) {
			return i
		}
		if c < len(h) && h.less(c+1, c) {
			c++
		}
		if !h.less(c, i) {
			return i
		}
		h.swap(i, c)
		i = c
	}
}

func (h pinHeap) less(i, j int) bool { return h[i-1].pins.oldest < h[j-1].pins.oldest }

func (h pinHeap) swap(i, j int) {
	h[i-1], h[j-1] = h[j-1], h[i-1]
	h[i-1].pins.at, h[j-1].pins.at = i, j
}

// OldestPin returns the oldest journal entry that the tree needs and the node that needs it; 0 and nil where
// none does. An entry of the journal may name it as its last_seq, if it names none older for other reasons.
func (t *Tree) OldestPin() (uint64, *Node) {
	if len(t.pinned) == 0 {
		return 0, nil
	}
	return t.pinned[0].pins.oldest, t.pinned[0]
}

// DropPins lets go of what nodes that were just installed have taken over from those that they replaced: against M1,
// for tests.
func (t *Tree) DropPins(nodes []*Node) {
	for _, n := range nodes {
		n.link.pin = 0
		t.pinned.update(n)
	}
}

// OldestPin returns the oldest journal entry that the node needs, 0 where it needs none. An append is enough to
// let go of it, unless the node is not linked yet: then what refers to it must become durable, too.
func (n *Node) OldestPin() uint64 { return n.pins.oldest }

// EachPinned calls fn with every node that needs a journal entry, in no order, until fn returns false.
func (t *Tree) EachPinned(fn func(n *Node) bool) {
	for _, n := range t.pinned {
		if !fn(n) {
			return
		}
	}
}
