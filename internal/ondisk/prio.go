package ondisk

import "encoding/binary"

const (
	prioHeaderBytes = 40
	prioEntryBytes  = 3
)

// Priorities with a meaning.
const (
	PrioMetadata = 65535
	PrioInitial  = 32768
)

// A PrioSet holds generation and priority of a run of buckets. It fills the metadata part of a bucket. Little
// endian, offsets in bytes:
//
//	0 csum u64   8 magic u64   16 seq u64   24 version u32   28 pad u32   32 next_bucket u64
//	40 entries of 3 bytes: prio u16, gen u8
//
// csum covers all after itself, the unused tail too. Source: F 7.
type PrioSet struct {
	Csum       uint64
	Magic      uint64
	Seq        uint64
	Version    uint32
	Pad        uint32
	NextBucket uint64 // of the next set; in the last one without meaning
	Data       []byte // entries, 3 bytes each, and the tail
}

// DecodePrioSet reads a set from b, MetaBytes long. Data is part of b. A wrong checksum or magic is a
// *CorruptError.
func DecodePrioSet(b []byte, g *Geometry) (p PrioSet, err error) {
	if len(b) != g.MetaBytes() {
		return p, corrupt("prio_set", 0, "length", "is %d bytes, want %d", len(b), g.MetaBytes())
	}
	le := binary.LittleEndian
	p = PrioSet{
		Csum: le.Uint64(b), Magic: le.Uint64(b[8:]), Seq: le.Uint64(b[16:]), Version: le.Uint32(b[24:]), Pad: le.Uint32(b[28:]),
		NextBucket: le.Uint64(b[32:]), Data: b[prioHeaderBytes:],
	}
	if want := Checksum(b[8:]); p.Csum != want {
		return p, corrupt("prio_set", 0, "csum", "is %016x, computed %016x (kernel: %q)", p.Csum, want, "bad csum reading priorities")
	}
	if p.Magic != g.PrioMagic() {
		return p, corrupt("prio_set", 8, "magic", "is %016x, want %016x (kernel: %q)", p.Magic, g.PrioMagic(), "bad magic reading priorities")
	}
	return p, nil
}

// Len returns how many entries the set has room for.
func (p *PrioSet) Len() int { return len(p.Data) / prioEntryBytes }

// Entry returns priority and generation of the set's ith bucket.
func (p *PrioSet) Entry(i int) (prio uint16, gen uint8) {
	e := p.Data[prioEntryBytes*i:]
	return binary.LittleEndian.Uint16(e), e[2]
}

// SetEntry stores priority and generation of the set's ith bucket.
func (p *PrioSet) SetEntry(i int, prio uint16, gen uint8) {
	e := p.Data[prioEntryBytes*i:]
	binary.LittleEndian.PutUint16(e, prio)
	e[2] = gen
}

// Encode writes the set to b, 40+len(Data) bytes, and sets Csum. Data may already be b's own.
func (p *PrioSet) Encode(b []byte) {
	le := binary.LittleEndian
	b = b[:prioHeaderBytes+len(p.Data)]
	le.PutUint64(b[8:], p.Magic)
	le.PutUint64(b[16:], p.Seq)
	le.PutUint32(b[24:], p.Version)
	le.PutUint32(b[28:], p.Pad)
	le.PutUint64(b[32:], p.NextBucket)
	copy(b[prioHeaderBytes:], p.Data)
	p.Csum = Checksum(b[8:])
	le.PutUint64(b, p.Csum)
}
