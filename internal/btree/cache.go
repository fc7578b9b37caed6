package btree

// Bytes returns the memory that the nodes take.
func (t *Tree) Bytes() int { return t.size }

// Nodes returns how many nodes are in memory.
func (t *Tree) Nodes() int { return len(t.nodes) }

// admit makes a node part of what is in memory.
func (t *Tree) admit(n *Node) {
	n.slot = len(t.nodes)
	t.nodes = append(t.nodes, n)
	t.size += n.bytes()
}

// drop takes a node out of what is in memory, and its memory back. Its children are not looked at.
func (t *Tree) drop(n *Node) {
	t.size -= n.bytes()
	last := t.nodes[len(t.nodes)-1]
	t.nodes[n.slot], last.slot = last, n.slot
	t.nodes[len(t.nodes)-1] = nil
	t.nodes = t.nodes[:len(t.nodes)-1]
	t.pinned.remove(n)
	n.body.clear(&t.mem)
	n.kids, n.pend, n.flight, n.dead, n.link = nil, nil, nil, nil, link{}
	n.gone = true
}

// evictable reports whether a node can be read again as it is.
func (t *Tree) evictable(n *Node) bool {
	return n != t.rootNode && n.linked && !n.listed && !n.Busy() && !n.Dirty() && n.cached == 0 && n.pins.oldest == 0
}

// Evict lets go of nodes until all together take at most limit bytes: those that were not used since the hand
// of the clock came by, have nothing to write, and no child in memory. What is left of one is the reference in
// its parent. It looks at no more than steps nodes, at none of them twice, so that one that was attached just before stays
// until the next call, however low the limit: else who had it read might never find it. It returns whether the limit holds.
func (t *Tree) Evict(limit, steps int) bool {
	steps = min(steps, len(t.nodes))
	for ; t.size > limit && steps > 0 && len(t.nodes) > 0; steps-- {
		if t.hand >= len(t.nodes) {
			t.hand = 0
		}
		n := t.nodes[t.hand]
		if n.hot.Load() || !t.evictable(n) {
			n.hot.Store(false)
			t.hand++
			continue
		}
		p, i := t.parent(n)
		p.kids[i].node = nil
		p.cached--
		t.drop(n) // another one is in its place now
	}
	return t.size <= limit
}
