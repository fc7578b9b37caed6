package bucket

// Discards tell the device that it need not keep what is in a bucket. One is as good as a write of anything, so it takes
// what a write takes, and more: it goes to buckets that nobody has asked for.
//
// Only buckets of tier emptyFree are discarded: data, no live sectors, nobody holds them, and no pointer to them is left, of
// this generation or an older one, in a leaf on the disk or in a needed journal entry. So they are V1's, and none of:
//
//	journal, superblock, prio sets, nodes, uuid array   are no data; what was freed is data when its gate has opened (V5)
//	open buckets, keys in flight, buckets being read    are pinned
//	in a batch, ready, handed out                       are no longer Empty
//	emptied, or evicted, within the journal window      windowBit
//	emptied without a journal entry, or with a trace    residueBit: a leaf on the disk may have a pointer that is good
//
// Order: the generation is raised, in memory alone, since nothing on the disk has the old one: so a read that is under way
// takes notice; the bucket is pinned, so that no batch picks it; it is discarded; the pin goes. What is written there later
// is written, and flushed, behind the discard.
type discards struct {
	index bitset   // what may be discarded, and was not since it was written
	done  []uint64 // a bit for each bucket: it was discarded since it was written
	hand  uint32
	busy  int // buckets that are being discarded
}

func newDiscards(n uint32) discards {
	return discards{index: newBitset(n), done: make([]uint64, (uint64(n)+63)/64)}
}

func (d *discards) isDone(b uint32) bool { return d.done[b>>6]>>(b&63)&1 != 0 }

// written says that a bucket is handed out.
func (d *discards) written(b uint32) { d.done[b>>6] &^= 1 << (b & 63) }

// discardable reports whether buckets of a tier may be discarded.
func (t *Table) discardable(tr tier) bool {
	return tr == emptyFree || t.broken&BreakDiscard != 0 && tr == emptyLow
}

// retier keeps the index of what may be discarded when a bucket goes from one tier to another.
func (t *Table) retier(b uint32, from, to tier) {
	d := &t.discard
	if t.discardable(from) && d.index.has(b) {
		d.index.remove(b)
	}
	if t.discardable(to) && !d.isDone(b) {
		d.index.add(b)
	}
}

// DiscardBegin takes up to most buckets that lie next to each other and are to be discarded: from first on, n of them.
// There are none where all are discarded, and where so many less would be felt: what is ready is low, a batch would find
// fewer than it wants, or dirty data would be refused. DiscardEnd gives them back.
func (t *Table) DiscardBegin(most int) (first uint32, n int) {
	d := &t.discard
	if d.index.count == 0 {
		return 0, 0
	}
	few := 2*t.pools[poolCommon].n < t.opt.Ready*t.supply.times || t.Pickable()-most < t.Wanted()+t.opt.Batch
	low := t.unused()-most <= t.spare() || t.reusable()-most <= t.spare()+int(t.geo.KernelFreeInc)
	if (few || low) && t.broken == 0 {
		return 0, 0
	}
	first, _, _ = d.index.around(d.hand)
	t.start = false
	for ; n < most && uint64(first)+uint64(n) < uint64(len(t.entries)) && d.index.has(first+uint32(n)); n++ {
		b := first + uint32(n)
		w, s := t.get(b)
		w, s = t.raise(b, w, s, false)
		t.set(b, w.withPins(1), s)
	}
	d.hand = first + uint32(n)
	d.busy += n
	return first, n
}

// DiscardEnd says that the device is through with buckets that DiscardBegin gave, successfully or not: they are empty
// again, and not discarded once more before they have been written.
func (t *Table) DiscardEnd(first uint32, n int) {
	t.discard.busy -= n
	for b := first; b < first+uint32(n); b++ {
		t.discard.done[b>>6] |= 1 << (b & 63)
		t.Unpin(b)
	}
}

// Discardable returns how many buckets are to be discarded.
func (t *Table) Discardable() int { return t.discard.index.count }
