package ondisk

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// JSetHeaderBytes is the size of a journal entry's header; its keys follow.
const JSetHeaderBytes = 240

// A JSet is one journal entry. Little endian, offsets in bytes:
//
//	0 csum u64     8 magic u64     16 seq u64       24 version u32   28 keys u32 (in u64 words)
//	32 last_seq    40 uuid_bucket (64-byte slot)    104 btree_root (64-byte slot)
//	168 btree_level u16, 170 pad   176 prio_bucket [8]u64
//
// Keys follow at 240. csum is the CRC-64 of all after itself. The header is a snapshot of where the set's
// roots are. Source: F 6.1.
type JSet struct {
	Csum       uint64
	Magic      uint64
	Seq        uint64
	Version    uint32
	Keys       uint32 // words
	LastSeq    uint64 // oldest entry that must still be replayed
	UUIDBucket Key
	Root       Key
	Level      uint16
	PrioBucket [8]uint64
	Data       []byte // the keys, 8*Keys bytes
}

// Reasons why there is no (further) entry at a place of the journal: they end the reading of a bucket and are
// no damage by themselves.
var (
	ErrNoJSet  = errors.New("no journal entry here")     // the magic is not there
	ErrBadJSet = errors.New("not a whole journal entry") // length or checksum is wrong: torn, or what is left of an earlier lap
)

// Bytes returns the size of header and keys, not rounded up.
func (j *JSet) Bytes() int { return JSetHeaderBytes + 8*int(j.Keys) }

// DecodeJSet reads the entry at the start of b, b being the rest of its journal bucket. The result's Data is
// part of b. Errors match ErrNoJSet or ErrBadJSet; an entry with a right checksum whose header keys break the
// format matches ErrCorrupt.
func DecodeJSet(b []byte, g *Geometry) (j JSet, err error) {
	if len(b) < JSetHeaderBytes {
		return j, fmt.Errorf("%w: %d bytes are left, an entry has at least %d", ErrNoJSet, len(b), JSetHeaderBytes)
	}
	le := binary.LittleEndian
	j = JSet{
		Csum: le.Uint64(b), Magic: le.Uint64(b[8:]), Seq: le.Uint64(b[16:]), Version: le.Uint32(b[24:]), Keys: le.Uint32(b[28:]),
		LastSeq: le.Uint64(b[32:]), Level: le.Uint16(b[168:]),
	}
	if j.Magic != g.JSetMagic() {
		return j, fmt.Errorf("%w: magic is %016x, want %016x", ErrNoJSet, j.Magic, g.JSetMagic())
	}
	end := JSetHeaderBytes + 8*uint64(j.Keys)
	if end > uint64(len(b)) || end > MaxJSetBytes {
		return j, fmt.Errorf("%w: seq %d has %d bytes, %d are left in the bucket and %d is the most", ErrBadJSet, j.Seq, end, len(b), MaxJSetBytes)
	}
	if want := Checksum(b[8:end]); j.Csum != want {
		return j, fmt.Errorf("%w: seq %d: csum is %016x, computed %016x", ErrBadJSet, j.Seq, j.Csum, want)
	}
	j.Data = b[JSetHeaderBytes:end:end]
	for i := range j.PrioBucket {
		j.PrioBucket[i] = le.Uint64(b[176+8*i:])
	}
	if j.UUIDBucket, err = decodePaddedKey(b[40:]); err != nil {
		return j, fmt.Errorf("jset seq %d: uuid_bucket: %w", j.Seq, err)
	}
	if j.Root, err = decodePaddedKey(b[104:]); err != nil {
		return j, fmt.Errorf("jset seq %d: btree_root: %w", j.Seq, err)
	}
	if j.LastSeq > j.Seq {
		return j, corrupt("jset", 32, "last_seq", "is %d, larger than seq %d", j.LastSeq, j.Seq)
	}
	return j, nil
}

// Encode writes the entry with Data as its keys to b, which must have room for 240+len(Data) bytes, and
// returns that length. Keys and Csum are set from Data.
func (j *JSet) Encode(b []byte) int {
	le := binary.LittleEndian
	n := JSetHeaderBytes + len(j.Data)
	j.Keys = uint32(len(j.Data) / 8)
	le.PutUint64(b[8:], j.Magic)
	le.PutUint64(b[16:], j.Seq)
	le.PutUint32(b[24:], j.Version)
	le.PutUint32(b[28:], j.Keys)
	le.PutUint64(b[32:], j.LastSeq)
	putPaddedKey(b[40:], &j.UUIDBucket)
	putPaddedKey(b[104:], &j.Root)
	le.PutUint64(b[168:], uint64(j.Level))
	for i, p := range j.PrioBucket {
		le.PutUint64(b[176+8*i:], p)
	}
	copy(b[JSetHeaderBytes:n], j.Data)
	j.Csum = Checksum(b[8:n])
	le.PutUint64(b, j.Csum)
	return n
}

// EachKey calls fn with every key of the entry in order. It stops with an error where the words do not make up
// whole keys, and where fn returns false without one.
func (j *JSet) EachKey(fn func(k *Key) bool) error {
	for b := j.Data; len(b) > 0; {
		k, n, err := DecodeKey(b)
		if err != nil {
			return fmt.Errorf("jset seq %d, byte %d: %w", j.Seq, JSetHeaderBytes+len(j.Data)-len(b), err)
		}
		if !fn(&k) {
			return nil
		}
		b = b[n:]
	}
	return nil
}

// ScanJournalBucket calls fn with each entry of the journal bucket whose bytes are b, in order, and its offset
// in bytes. It returns why it stopped and where: what was found there in place of an entry, ErrNoJSet or
// ErrBadJSet, an entry that breaks the format, or nil at the end of the bucket. Source: F 6.3.
func ScanJournalBucket(b []byte, g *Geometry, fn func(offset int, j JSet)) (stop int, why error) {
	block := g.BlockBytes()
	at := 0
	for at < len(b) {
		j, err := DecodeJSet(b[at:], g)
		if err != nil {
			return at, err
		}
		fn(at, j)
		at += int(divUp(uint64(j.Bytes()), uint64(block))) * block
	}
	return at, nil
}
