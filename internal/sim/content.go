package sim

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// What a block holds says where it belongs and which write put it there. Each sector is, in little-endian words:
//
//	0 magic    8 volume<<32 | sector within the block    16 block    24 number of the write    32 check of these
//	40 to 511: a stream that follows from the check
//
// Write 0 is what was there before the first. Zeroes are what they are: they say nothing.
const (
	sector   = 512
	tagMagic = 0x6b636f6c62677473 // "stgblock"
	tagBytes = 40
)

// A tag is what a sector says of itself.
type tag struct {
	volume, sector uint32
	block          uint64
	number         uint64
}

func (t tag) check() uint64 {
	h := uint64(tagMagic)
	for _, w := range [...]uint64{uint64(t.volume)<<32 | uint64(t.sector), t.block, t.number} {
		h = (h ^ w) * 0x9e3779b97f4a7c15
		h ^= h >> 29
	}
	return h
}

// stream returns a word of the rest of the sector.
func stream(check uint64, i int) uint64 {
	return bits.RotateLeft64((check+uint64(i))*0xd6e8feb86659fd93, 23)
}

// put fills one sector.
func (t tag) put(p []byte) {
	le := binary.LittleEndian
	check := t.check()
	le.PutUint64(p, tagMagic)
	le.PutUint64(p[8:], uint64(t.volume)<<32|uint64(t.sector))
	le.PutUint64(p[16:], t.block)
	le.PutUint64(p[24:], t.number)
	le.PutUint64(p[32:], check)
	for i := tagBytes; i < sector; i += 8 {
		le.PutUint64(p[i:], stream(check, i))
	}
}

// readTag returns what a sector says, and how many of its bytes, from the first, agree with that; 0 if it has no tag.
func readTag(p []byte) (t tag, agree int) {
	le := binary.LittleEndian
	where := le.Uint64(p[8:])
	t = tag{volume: uint32(where >> 32), sector: uint32(where), block: le.Uint64(p[16:]), number: le.Uint64(p[24:])}
	check := t.check()
	if le.Uint64(p) != tagMagic || le.Uint64(p[32:]) != check {
		return tag{}, 0
	}
	for i := tagBytes; i < sector; i += 8 {
		if le.Uint64(p[i:]) != stream(check, i) {
			return t, i
		}
	}
	return t, sector
}

// putBlocks fills p, which begins at a block of a volume, with what a write has there.
func putBlocks(p []byte, volume, block int, first int64, number uint64) {
	for at := 0; at < len(p); at += sector {
		b, s := at/block, at%block/sector
		tag{uint32(volume), uint32(s), uint64(first) + uint64(b), number}.put(p[at:])
	}
}

// Fill fills p, which begins at byte off of a volume, with what the volume holds before the first write, unless
// Volume.Zero says that those are zeroes. off and len(p) are multiples of the volume's block.
func Fill(p []byte, volume, block int, off int64) {
	if int(off)%block != 0 || len(p)%block != 0 {
		panic("sim: Fill of a part of a block")
	}
	putBlocks(p, volume, block, off/int64(block), 0)
}

// zeroes is the value of a block of zeroes; other values are numbers of writes.
const zeroes = ^uint64(0)

// identify returns the value of a block, or says what is wrong with it.
func identify(p []byte, volume int, block int64) (value uint64, wrong string) {
	t, agree := readTag(p)
	if agree == 0 {
		if isZero(p) {
			return zeroes, ""
		}
		return 0, describe(p)
	}
	for s := range len(p) / sector {
		want := tag{uint32(volume), uint32(s), uint64(block), t.number}
		if got, agree := readTag(p[s*sector:][:sector]); got != want || agree != sector {
			return 0, describe(p)
		}
	}
	return t.number, ""
}

// describe says what a block holds, run by run.
func describe(p []byte) string {
	n := len(p) / sector
	say := func(s int) string {
		one := p[s*sector:][:sector]
		t, agree := readTag(one)
		switch {
		case isZero(one):
			return "zeroes"
		case agree == 0:
			return fmt.Sprintf("unknown bytes (%x...)", one[:16])
		case agree < sector:
			return fmt.Sprintf("%v of block %d of volume %d up to byte %d, then other bytes", name(t.number), t.block, t.volume, agree)
		case int(t.sector) != s:
			return fmt.Sprintf("sector %d of %v of block %d of volume %d", t.sector, name(t.number), t.block, t.volume)
		}
		return fmt.Sprintf("%v of block %d of volume %d", name(t.number), t.block, t.volume)
	}
	text := ""
	for s := 0; s < n; {
		from, what := s, say(s)
		for s++; s < n && say(s) == what; s++ {
		}
		if from == 0 && s == n {
			return what
		}
		if text != "" {
			text += "; "
		}
		text += fmt.Sprintf("in sectors %d-%d %s", from, s-1, what)
	}
	return "a mixture: " + text
}

// name is the text form of a value.
func name(value uint64) string {
	switch value {
	case 0:
		return "the initial content"
	case zeroes:
		return "zeroes"
	}
	return fmt.Sprintf("write %d", value)
}

func isZero(p []byte) bool {
	for len(p) >= 8 && binary.LittleEndian.Uint64(p) == 0 {
		p = p[8:]
	}
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}
