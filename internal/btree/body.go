package btree

import (
	"slices"
	"unsafe"
)

// chunkMax is how many entries a chunk has at most, chunkStep in which steps its memory grows.
const (
	chunkMax  = 128
	chunkStep = 16
)

// A chunk is a sorted run of entries of one inode.
type chunk struct {
	e     []entry
	first uint64 // where e[0] begins
	base  uint64 // the entries' starts count from here; not above first
	inode uint32
}

func (h *chunk) start(i int) uint64 { return h.base + h.e[i].delta() }

func (h *chunk) at(i int) Extent {
	e := h.e[i]
	return Extent{
		Start: h.base + e.delta(), Ptr: entryPtr(e), Inode: h.inode,
		Size: uint16(e.size()), hold: e.hold(), flags: uint8(e.a & flagMask),
	}
}

// fits reports whether the chunk can take an entry that begins at start, or could with another base.
func (h *chunk) fits(inode uint32, start uint64) bool {
	if inode != h.inode {
		return false
	}
	if start >= h.base {
		return start-h.base <= maxDelta
	}
	return h.start(len(h.e)-1)-start <= maxDelta
}

// rebase makes the entries count from base, which lies below all of them.
func (h *chunk) rebase(base uint64) {
	d := (h.base - base) << deltaShift
	for i := range h.e {
		h.e[i].a += d
	}
	h.base = base
}

// A body holds the entries of a leaf: sorted, without overlap, cut up into chunks so that an insertion moves
// little. What it says of itself is always exact.
type body struct {
	chunks []chunk
	n      int // entries
	words  int // of their keys
	open   int // words of the keys that no append has taken
	held   int // entries with a hold
	slots  int // entries that there is memory for
}

// A cursor is a place in a body: before an entry, or at the end, {len(chunks), 0}. i is less than the length of
// its chunk.
type cursor struct{ c, i int }

// bytes returns the memory that the body takes.
func (b *body) bytes() int {
	return b.slots*int(unsafe.Sizeof(entry{})) + cap(b.chunks)*int(unsafe.Sizeof(chunk{}))
}

// next returns the cursor of the entry after that at k.
func (b *body) next(k cursor) cursor {
	if k.i+1 < len(b.chunks[k.c].e) {
		return cursor{k.c, k.i + 1}
	}
	return cursor{k.c + 1, 0}
}

// prev returns the cursor of the entry before k; ok is false where there is none.
func (b *body) prev(k cursor) (_ cursor, ok bool) {
	switch {
	case k.i > 0:
		return cursor{k.c, k.i - 1}, true
	case k.c > 0:
		return cursor{k.c - 1, len(b.chunks[k.c-1].e) - 1}, true
	}
	return k, false
}

// at returns the entry at k.
func (b *body) at(k cursor) Extent { return b.chunks[k.c].at(k.i) }

// seek returns the cursor of the first entry that ends after sector s of the inode, or lies in a later inode.
func (b *body) seek(inode uint32, s uint64) cursor {
	lo, hi := 0, len(b.chunks) // the first chunk that begins after s is in [lo, hi]
	for lo < hi {
		m := int(uint(lo+hi) >> 1)
		if h := &b.chunks[m]; h.inode < inode || h.inode == inode && h.first <= s {
			lo = m + 1
		} else {
			hi = m
		}
	}
	c := lo - 1
	if c < 0 {
		return cursor{0, 0}
	}
	h := &b.chunks[c]
	if h.inode != inode {
		return cursor{c + 1, 0}
	}
	i := len(h.e)
	if d := s - h.base; d < maxDelta {
		bound := (d + 1) << deltaShift
		lo, hi = 1, len(h.e) // e[0] begins at s or before
		for lo < hi {
			m := int(uint(lo+hi) >> 1)
			if h.e[m].a < bound {
				lo = m + 1
			} else {
				hi = m
			}
		}
		i = lo
	}
	if last := h.e[i-1]; h.base+last.delta()+last.size() > s {
		return cursor{c, i - 1}
	}
	if i == len(h.e) {
		return cursor{c + 1, 0}
	}
	return cursor{c, i}
}

