package ondisk

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"strings"
)

// A Ptr says where on the cache device an extent or a node lies:
//
//	bits 0..7 gen    8..50 sector    51..62 dev    63 zero
//
// Source: F 4.1.
type Ptr uint64

// MakePtr builds a pointer to sector of device dev, made while the bucket's generation was gen.
func MakePtr(gen uint8, sector uint64, dev uint16) Ptr {
	return Ptr(uint64(dev)<<51 | sector<<8&(1<<51-1) | uint64(gen))
}

// Gen returns the generation that the bucket had when the pointer was made.
func (p Ptr) Gen() uint8 { return uint8(p) }

// Sector returns the absolute sector on the cache device.
func (p Ptr) Sector() uint64 { return uint64(p) >> 8 & (1<<43 - 1) }

// Dev returns the index of the cache device in its set; CheckDev marks a check key.
func (p Ptr) Dev() uint16 { return uint16(p >> 51 & 0xfff) }

// Available reports whether the pointer names a cache device at all.
func (p Ptr) Available() bool { return p.Dev() < 8 }

// Advance returns the pointer moved forward by n sectors, modulo the 43 bits of the field.
func (p Ptr) Advance(n uint64) Ptr {
	const field = Ptr(1<<43-1) << 8
	return p&^field | Ptr(p.Sector()+n)<<8&field
}

// A Key says that a range of an inode, [Start, End), is cached at its pointers, or, with no pointer, that it
// is not. In an interior node it is a child: position (Inode, End), pointer to the child.
//
//	high: 0..19 inode   20..35 size   36 dirty   37..55 zero   56..57 csum   58..59 zero   60..62 ptrs   63 one
//	low:  end of the extent, exclusive, in sectors
//	then ptrs words of Ptr
//
// Source: F 4.1.
type Key struct {
	High uint64
	Low  uint64
	P    [MaxKeyPtrs]Ptr // valid up to Ptrs()
}

const (
	keyHeader   = uint64(1) << 63
	keyDirty    = uint64(1) << 36
	keySizeMask = uint64(MaxKeySize) << 20
)

// MaxKey is the greatest position: that of the root and of the last child on every level.
var MaxKey = Key{High: keyHeader | MaxInode, Low: MaxOffset}

// NewExtent builds a leaf key with one pointer for the size sectors that end at end.
func NewExtent(inode uint32, end uint64, size uint32, p Ptr, dirty bool) Key {
	k := Key{High: keyHeader | 1<<60 | uint64(size)<<20&keySizeMask | uint64(inode)&MaxInode, Low: end}
	if dirty {
		k.High |= keyDirty
	}
	k.P[0] = p
	return k
}

// NewInvalidation builds a leaf key without pointer.
func NewInvalidation(inode uint32, end uint64, size uint32) Key {
	return Key{High: keyHeader | uint64(size)<<20&keySizeMask | uint64(inode)&MaxInode, Low: end}
}

// NewChild builds a node reference: position and size of pos's node, at p.
func NewChild(inode uint32, end uint64, sectors uint32, p Ptr) Key {
	return NewExtent(inode, end, sectors, p, false)
}

// Inode returns the slot number of the device that the key belongs to.
func (k *Key) Inode() uint32 { return uint32(k.High & MaxInode) }

// Size returns the length in sectors.
func (k *Key) Size() uint32 { return uint32(k.High >> 20 & MaxKeySize) }

// End returns the sector just past the extent. A key stores its end, not its start, so that a search finds
// the key that covers a sector.
func (k *Key) End() uint64 { return k.Low }

// Start returns the first sector of the extent. It wraps where Size is larger than End, which a checked leaf
// key never has.
func (k *Key) Start() uint64 { return k.Low - uint64(k.Size()) }

// Dirty reports whether the data is not on the backing device yet.
func (k *Key) Dirty() bool { return k.High&keyDirty != 0 }

// Ptrs returns the number of pointers, 0 to 7; decoded keys have at most MaxKeyPtrs.
func (k *Key) Ptrs() int { return int(k.High >> 60 & 7) }

// Csum returns the vestigial KEY_CSUM field; writers put 0.
func (k *Key) Csum() int { return int(k.High >> 56 & 3) }

// Words returns the length of the key on disk in 8-byte words. KEY_CSUM does not count (F 4.4).
func (k *Key) Words() int { return 2 + k.Ptrs() }

// IsFreeing reports whether the key is at position (0,0), where interior nodes keep their freeing keys.
func (k *Key) IsFreeing() bool { return k.Inode() == 0 && k.Low == 0 }

// IsCheck reports whether the key is a placeholder of a read miss.
func (k *Key) IsCheck() bool { return k.Ptrs() > 0 && k.P[0].Dev() == CheckDev }

// ComparePos orders keys by inode, then by end; size, flags and pointers take no part.
func (k *Key) ComparePos(o *Key) int {
	if c := cmp.Compare(k.Inode(), o.Inode()); c != 0 {
		return c
	}
	return cmp.Compare(int64(k.Low), int64(o.Low))
}

// CutFront makes the key start at sector s, Start < s: pointers advance. Where s is End or more the key
// becomes empty, with its end at s.
func (k *Key) CutFront(s uint64) {
	delta := s - k.Start()
	size := uint64(0)
	if s < k.End() {
		size = k.End() - s
	} else {
		delta = uint64(k.Size())
		k.Low = s
	}
	for i := range k.Ptrs() {
		k.P[i] = k.P[i].Advance(delta)
	}
	k.High = k.High&^keySizeMask | size<<20
}

