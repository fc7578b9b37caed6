//go:build !purego

package ondisk

// minFastCRC is the length in bytes from which carry-less multiplication beats the tables.
const minFastCRC = 32

// hasFastCRC says whether the processor has the instructions that foldCRC uses: PCLMULQDQ, and PSHUFB of SSSE3.
// (The tests of a build with the tag purego show what a processor without them does.)
var hasFastCRC = func() bool {
	const pclmulqdq, ssse3 = 1 << 1, 1 << 9
	features := cpuFeatures()
	return features&pclmulqdq != 0 && features&ssse3 != 0
}()

// cpuFeatures returns register ECX of CPUID leaf 1. (This package imports nothing but the standard library, whose
// own knowledge of the processor is internal.)
func cpuFeatures() uint32

// foldCRC is CRC over the n bytes at p, n at least 16 and a multiple of 16.
//
//go:noescape
func foldCRC(seed uint64, p *byte, n int, k *crcFolding) uint64

// crcFolding holds the constants of foldCRC. A block of 16 bytes is a polynomial H*x^64 + L whose highest term is
// the first bit; its value D bits further to the left is, modulo the polynomial, H * (x^(D+64) mod P) +
// L * (x^D mod P): 128 bits again, to be added to the block that stands there. Four lanes fold over 64 bytes, the
// last steps over 16. The 128 bits that remain are reduced as H. D. Barrett does: the quotient is the upper half
// of the dividend times floor(x^128 / P).
type crcFolding struct {
	by64  [2]uint64 // x^512, x^576 mod P
	by16  [2]uint64 // x^128, x^192 mod P
	quot  uint64    // x^128 / P without its highest term, x^64
	poly  uint64
	swaps [2]uint64 // for PSHUFB: the first byte to the upper end
}

var crcFoldingConstants = crcFolding{
	by64:  [2]uint64{crcPower(512), crcPower(576)},
	by16:  [2]uint64{crcPower(128), crcPower(192)},
	quot:  crcQuotient(),
	poly:  crcPoly,
	swaps: [2]uint64{0x08090a0b0c0d0e0f, 0x0001020304050607},
}

// crcPower returns x^n mod P, for n of at least 64.
func crcPower(n int) uint64 {
	c := uint64(crcPoly) // x^64
	for ; n > 64; n-- {
		c = crcShift(c)
	}
	return c
}

// crcQuotient returns x^128 / P without the term x^64, by long division.
func crcQuotient() (q uint64) {
	c := uint64(crcPoly) // what is left of x^128, divided by x^64, after the term x^64 of the quotient
	for range 64 {
		q = q<<1 | c>>63
		c = crcShift(c)
	}
	return q
}

func fastCRC(seed uint64, p []byte) uint64 {
	n := len(p) &^ 15
	crc := foldCRC(seed, &p[0], n, &crcFoldingConstants)
	if n < len(p) {
		crc = portableCRC(crc, p[n:])
	}
	return crc
}
