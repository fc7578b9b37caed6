package ondisk

import (
	"encoding/binary"
	"fmt"
)

// BSetHeaderBytes is the size of a bset's header; its keys follow.
const BSetHeaderBytes = 32

// A BSet heads one sorted run of keys in a btree node. Little endian, offsets in bytes:
//
//	0 csum u64     8 magic u64     16 seq u64     24 version u32     28 keys u32 (in u64 words)
//
// Keys follow at 32. csum is the CRC-64 of all after itself, seeded with the first pointer word of the key
// that refers to the node (version 1) or with ones (version 0). Source: F 5.2.
type BSet struct {
	Csum    uint64
	Magic   uint64
	Seq     uint64
	Version uint32
	Keys    uint32 // words
	Data    []byte // the keys, 8*Keys bytes, part of the bytes decoded
	Block   uint32 // where in its node the set begins, in blocks
}

// bsetSeq is where a block of a node would hold the seq of a bset that begins there.
const bsetSeq = 16

// Bytes returns the size of header and keys, not rounded up.
func (s *BSet) Bytes() int { return BSetHeaderBytes + 8*int(s.Keys) }

// decodeBSet reads the set at the start of b, b being the rest of its node. ptr is the seed of its checksum.
func decodeBSet(b []byte, blockBytes int, magic, ptr uint64) (s BSet, err error) {
	le := binary.LittleEndian
	s = BSet{Csum: le.Uint64(b), Magic: le.Uint64(b[8:]), Seq: le.Uint64(b[bsetSeq:]), Version: le.Uint32(b[24:]), Keys: le.Uint32(b[28:])}
	end := BSetHeaderBytes + 8*uint64(s.Keys)
	switch {
	case s.Version > 1:
		return s, corrupt("bset", 24, "version", "is %d, known are 0 and 1 (kernel: %q)", s.Version, "unsupported bset version")
	case divUp(end, uint64(blockBytes))*uint64(blockBytes) > uint64(len(b)):
		return s, corrupt("bset", 28, "keys", "is %d words, %d bytes with the header: only %d are left in the node (kernel: %q)",
			s.Keys, end, len(b), "bad btree header")
	case s.Magic != magic:
		return s, corrupt("bset", 8, "magic", "is %016x, want %016x (kernel: %q)", s.Magic, magic, "bad magic")
	}
	s.Data = b[BSetHeaderBytes:end:end]
	want := Checksum(b[8:end])
	if s.Version == 1 {
		want = NodeChecksum(ptr, b[8:end])
	}
	if s.Csum != want {
		return s, corrupt("bset", 0, "csum", "is %016x, computed %016x (kernel: %q)", s.Csum, want, "bad checksum")
	}
	return s, nil
}

// EncodeBSet writes a version 1 set with keys, the words of its keys, to the start of b, which must have room
// for 32+len(keys) bytes, and returns that length. ptr is the first pointer word of the node's own key.
func EncodeBSet(b []byte, magic, seq uint64, ptr Ptr, keys []byte) int {
	le := binary.LittleEndian
	n := BSetHeaderBytes + len(keys)
	le.PutUint64(b[8:], magic)
	le.PutUint64(b[bsetSeq:], seq)
	le.PutUint32(b[24:], 1)
	le.PutUint32(b[28:], uint32(len(keys)/8))
	copy(b[BSetHeaderBytes:n], keys)
	le.PutUint64(b, NodeChecksum(uint64(ptr), b[8:n]))
	return n
}

// EachKey calls fn with every key of the set in order. It stops with an error where the words do not make up
// whole keys, and where fn returns false without one.
func (s *BSet) EachKey(fn func(k *Key) bool) error {
	for b := s.Data; len(b) > 0; {
		k, n, err := DecodeKey(b)
		if err != nil {
			return fmt.Errorf("bset at block %d, byte %d: %w", s.Block, BSetHeaderBytes+len(s.Data)-len(b), err)
		}
		if !fn(&k) {
			return nil
		}
		b = b[n:]
	}
	return nil
}