// CutBack makes the key end at sector s, Start <= s < End; pointers stay.
func (k *Key) CutBack(s uint64) {
	size := uint64(0)
	if start := k.Start(); s > start {
		size = s - start
	}
	k.Low = s
	k.High = k.High&^keySizeMask | size<<20
}

// DecodeKey reads the key at the start of b, which is a whole number of words, and returns how many bytes it
// takes. A key that claims more bytes than b has, or 7 pointers, is an error that matches ErrCorrupt.
func DecodeKey(b []byte) (k Key, n int, err error) {
	if len(b) < 16 {
		return k, 0, corrupt("key", 0, "length", "is %d bytes, a key has at least 16", len(b))
	}
	k.High = binary.LittleEndian.Uint64(b)
	k.Low = binary.LittleEndian.Uint64(b[8:])
	ptrs := k.Ptrs()
	if ptrs > MaxKeyPtrs {
		return k, 0, corrupt("key", 0, "ptrs", "is %d, at most %d fit", ptrs, MaxKeyPtrs)
	}
	n = 16 + 8*ptrs
	if len(b) < n {
		return k, 0, corrupt("key", 0, "ptrs", "is %d: the key is %d bytes, only %d are left", ptrs, n, len(b))
	}
	for i := range ptrs {
		k.P[i] = Ptr(binary.LittleEndian.Uint64(b[16+8*i:]))
	}
	return k, n, nil
}

// AppendKey appends the key's words to b.
func AppendKey(b []byte, k *Key) []byte {
	b = binary.LittleEndian.AppendUint64(b, k.High)
	b = binary.LittleEndian.AppendUint64(b, k.Low)
	for i := range min(k.Ptrs(), MaxKeyPtrs) {
		b = binary.LittleEndian.AppendUint64(b, uint64(k.P[i]))
	}
	return b
}

// PaddedKeyBytes is the size of the slot that a key has in a journal entry's header.
const PaddedKeyBytes = 64

// decodePaddedKey reads a key from a 64-byte slot; words behind the key are junk.
func decodePaddedKey(b []byte) (Key, error) {
	k, _, err := DecodeKey(b[:PaddedKeyBytes])
	return k, err
}

// putPaddedKey writes a key to a 64-byte slot and zeroes the rest.
func putPaddedKey(b []byte, k *Key) {
	clear(b[:PaddedKeyBytes])
	AppendKey(b[:0], k)
}

// String returns the key as the kernel prints it in debugfs: "0:16 len 8 -> [0:24584 gen 1] dirty".
func (k Key) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%d:%d len %d -> [", k.Inode(), k.Start(), k.Size())
	for i := range min(k.Ptrs(), MaxKeyPtrs) {
		if i > 0 {
			s.WriteString(", ")
		}
		if p := k.P[i]; p.Dev() == CheckDev {
			s.WriteString("check dev")
		} else {
			fmt.Fprintf(&s, "%d:%d gen %d", p.Dev(), p.Sector(), p.Gen())
		}
	}
	s.WriteByte(']')
	if k.Dirty() {
		s.WriteString(" dirty")
	}
	if k.Csum() != 0 {
		fmt.Fprintf(&s, " cs%d", k.Csum())
	}
	return s.String()
}

// A Fault says what is wrong with a key by itself, without its bucket's generation. Source: F 5.4.
type Fault uint8

const (
	FaultNone      Fault = iota
	FaultEmpty           // size 0: in a leaf a left-over to skip
	FaultTooBig          // larger than its end, so that it would start below sector 0
	FaultCrosses         // runs past the end of its bucket
	FaultOutside         // bucket below the first or past the last
	FaultNoPtr           // a node reference without pointer
	FaultDirtyNode       // a node reference with the dirty bit
	FaultInode           // a leaf key of a slot that the uuid array does not have
	FaultBigNode         // a node reference of more than the metadata part of a bucket
)

var faultText = [...]string{
	FaultNone: "good", FaultEmpty: "size is 0", FaultTooBig: "size is larger than the end",
	FaultCrosses: "runs past the end of its bucket", FaultOutside: "bucket is not one of this device",
	FaultNoPtr: "node reference has no pointer", FaultDirtyNode: "node reference is dirty",
	FaultInode: "inode is not a slot of the uuid array", FaultBigNode: "node reference is larger than metadata can be",
}

func (f Fault) String() string { return faultText[f] }

// inBounds checks the available pointers of k.
func (g *Geometry) inBounds(k *Key) Fault {
	for i := range min(k.Ptrs(), MaxKeyPtrs) {
		p := k.P[i]
		if !p.Available() {
			continue
		}
		if !g.ValidBucket(g.Bucket(p.Sector())) {
			return FaultOutside
		}
		if uint64(g.Remainder(p.Sector()))+uint64(k.Size()) > uint64(g.BucketSectors) {
			return FaultCrosses
		}
	}
	return FaultNone
}

// LeafFault checks a leaf key; anything but FaultNone and FaultEmpty is damage.
func (g *Geometry) LeafFault(k *Key) Fault {
	switch {
	case k.Size() == 0:
		return FaultEmpty
	case uint64(k.Size()) > k.End() || k.End() > MaxOffset:
		return FaultTooBig
	case k.Inode() >= g.NrUUIDs:
		return FaultInode
	}
	return g.inBounds(k)
}

// NodeFault checks a node reference, or the reference to the uuid array; anything but FaultNone is damage.
func (g *Geometry) NodeFault(k *Key) Fault {
	switch {
	case k.Ptrs() == 0:
		return FaultNoPtr
	case k.Size() == 0:
		return FaultEmpty
	case k.Dirty():
		return FaultDirtyNode
	case k.Size() > g.MetaSectors:
		return FaultBigNode
	}
	return g.inBounds(k)
}
