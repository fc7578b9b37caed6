package ondisk

import "encoding/binary"

// crcPoly is ECMA-182: the polynomial x^64 + x^62 + ... + 1 without its highest term.
const crcPoly = 0x42F0E1EBA9EA3693

// CRC continues the format's CRC-64 from seed over data: polynomial 0x42F0E1EBA9EA3693, most significant bit
// first, no inversion before or after. CRC(CRC(seed, a), b) is CRC(seed, a followed by b). Source: F 2.
func CRC(seed uint64, data []byte) uint64 {
	if hasFastCRC && len(data) >= minFastCRC {
		return fastCRC(seed, data)
	}
	return portableCRC(seed, data)
}

// Checksum is the checksum of all structures but version 1 bsets (csum_std of F 2, elsewhere called CRC-64/WE).
func Checksum(data []byte) uint64 { return ^CRC(^uint64(0), data) }

// NodeChecksum is the checksum of a version 1 bset in the node that the pointer word ptr refers to (csum_node of
// F 2).
func NodeChecksum(ptr uint64, data []byte) uint64 { return ^CRC(ptr, data) }

// crcTables[k][b] is what the byte b leaves in the register when k more bytes have been shifted in after it:
// b * x^(64+8k) modulo the polynomial. So any 16 bytes are taken in one step, as 16 look-ups that do not depend
// on each other; crcTables[0] alone takes one byte.
//
// It is a pointer because the code for that is shorter than for an array at a fixed address.
var crcTables = func() *[16][256]uint64 {
	t := new([16][256]uint64)
	for b := range t[0] {
		c := uint64(b) << 56
		for range 8 {
			c = crcShift(c)
		}
		t[0][b] = c
	}
	for k := 1; k < len(t); k++ {
		for b, c := range t[k-1] {
			t[k][b] = t[0][c>>56] ^ c<<8
		}
	}
	return t
}()

// crcShift multiplies the register by x, modulo the polynomial.
func crcShift(c uint64) uint64 { return c<<1 ^ uint64(int64(c)>>63)&crcPoly }

func portableCRC(crc uint64, p []byte) uint64 {
	t := crcTables
	for len(p) >= 16 {
		// The next step waits for crc, so what depends on it comes last and as a tree.
		b := binary.BigEndian.Uint64(p[8:])
		rest := t[7][b>>56] ^ t[6][b>>48&0xff] ^ t[5][b>>40&0xff] ^ t[4][b>>32&0xff] ^
			t[3][b>>24&0xff] ^ t[2][b>>16&0xff] ^ t[1][b>>8&0xff] ^ t[0][b&0xff]
		a := binary.BigEndian.Uint64(p) ^ crc
		crc = rest ^
			((t[15][a>>56] ^ t[14][a>>48&0xff]) ^ (t[13][a>>40&0xff] ^ t[12][a>>32&0xff])) ^
			((t[11][a>>24&0xff] ^ t[10][a>>16&0xff]) ^ (t[9][a>>8&0xff] ^ t[8][a&0xff]))
		p = p[16:]
	}
	if len(p) >= 8 {
		a := binary.BigEndian.Uint64(p) ^ crc
		crc = ((t[7][a>>56] ^ t[6][a>>48&0xff]) ^ (t[5][a>>40&0xff] ^ t[4][a>>32&0xff])) ^
			((t[3][a>>24&0xff] ^ t[2][a>>16&0xff]) ^ (t[1][a>>8&0xff] ^ t[0][a&0xff]))
		p = p[8:]
	}
	for _, b := range p {
		crc = t[0][byte(crc>>56)^b] ^ crc<<8
	}
	return crc
}
