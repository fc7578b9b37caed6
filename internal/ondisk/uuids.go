package ondisk

import (
	"bytes"
	"encoding/binary"
)

// UUIDEntryBytes is the size of a slot; oldUUIDEntryBytes that of a slot in sets whose jsets have version 0.
const (
	UUIDEntryBytes    = 128
	oldUUIDEntryBytes = 64
)

// UUIDFlashOnly is the bit of a slot's flags that says: a volume without backing device.
const UUIDFlashOnly = 1

// A UUIDEntry is one slot of the uuid array: a backing device, or a flash-only volume. The slot's index is the
// inode of its extents. Little endian, offsets in bytes:
//
//	0 uuid [16]   16 label [32]   48 first_reg u32   52 last_reg u32   56 invalidated u32   60 flags u32
//	64 sectors u64   72 pad [56]
//
// The old form has 64 bytes: the same up to 60, then padding. The array has no header and no checksum.
// Source: F 8.2, 8.5.
type UUIDEntry struct {
	UUID        UUID
	Label       [32]byte
	FirstReg    uint32 // seconds since 1970
	LastReg     uint32
	Invalidated uint32 // when the slot was retired, else 0
	Flags       uint32
	Sectors     uint64 // size of a flash-only volume
	Pad         [56]byte
}

// DecodeUUIDEntry reads slot i of the array b; old says that the entries have 64 bytes. It fails where the
// array has no such slot.
func DecodeUUIDEntry(b []byte, i int, old bool) (e UUIDEntry, err error) {
	size := UUIDEntryBytes
	if old {
		size = oldUUIDEntryBytes
	}
	if i < 0 || i >= len(b)/size {
		return e, corrupt("uuid", 0, "slot", "%d is outside of the array's %d", i, len(b)/size)
	}
	b = b[i*size : (i+1)*size]
	le := binary.LittleEndian
	e = UUIDEntry{UUID: UUID(b[:16]), Label: [32]byte(b[16:48]), FirstReg: le.Uint32(b[48:]), LastReg: le.Uint32(b[52:]), Invalidated: le.Uint32(b[56:])}
	if !old {
		e.Flags, e.Sectors, e.Pad = le.Uint32(b[60:]), le.Uint64(b[64:]), [56]byte(b[72:])
	}
	return e, nil
}

// Encode writes the slot to b, at least 128 bytes.
func (e *UUIDEntry) Encode(b []byte) {
	le := binary.LittleEndian
	b = b[:UUIDEntryBytes]
	copy(b, e.UUID[:])
	copy(b[16:], e.Label[:])
	le.PutUint32(b[48:], e.FirstReg)
	le.PutUint32(b[52:], e.LastReg)
	le.PutUint32(b[56:], e.Invalidated)
	le.PutUint32(b[60:], e.Flags)
	le.PutUint64(b[64:], e.Sectors)
	copy(b[72:], e.Pad[:])
}

// Unused reports whether the slot was never used.
func (e *UUIDEntry) Unused() bool { return e.UUID.IsZero() }

// Retired reports whether the slot's device was detached or its volume deleted.
func (e *UUIDEntry) Retired() bool { return e.UUID == RetiredUUID }

// FlashOnly reports whether the slot is a volume without backing device.
func (e *UUIDEntry) FlashOnly() bool {
	return e.Flags&UUIDFlashOnly != 0 && !e.Unused() && !e.Retired()
}

// LabelString returns the label up to the first NUL or newline; what is behind is junk.
func (e *UUIDEntry) LabelString() string {
	if i := bytes.IndexAny(e.Label[:], "\x00\n"); i >= 0 {
		return string(e.Label[:i])
	}
	return string(e.Label[:])
}