// A Node is a btree node as read: its bsets, oldest first.
type Node struct {
	Seq  uint64
	Sets []BSet // each sound, except none where Err says so
	Used uint32 // blocks up to the end of the last sound set

	// Err is what is wrong with the node, nil if nothing; the sets before the bad one are in Sets. BadBlock is
	// where the bad set begins. Torn says that Err is about the last thing in the node, which a write cut off
	// by a power loss can leave: nothing behind it has the node's seq.
	Err      error
	BadBlock uint32
	Torn     bool

	// Bad is the set at BadBlock where nothing but its checksum is wrong; its keys may be anything.
	Bad *BSet
}

// DecodeNode reads a node from b, the whole of its KEY_SIZE sectors. ref is the key that refers to it. The
// sets share b's memory. The result's Err is what the kernel would refuse the node for. Source: F 5.3.
func DecodeNode(b []byte, g *Geometry, ref *Key) *Node {
	n := &Node{}
	block := g.BlockBytes()
	if len(b) == 0 || len(b)%block != 0 {
		n.Err = corrupt("bset", 0, "node size", "is %d bytes, not a multiple of the block's %d", len(b), block)
		return n
	}
	total := uint32(len(b) / block)
	seqAt := func(blk uint32) uint64 { return binary.LittleEndian.Uint64(b[int(blk)*block+bsetSeq:]) }
	n.Seq = seqAt(0)
	if n.Seq == 0 {
		n.Err = corrupt("bset", bsetSeq, "seq", "is 0 in block 0 (kernel: %q)", "bad btree header")
		return n
	}
	for n.Used < total && seqAt(n.Used) == n.Seq {
		s, err := decodeBSet(b[int(n.Used)*block:], block, g.BSetMagic(), uint64(ref.P[0]))
		s.Block = n.Used
		if err == nil && n.Used > 0 && s.Keys == 0 {
			err = corrupt("bset", 28, "keys", "is 0 in a set that is not the first (kernel: %q)", "empty set")
		}
		if err != nil {
			n.Err, n.BadBlock = err, n.Used
			// Only a set whose length can be believed says what lies behind it; otherwise look at every block.
			n.Torn = n.Used > 0 && !seqBehind(b, block, n.Used+1, total, n.Seq)
			if s.Data != nil {
				n.Bad = &s
			}
			return n
		}
		n.Sets = append(n.Sets, s)
		n.Used += uint32(divUp(uint64(s.Bytes()), uint64(block)))
	}
	if n.Used < total && seqBehind(b, block, n.Used, total, n.Seq) {
		n.Err = corrupt("bset", bsetSeq, "seq", "is the node's own in a block behind its last set (kernel: %q)", "corrupted btree")
		n.BadBlock = n.Used
	} else if n.Used < total && lostSet(b[int(n.Used)*block:], block, g.BSetMagic(), n.Seq, uint64(ref.P[0])) {
		n.Err = corrupt("bset", bsetSeq, "seq", "is %016x, and the set is right with the node's own, %016x", seqAt(n.Used), n.Seq)
		n.BadBlock = n.Used
	}
	return n
}

// lostSet reports whether a set stands at b that is right but for its seq: without that it looks like the end
// of the node, and to a kernel it does.
func lostSet(b []byte, block int, magic, seq, ptr uint64) bool {
	s, err := decodeBSet(b, block, magic, ptr)
	if err == nil || s.Data == nil || s.Keys == 0 || s.Version == 0 {
		return false
	}
	var head [BSetHeaderBytes]byte
	copy(head[:], b)
	binary.LittleEndian.PutUint64(head[bsetSeq:], seq)
	return ^CRC(CRC(ptr, head[8:]), s.Data) == s.Csum
}

// seqBehind reports whether a block in [from, to) has seq where a bset would have it.
func seqBehind(b []byte, block int, from, to uint32, seq uint64) bool {
	for blk := from; blk < to; blk++ {
		if binary.LittleEndian.Uint64(b[int(blk)*block+bsetSeq:]) == seq {
			return true
		}
	}
	return false
}
