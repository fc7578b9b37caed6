package ondisk

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Where the superblock lies on both kinds of device.
const (
	SuperblockSector = 8
	SuperblockOffset = SuperblockSector * SectorSize // bytes
	SuperblockBytes  = 4096                          // the area; fields end at 2258
)

// A Superblock heads a cache or a backing device. Little endian, offsets in bytes within the area:
//
//	0 csum u64       8 offset u64     16 version u64         24 magic [16]
//	40 uuid [16]     56 set_uuid [16] 72 label [32]          104 flags u64       112 seq u64
//	120 compat u64   128 incompat u64 136 ro_compat u64      144 pad [5]u64
//	184 nbuckets u64 (cache), data_offset u64 (backing)
//	192 block_size u16  194 bucket_size u16  196 nr_in_set u16  198 nr_this_dev u16
//	200 last_mount u32  204 first_bucket u16 206 njournal u16   208 d [256]u64
//	2256 bucket_size_hi u16                  2258 .. 4096 don't care, preserved
//
// csum covers 8 .. 208 + 8*njournal. Decoding and encoding keep every byte of the area. Source: F 3.1.
type Superblock struct {
	Csum         uint64 // as stored; SetChecksum brings it up to date
	Offset       uint64 // sector of this superblock
	Version      uint64
	Magic        [16]byte
	UUID         UUID // of this device
	SetUUID      UUID // of the cache set
	Label        [32]byte
	Flags        uint64
	Seq          uint64
	Compat       uint64 // feature words, meaningful in version 5 only
	Incompat     uint64
	ROCompat     uint64
	Pad          [5]uint64
	Word184      uint64 // NBuckets or DataOffset
	BlockSize    uint16 // sectors
	BucketSize16 uint16 // sectors, or their logarithm: see BucketSectors
	NrInSet      uint16
	NrThisDev    uint16
	LastMount    uint32 // seconds since 1970
	FirstBucket  uint16
	NJournal     uint16
	D            [MaxJournalBuckets]uint64 // journal buckets
	BucketSizeHi uint16
	Rest         [SuperblockBytes - 2258]byte
}

// Versions.
const (
	VersionCache0       = 0 // cache as older tools format it
	VersionBacking      = 1 // data at sector 16
	VersionCache        = 3
	VersionBackingOff   = 4 // data offset in the superblock
	VersionCacheFeature = 5 // feature words are valid
	VersionBackingFeat  = 6 // as 4; feature words are not read
)

// Magic is what bytes 24..39 of every superblock hold.
var Magic = [16]byte{0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81}

// Feature bits of version 5.
const (
	IncompatObsoLargeBucket = 1 // bucket size in two halves
	IncompatLargeBucket     = 2 // bucket size as a logarithm

	knownIncompat = IncompatObsoLargeBucket | IncompatLargeBucket
)

// Flags of a cache device.
const (
	FlagSync    = 1 << 0 // contents are valid; not a mark of a clean stop
	FlagDiscard = 1 << 1
)

// A Replacement is the policy that picks victims.
type Replacement uint8

// Replacement policies, as numbered on disk.
const (
	LRU Replacement = iota
	FIFO
	Random
)

func (r Replacement) String() string { return pick(r, "lru", "fifo", "random") }

// A CacheMode is how writes to a backing device are cached.
type CacheMode uint8

// Cache modes, as numbered on disk.
const (
	Writethrough CacheMode = iota
	Writeback
	Writearound
	ModeNone
)

func (m CacheMode) String() string {
	return pick(m, "writethrough", "writeback", "writearound", "none")
}

// A State says how a backing device and its set stand to each other. Source: F 10.
type State uint8

// States, as numbered on disk.
const (
	StateNone  State = iota // not attached
	StateClean              // attached, backing data complete
	StateDirty              // attached, the cache may hold newer data
	StateStale              // was attached and then used without its cache
)

func (s State) String() string { return pick(s, "none", "clean", "dirty", "stale") }

func pick[T ~uint8](v T, names ...string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("unknown(%d)", uint8(v))
}