// count adds an entry to the sums, or with sign -1 takes it off.
func (b *body) count(m *memory, x *Extent, sign int) {
	w := sign * x.words()
	b.n += sign
	b.words += w
	if x.flags&flagOpen != 0 {
		b.open += w
	}
	if x.hold != 0 {
		b.held += sign
		m.holds.ref(x.hold, sign)
	}
}

// splice puts list, sorted, in the place of the entries in [from, to), the first n in order. All is of one inode.
func (b *body) splice(m *memory, from, to cursor, list []Extent) {
	removed := 0
	for k := from; k != to; k = b.next(k) {
		x := b.at(k)
		b.count(m, &x, -1)
		removed++
	}
	for i := range list {
		b.count(m, &list[i], 1)
	}
	// What can take an old entry's place does.
	k, in := from, 0
	for ; in < min(removed, len(list)); in++ {
		h := &b.chunks[k.c]
		x := &list[in]
		if x.Start < h.base || !h.fits(x.Inode, x.Start) {
			break
		}
		h.e[k.i] = pack(x, h.base)
		if k.i == 0 {
			h.first = x.Start
		}
		k = b.next(k)
	}
	if removed -= in; removed > 0 {
		k = b.remove(m, k, removed)
	}
	for ; in < len(list); in++ {
		k = b.next(b.insert(m, k, &list[in]))
	}
}

// remove takes n entries from k on out and returns the cursor of what comes behind them.
func (b *body) remove(m *memory, k cursor, n int) cursor {
	if k.i > 0 { // the end of its chunk, or a part of it
		h := &b.chunks[k.c]
		in := min(n, len(h.e)-k.i)
		h.e = append(h.e[:k.i], h.e[k.i+in:]...)
		n -= in
		if k.i == len(h.e) {
			k = cursor{k.c + 1, 0}
		}
	}
	whole := k.c
	for n > 0 && n >= len(b.chunks[whole].e) {
		n -= len(b.chunks[whole].e)
		b.slots -= cap(b.chunks[whole].e)
		m.put(b.chunks[whole].e)
		whole++
	}
	if whole > k.c {
		b.chunks = slices.Delete(b.chunks, k.c, whole)
	}
	if n > 0 {
		h := &b.chunks[k.c]
		h.e = append(h.e[:0], h.e[n:]...)
		h.first = h.start(0)
	}
	return b.tidy(m, k)
}

// tidy gives memory back around k, where entries were removed: small neighbours become one chunk, and a chunk
// that has much room moves. It returns where k is then.
func (b *body) tidy(m *memory, k cursor) cursor {
	if k.c > 0 && k.c < len(b.chunks) {
		l, r := &b.chunks[k.c-1], &b.chunks[k.c]
		if n := len(l.e); n+len(r.e) <= chunkMax/2 && l.inode == r.inode && r.start(len(r.e)-1)-l.base <= maxDelta {
			b.grow(m, k.c-1, n+len(r.e))
			d := (r.base - l.base) << deltaShift // wraps where r counts from below l
			for _, e := range r.e {
				e.a += d
				l.e = append(l.e, e)
			}
			b.slots -= cap(r.e)
			m.put(r.e)
			b.chunks = slices.Delete(b.chunks, k.c, k.c+1)
			k = cursor{k.c - 1, n + k.i}
		}
	}
	for _, c := range [2]int{k.c - 1, k.c} {
		if c >= 0 && c < len(b.chunks) && len(b.chunks[c].e)+2*chunkStep < cap(b.chunks[c].e) {
			b.grow(m, c, len(b.chunks[c].e))
		}
	}
	return k
}

// grow moves the entries of chunk c into memory for n.
func (b *body) grow(m *memory, c, n int) {
	h := &b.chunks[c]
	if cap(h.e) >= n && cap(h.e) < n+2*chunkStep {
		return
	}
	e := append(m.get(n), h.e...)
	b.slots += cap(e) - cap(h.e)
	m.put(h.e)
	h.e = e
}

