package btree

import (
	"cmp"
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Pos is a position in the key space: a sector of an inode. Keys are ordered by it.
type Pos struct {
	Inode  uint32
	Sector uint64
}

// MaxPos is the greatest position: the root's, and that of the last node on every level.
var MaxPos = Pos{ondisk.MaxInode, ondisk.MaxOffset}

// Compare orders positions by inode, then by sector.
func (p Pos) Compare(o Pos) int {
	if c := cmp.Compare(p.Inode, o.Inode); c != 0 {
		return c
	}
	return cmp.Compare(p.Sector, o.Sector)
}

// Less reports whether p comes before o.
func (p Pos) Less(o Pos) bool { return p.Inode < o.Inode || p.Inode == o.Inode && p.Sector < o.Sector }

func (p Pos) String() string { return fmt.Sprintf("%d:%d", p.Inode, p.Sector) }

// What an entry of a leaf is besides its range and pointer.
const (
	flagPtr   = 1 << iota // it has a pointer
	flagDirty             // the data is not on the backing device yet
	flagOpen              // no append has taken it yet
	flagLate              // it came after the copy of a rewrite was taken

	flagBits = 4
	flagMask = 1<<flagBits - 1
)

// An Extent is what the tree says of [Start, End) of an inode: where its data lies in the cache, or, without a
// pointer, that nothing older counts here.
type Extent struct {
	Start uint64     // sector
	Ptr   ondisk.Ptr // where the sector Start lies; 0 without pointer
	Inode uint32
	Size  uint16 // sectors
	hold  uint16 // number of the hold that keeps the pointer off the disk, 0: none
	flags uint8
}

// End returns the sector just past the extent.
func (x *Extent) End() uint64 { return x.Start + uint64(x.Size) }

// Pos returns where the extent begins.
func (x *Extent) Pos() Pos { return Pos{x.Inode, x.Start} }

// HasPtr reports whether the extent names a place in the cache. Whether that is still valid, the generation of
// the bucket says.
func (x *Extent) HasPtr() bool { return x.flags&flagPtr != 0 }

// Dirty reports whether the data is not on the backing device yet.
func (x *Extent) Dirty() bool { return x.flags&flagDirty != 0 }

// Held reports whether the pointer is kept off the disk until the backing device was flushed.
func (x *Extent) Held() bool { return x.hold != 0 }

// Key returns the extent as a key of the format.
func (x *Extent) Key() ondisk.Key {
	if !x.HasPtr() {
		return ondisk.NewInvalidation(x.Inode, x.End(), uint32(x.Size))
	}
	return ondisk.NewExtent(x.Inode, x.End(), uint32(x.Size), x.Ptr, x.Dirty())
}

func (x Extent) String() string {
	k := x.Key()
	return k.String()
}

// words is the length of the extent's key on disk.
func (x *Extent) words() int { return 2 + int(x.flags&flagPtr) }

// extentOf converts a leaf key that is not empty. A key that only hides, whatever its pointers are, becomes one
// without pointer: check keys and pointers to devices that are not there. Of several pointers, which no writer
// makes, the first counts.
func extentOf(k *ondisk.Key) Extent {
	x := Extent{Start: k.Start(), Inode: k.Inode(), Size: uint16(k.Size())}
	if k.Ptrs() > 0 && k.P[0].Available() {
		x.Ptr, x.flags = k.P[0]&ptrMask, flagPtr
		if k.Dirty() {
			x.flags |= flagDirty
		}
	}
	return x
}

// clip returns the part of x in [from, to), which lies within x.
func (x Extent) clip(from, to uint64) Extent {
	if x.flags&flagPtr != 0 {
		x.Ptr = x.Ptr.Advance(from - x.Start)
	}
	x.Start, x.Size = from, uint16(to-from)
	return x
}

// joins reports whether one entry can say what l and r, neighbours in this order, say. Source: F 5.8.
func (x *Extent) joins(r *Extent, g *ondisk.Geometry) bool {
	if x.Inode != r.Inode || x.End() != r.Start || x.flags != r.flags || x.hold != r.hold || int(x.Size)+int(r.Size) > ondisk.MaxKeySize {
		return false
	}
	return x.flags&flagPtr == 0 || x.Ptr.Advance(uint64(x.Size)) == r.Ptr && g.Bucket(x.Ptr.Sector()) == g.Bucket(r.Ptr.Sector())
}

// An entry is an extent as a chunk stores it, 16 bytes:
//
//	a: 0..3 flags   4..19 size   20..63 start, counted from the chunk's base
//	b: 0..53 pointer (gen, sector, and a device below 8)   54..63 hold
type entry struct{ a, b uint64 }

const (
	deltaShift = flagBits + 16
	maxDelta   = 1<<(64-deltaShift) - 1
	ptrMask    = 1<<54 - 1
	holdShift  = 54
	maxHolds   = 1<<(64-holdShift) - 1
)

// pack stores x relative to base; x.Start lies in [base, base+maxDelta].
func pack(x *Extent, base uint64) entry {
	return entry{(x.Start-base)<<deltaShift | uint64(x.Size)<<flagBits | uint64(x.flags), uint64(x.Ptr) | uint64(x.hold)<<holdShift}
}

func (e entry) size() uint64  { return e.a >> flagBits & 0xffff }
func (e entry) delta() uint64 { return e.a >> deltaShift }
func (e entry) hold() uint16  { return uint16(e.b >> holdShift) }