// DecodeSuperblock reads the 4096 bytes at byte 4096 of a device. It fails only when b is shorter: what is in
// the fields is judged by Check, so that a bad superblock can still be shown.
func DecodeSuperblock(b []byte) (*Superblock, error) {
	if len(b) < SuperblockBytes {
		return nil, corrupt("superblock", 0, "length", "is %d bytes, want %d", len(b), SuperblockBytes)
	}
	le := binary.LittleEndian
	sb := &Superblock{
		Csum: le.Uint64(b), Offset: le.Uint64(b[8:]), Version: le.Uint64(b[16:]),
		Magic: [16]byte(b[24:40]), UUID: UUID(b[40:56]), SetUUID: UUID(b[56:72]), Label: [32]byte(b[72:104]),
		Flags: le.Uint64(b[104:]), Seq: le.Uint64(b[112:]),
		Compat: le.Uint64(b[120:]), Incompat: le.Uint64(b[128:]), ROCompat: le.Uint64(b[136:]),
		Word184: le.Uint64(b[184:]), BlockSize: le.Uint16(b[192:]), BucketSize16: le.Uint16(b[194:]),
		NrInSet: le.Uint16(b[196:]), NrThisDev: le.Uint16(b[198:]), LastMount: le.Uint32(b[200:]),
		FirstBucket: le.Uint16(b[204:]), NJournal: le.Uint16(b[206:]), BucketSizeHi: le.Uint16(b[2256:]),
		Rest: [SuperblockBytes - 2258]byte(b[2258:SuperblockBytes]),
	}
	for i := range sb.Pad {
		sb.Pad[i] = le.Uint64(b[144+8*i:])
	}
	for i := range sb.D {
		sb.D[i] = le.Uint64(b[208+8*i:])
	}
	return sb, nil
}

// Encode writes the superblock to b, which has at least 4096 bytes. Csum is written as it is.
func (sb *Superblock) Encode(b []byte) {
	le := binary.LittleEndian
	b = b[:SuperblockBytes]
	le.PutUint64(b, sb.Csum)
	le.PutUint64(b[8:], sb.Offset)
	le.PutUint64(b[16:], sb.Version)
	copy(b[24:], sb.Magic[:])
	copy(b[40:], sb.UUID[:])
	copy(b[56:], sb.SetUUID[:])
	copy(b[72:], sb.Label[:])
	le.PutUint64(b[104:], sb.Flags)
	le.PutUint64(b[112:], sb.Seq)
	le.PutUint64(b[120:], sb.Compat)
	le.PutUint64(b[128:], sb.Incompat)
	le.PutUint64(b[136:], sb.ROCompat)
	for i, v := range sb.Pad {
		le.PutUint64(b[144+8*i:], v)
	}
	le.PutUint64(b[184:], sb.Word184)
	le.PutUint16(b[192:], sb.BlockSize)
	le.PutUint16(b[194:], sb.BucketSize16)
	le.PutUint16(b[196:], sb.NrInSet)
	le.PutUint16(b[198:], sb.NrThisDev)
	le.PutUint32(b[200:], sb.LastMount)
	le.PutUint16(b[204:], sb.FirstBucket)
	le.PutUint16(b[206:], sb.NJournal)
	for i, v := range sb.D {
		le.PutUint64(b[208+8*i:], v)
	}
	le.PutUint16(b[2256:], sb.BucketSizeHi)
	copy(b[2258:], sb.Rest[:])
}

// ChecksumOK reports whether Csum is what the other fields ask for, which ExpectedChecksum returns.
func (sb *Superblock) ChecksumOK() bool { return sb.Csum == sb.ExpectedChecksum() }

// ExpectedChecksum computes the checksum of the fields as they are. It covers as many d[] as NJournal says, at
// most all there are.
func (sb *Superblock) ExpectedChecksum() uint64 {
	var b [SuperblockBytes]byte
	sb.Encode(b[:])
	return Checksum(b[8 : 208+8*min(int(sb.NJournal), MaxJournalBuckets)])
}