// insert puts x before k and returns where it is.
func (b *body) insert(m *memory, k cursor, x *Extent) cursor {
	if k.i == 0 && k.c > 0 { // between two chunks: rather the end of the one before
		if h := &b.chunks[k.c-1]; len(h.e) < chunkMax && h.fits(x.Inode, x.Start) {
			k = cursor{k.c - 1, len(h.e)}
		}
	}
	if k.c == len(b.chunks) || !b.chunks[k.c].fits(x.Inode, x.Start) || k.i == 0 && len(b.chunks[k.c].e) == chunkMax {
		if k.i > 0 {
			b.divide(m, k.c, k.i)
			k = cursor{k.c + 1, 0}
		}
		h := chunk{e: m.get(1), first: x.Start, base: x.Start, inode: x.Inode}
		h.e = append(h.e, pack(x, x.Start))
		b.slots += cap(h.e)
		b.chunks = slices.Insert(b.chunks, k.c, h)
		return cursor{k.c, 0}
	}
	if n := len(b.chunks[k.c].e); n == chunkMax {
		b.divide(m, k.c, n/2)
		if k.i > n/2 {
			k = cursor{k.c + 1, k.i - n/2}
		}
	} else if n == cap(b.chunks[k.c].e) {
		b.grow(m, k.c, n+1)
	}
	h := &b.chunks[k.c]
	if len(h.e) == cap(h.e) {
		b.grow(m, k.c, len(h.e)+1)
		h = &b.chunks[k.c]
	}
	if x.Start < h.base {
		h.rebase(x.Start)
	}
	h.e = h.e[:len(h.e)+1]
	copy(h.e[k.i+1:], h.e[k.i:])
	h.e[k.i] = pack(x, h.base)
	if k.i == 0 {
		h.first = x.Start
	}
	return k
}

// divide makes two chunks of chunk c; the second gets the entries from i on, 0 < i < len.
func (b *body) divide(m *memory, c, i int) {
	h := &b.chunks[c]
	r := chunk{e: append(m.get(len(h.e)-i), h.e[i:]...), base: h.base, inode: h.inode}
	l := append(m.get(i), h.e[:i]...)
	r.first = r.start(0)
	b.slots += cap(l) + cap(r.e) - cap(h.e)
	m.put(h.e)
	h.e = l
	b.chunks = slices.Insert(b.chunks, c+1, r)
}

// push appends x, which lies behind all entries. It keeps room to grow only in the last chunk.
func (b *body) push(m *memory, x *Extent) {
	b.count(m, x, 1)
	if n := len(b.chunks); n > 0 {
		h := &b.chunks[n-1]
		if len(h.e) < cap(h.e) && h.inode == x.Inode && x.Start-h.base <= maxDelta {
			h.e = append(h.e, pack(x, h.base))
			return
		}
	}
	h := chunk{e: m.get(chunkMax), first: x.Start, base: x.Start, inode: x.Inode}
	h.e = append(h.e, pack(x, x.Start))
	b.slots += cap(h.e)
	b.chunks = append(b.chunks, h)
}

// plain reports whether all entries of the chunk have a pointer that may go to the disk, and none is late.
func (h *chunk) plain() bool {
	all, some := uint64(flagPtr), uint64(0)
	for _, e := range h.e {
		all &= e.a
		some |= e.a&flagLate | e.b>>holdShift
	}
	return all != 0 && some == 0
}

// adopt takes a plain chunk of another body, behind all entries. Nothing of it is open then. The other body
// keeps it for the moment, without its memory.
func (b *body) adopt(h *chunk) {
	for i := range h.e {
		h.e[i].a &^= flagOpen
	}
	b.n += len(h.e)
	b.words += 3 * len(h.e)
	b.slots += cap(h.e)
	b.chunks = append(b.chunks, *h)
}

// set gives the entry at k other flags or another hold; its range and pointer stay.
func (b *body) set(m *memory, k cursor, x *Extent) {
	old := b.at(k)
	b.count(m, &old, -1)
	b.count(m, x, 1)
	h := &b.chunks[k.c]
	h.e[k.i] = pack(x, h.base)
}

// clear gives all memory back.
func (b *body) clear(m *memory) {
	for i := range b.chunks {
		h := &b.chunks[i]
		if b.held > 0 {
			for j := range h.e {
				if id := h.e[j].hold(); id != 0 {
					m.holds.ref(id, -1)
				}
			}
		}
		m.put(h.e)
	}
	*b = body{}
}
