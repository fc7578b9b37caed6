package offline

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Pos is a place in key space: a sector of an inode.
type Pos struct {
	Inode  uint32
	Sector uint64
}

// Compare orders positions.
func (p Pos) Compare(o Pos) int {
	if c := cmp.Compare(p.Inode, o.Inode); c != 0 {
		return c
	}
	return cmp.Compare(p.Sector, o.Sector)
}

// String returns inode and sector, as keys have them.
func (p Pos) String() string { return fmt.Sprintf("%d:%d", p.Inode, p.Sector) }

// A Range is [From, To) in key space, across inodes.
type Range struct{ From, To Pos }

func (r Range) String() string { return r.From.String() + " to " + r.To.String() }

// clip returns the part of r within o.
func (r Range) clip(o Range) Range {
	if r.From.Compare(o.From) < 0 {
		r.From = o.From
	}
	if r.To.Compare(o.To) > 0 {
		r.To = o.To
	}
	return r
}

// empty reports whether nothing is in r: From is not before To.
func (r Range) empty() bool { return r.From.Compare(r.To) >= 0 }

// Flags of an Extent.
const (
	extDirty   = 1 << iota
	extPtr     // has a pointer
	extCheck   // the pointer is a placeholder of a read miss
	extStale   // the bucket has been reused since
	extBad     // the key breaks the format
	extJournal // from the journal, not (only) from the tree
)

// An Extent is what one key says of [Start, Start+Size) of its inode, after newer keys have been cut out of
// it. 24 bytes, no pointer.
type Extent struct {
	Start uint64     // sector, data offset of the backing device included
	P     ondisk.Ptr // where the first sector lies
	Inode uint32
	Size  uint16 // sectors
	flags uint8
}

// End returns the sector just past the extent.
func (e *Extent) End() uint64 { return e.Start + uint64(e.Size) }

// Live reports whether the extent's data is in the cache. Every other extent only says that nothing older is.
func (e *Extent) Live() bool { return e.flags&(extPtr|extCheck|extStale|extBad) == extPtr }

// Dirty reports whether the data is not on the backing device yet; it means something only where Live.
func (e *Extent) Dirty() bool { return e.flags&extDirty != 0 }

// Stale reports whether the extent's bucket has been reused since.
func (e *Extent) Stale() bool { return e.flags&extStale != 0 }

// Key returns the extent as a key of the format.
func (e *Extent) Key() ondisk.Key {
	if e.flags&extPtr == 0 {
		return ondisk.NewInvalidation(e.Inode, e.End(), uint32(e.Size))
	}
	return ondisk.NewExtent(e.Inode, e.End(), uint32(e.Size), e.P, e.Dirty())
}

func (e *Extent) pos() Pos { return Pos{e.Inode, e.Start} }
func (e *Extent) end() Pos { return Pos{e.Inode, e.End()} }

// newExtent converts a leaf key that is not empty. Where the key has several pointers, which no writer makes,
// the first one counts.
func newExtent(k *ondisk.Key, fault ondisk.Fault) Extent {
	e := Extent{Start: k.Start(), Inode: k.Inode(), Size: uint16(k.Size())}
	if k.Dirty() {
		e.flags |= extDirty
	}
	if k.Ptrs() > 0 {
		e.P = k.P[0]
		e.flags |= extPtr
		if !e.P.Available() {
			e.flags |= extCheck
		}
	}
	if fault != ondisk.FaultNone {
		e.flags |= extBad
	}
	return e
}

// cut returns the part of e in [from, to), sectors of e's inode.
func (e Extent) cut(from, to uint64) Extent {
	if d := from - e.Start; d > 0 && e.flags&extPtr != 0 {
		e.P = e.P.Advance(d)
	}
	e.Start, e.Size = from, uint16(to-from)
	return e
}

// newestWins appends to dst what is visible of in, whose order is from oldest to newest: sorted, without
// overlap, each sector from the newest extent that covers it. Source: F 5.5.
//
// in consists of runs that are sorted already, as bsets are; neighbours are laid over each other, two and two,
// until one is left.
func newestWins(dst, in []Extent) []Extent {
	var ends []int // of the runs in cur
	for i := 1; i < len(in); i++ {
		if in[i-1].end().Compare(in[i].pos()) > 0 {
			ends = append(ends, i)
		}
	}
	ends = append(ends, len(in))
	cur := in
	for len(ends) > 1 {
		out := make([]Extent, 0, len(cur)+len(cur)/8)
		from, kept := 0, ends[:0]
		for i := 0; i < len(ends); i += 2 {
			newer := ends[min(i+1, len(ends)-1)]
			out = overlay(out, cur[from:ends[i]], cur[ends[i]:newer])
			from = newer
			kept = append(kept, len(out))
		}
		cur, ends = out, kept
	}
	return append(dst, cur...)
}

// overlay appends base with newer laid over it to out. Both are sorted and without overlap, and so is what is
// appended.
func overlay(out, base, newer []Extent) []Extent {
	if len(newer) == 0 {
		return append(out, base...)
	}
	n := 0
	for _, b := range base {
		for n < len(newer) && newer[n].end().Compare(b.pos()) <= 0 {
			out = append(out, newer[n])
			n++
		}
		for n < len(newer) && newer[n].pos().Compare(b.end()) < 0 {
			if newer[n].Start > b.Start {
				out = append(out, b.cut(b.Start, newer[n].Start))
			}
			if newer[n].End() >= b.End() { // b ends below it; the next of base may still begin below it
				b.Size = 0
				break
			}
			b = b.cut(newer[n].End(), b.End())
			out = append(out, newer[n])
			n++
		}
		if b.Size > 0 {
			out = append(out, b)
		}
	}
	return append(out, newer[n:]...)
}

// cutOut returns list without what lies in holes. Both are sorted and without overlap.
func cutOut(list []Extent, holes []Range) (out []Extent) {
	for _, e := range list {
		for len(holes) > 0 && holes[0].To.Compare(e.pos()) <= 0 {
			holes = holes[1:]
		}
		for _, h := range holes {
			if h = h.clip(Range{e.pos(), e.end()}); h.empty() {
				break
			}
			if h.From.Sector > e.Start {
				out = append(out, e.cut(e.Start, h.From.Sector))
			}
			e = e.cut(h.To.Sector, e.End())
		}
		if e.Size > 0 {
			out = append(out, e)
		}
	}
	return out
}

// search returns the index of the first extent of list that ends after pos.
func search(list []Extent, pos Pos) int {
	i, _ := slices.BinarySearchFunc(list, pos, func(e Extent, p Pos) int {
		if e.end().Compare(p) <= 0 {
			return -1
		}
		return 1
	})
	return i
}