// SetChecksum makes Csum fit the other fields.
func (sb *Superblock) SetChecksum() { sb.Csum = sb.ExpectedChecksum() }

// IsBacking reports whether the version is one of a backing device.
func (sb *Superblock) IsBacking() bool {
	return sb.Version == VersionBacking || sb.Version == VersionBackingOff || sb.Version == VersionBackingFeat
}

// IsCache reports whether the version is one of a cache device.
func (sb *Superblock) IsCache() bool {
	return sb.Version == VersionCache0 || sb.Version == VersionCache || sb.Version == VersionCacheFeature
}

// HasFeatures reports whether the feature words mean anything.
func (sb *Superblock) HasFeatures() bool { return sb.Version == VersionCacheFeature }

// BucketSectors decodes the bucket size of a cache device, in sectors: the logarithm, the two halves or the
// plain field, as version and features say. A logarithm of 64 or more gives 0. Source: F 3.4.
func (sb *Superblock) BucketSectors() uint64 {
	switch {
	case sb.HasFeatures() && sb.Incompat&IncompatLargeBucket != 0:
		if sb.BucketSize16 >= 64 {
			return 0
		}
		return 1 << sb.BucketSize16
	case sb.HasFeatures() && sb.Incompat&IncompatObsoLargeBucket != 0:
		return uint64(sb.BucketSize16) | uint64(sb.BucketSizeHi)<<16
	}
	return uint64(sb.BucketSize16)
}

// NBuckets returns the number of buckets of a cache device.
func (sb *Superblock) NBuckets() uint64 { return sb.Word184 }

// DataOffset returns the first sector of data on a backing device.
func (sb *Superblock) DataOffset() uint64 {
	if sb.Version == VersionBacking {
		return DefaultDataOffset
	}
	return sb.Word184
}

// SetMagic is what the magic numbers of a set's metadata are XORed with.
func (sb *Superblock) SetMagic() uint64 { return binary.LittleEndian.Uint64(sb.SetUUID[:]) }

// LabelString returns the label up to the first NUL.
func (sb *Superblock) LabelString() string { return labelString(sb.Label[:]) }

func labelString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// SetLabel stores s, NUL padded. It fails where s is longer than 32 bytes or holds a NUL or a newline.
func (sb *Superblock) SetLabel(s string) error {
	if len(s) > len(sb.Label) || bytes.ContainsAny([]byte(s), "\x00\n") {
		return fmt.Errorf("label %q: at most %d bytes, no NUL or newline", s, len(sb.Label))
	}
	sb.Label = [32]byte{}
	copy(sb.Label[:], s)
	return nil
}

// Sync reports whether the contents of a cache device are valid; if not, the next activation starts afresh.
func (sb *Superblock) Sync() bool { return sb.Flags&FlagSync != 0 }

// Discard reports whether a cache device asks for freed buckets to be discarded.
func (sb *Superblock) Discard() bool { return sb.Flags&FlagDiscard != 0 }

// Replacement returns a cache device's policy, as stored; values above Random are possible.
func (sb *Superblock) Replacement() Replacement { return Replacement(sb.Flags >> 2 & 7) }

// SetReplacement stores a cache device's policy.
func (sb *Superblock) SetReplacement(r Replacement) { sb.Flags = sb.Flags&^(7<<2) | uint64(r&7)<<2 }

// CacheMode returns a backing device's mode, as stored; values above ModeNone are possible.
func (sb *Superblock) CacheMode() CacheMode { return CacheMode(sb.Flags & 15) }

// SetCacheMode stores a backing device's mode.
func (sb *Superblock) SetCacheMode(m CacheMode) { sb.Flags = sb.Flags&^15 | uint64(m&15) }

// State returns a backing device's state.
func (sb *Superblock) State() State { return State(sb.Flags >> 61 & 3) }

// SetState stores a backing device's state.
func (sb *Superblock) SetState(s State) { sb.Flags = sb.Flags&^(3<<61) | uint64(s&3)<<61 }
