package ondisk

import (
	"bytes"
	"fmt"
	"math/big"
	"math/rand/v2"
	"testing"
)

// bitwiseCRC is the definition.
func bitwiseCRC(crc uint64, data []byte) uint64 {
	for _, b := range data {
		crc ^= uint64(b) << 56
		for range 8 {
			top := crc>>63 != 0
			crc <<= 1
			if top {
				crc ^= 0x42F0E1EBA9EA3693
			}
		}
	}
	return crc
}

// crcVariants are the ways to compute it that this processor has.
func crcVariants() map[string]func(uint64, []byte) uint64 {
	v := map[string]func(uint64, []byte) uint64{"CRC": CRC, "portable": portableCRC}
	if hasFastCRC {
		v["fast"] = func(seed uint64, p []byte) uint64 {
			if len(p) < 16 {
				return portableCRC(seed, p) // fastCRC asks for 16 bytes
			}
			return fastCRC(seed, p)
		}
	}
	return v
}

func allBytes() []byte {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

func TestCRCVectors(t *testing.T) {
	for _, c := range []struct {
		name            string
		data            []byte
		std, zero, node uint64
	}{
		{"empty", nil, 0x0000000000000000, 0x0000000000000000, 0xFEDCBA9876543210},
		{"0x00", make([]byte, 1), 0x9AFCE626CE85B5F8, 0x0000000000000000, 0x9E4A799DFDD8266C},
		{"a", []byte("a"), 0xCE73F427ACC0A99A, 0x548F120162451C62, 0xCAC56B9C9F9D3A0E},
		{"123456789", []byte("123456789"), 0x62EC59E3F1A4F00A, 0x6C40DF5F0B497347, 0xEF391A534651A8BB},
		{"32 x 0x00", make([]byte, 32), 0x30CCAB3E861F5A93, 0x0000000000000000, 0x1D61ED3E765E3A2B},
		{"32 x 0xFF", bytes.Repeat([]byte{0xff}, 32), 0xF359055F7973BA97, 0xC395AE61FF6CE004, 0xDEF4435F8932DA2F},
		{"00 to FF", allBytes(), 0x59C3325B2927A19A, 0x62B0DA1C1B130A91, 0x2BEBC2883BDE6EEF},
		{"4096 x 0x00", make([]byte, 4096), 0xA50F57A429CBCB64, 0x0000000000000000, 0xE96A4A2076C8713D},
	} {
		const ptr = 0x0123456789ABCDEF
		for name, crc := range crcVariants() {
			if got := ^crc(^uint64(0), c.data); got != c.std {
				t.Errorf("%s: %s: csum_std %016X, want %016X", name, c.name, got, c.std)
			}
			if got := crc(0, c.data); got != c.zero {
				t.Errorf("%s: %s: CRC(0) %016X, want %016X", name, c.name, got, c.zero)
			}
			if got := ^crc(ptr, c.data); got != c.node {
				t.Errorf("%s: %s: csum_node %016X, want %016X", name, c.name, got, c.node)
			}
		}
		if Checksum(c.data) != c.std || NodeChecksum(ptr, c.data) != c.node {
			t.Errorf("%s: Checksum or NodeChecksum is wrong", c.name)
		}
	}
	if crcTables[0][1] != 0x42F0E1EBA9EA3693 || crcTables[0][255] != 0x9AFCE626CE85B507 {
		t.Error("the table is wrong")
	}
}

func TestCRCVariantsAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, 700)
	for i := range buf {
		buf[i] = byte(rng.Uint32())
	}
	for n := range 601 {
		seed := rng.Uint64()
		data := buf[n%17:][:n] // starts at all alignments
		want := bitwiseCRC(seed, data)
		for name, crc := range crcVariants() {
			if got := crc(seed, data); got != want {
				t.Fatalf("%s of %d bytes: %016X, want %016X", name, n, got, want)
			}
		}
	}
}

// TestCRCReadsOnlyItsBytes changes what lies around the data.
func TestCRCReadsOnlyItsBytes(t *testing.T) {
	for n := 16; n < 300; n++ {
		buf := make([]byte, n+64)
		want := CRC(5, buf[32:32+n])
		for i := range 32 {
			buf[i], buf[32+n+i] = 0xff, 0xff
		}
		if got := CRC(5, buf[32:32+n]); got != want {
			t.Fatalf("the CRC of %d bytes depends on others", n)
		}
	}
}

func TestCRCInPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	data := make([]byte, 5000)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	want := CRC(7, data)
	for range 200 {
		cut := rng.IntN(len(data) + 1)
		if got := CRC(CRC(7, data[:cut]), data[cut:]); got != want {
			t.Fatalf("cut at %d: %016X, want %016X", cut, got, want)
		}
	}
}

// TestCRCPowers holds the arithmetic that the constants come from against math/big's integers, read as
// polynomials.
func TestCRCPowers(t *testing.T) {
	poly := new(big.Int).SetUint64(crcPoly)
	poly.SetBit(poly, 64, 1)
	divide := func(n int) (quotient, rest *big.Int) { // x^n by poly
		quotient, rest = new(big.Int), new(big.Int)
		rest.SetBit(rest, n, 1)
		for d := rest.BitLen() - 65; d >= 0; d = rest.BitLen() - 65 {
			quotient.SetBit(quotient, d, 1)
			rest.Xor(rest, new(big.Int).Lsh(poly, uint(d)))
		}
		return quotient, rest
	}
	c := uint64(1)
	for n := range 600 {
		if _, want := divide(n); want.Uint64() != c {
			t.Fatalf("x^%d mod P is %016X, want %016X", n, c, want)
		}
		c = crcShift(c)
	}
	quotient, _ := divide(128)
	testCRCConstants(t, func(n int) uint64 { _, r := divide(n); return r.Uint64() }, quotient.SetBit(quotient, 64, 0).Uint64())
}

func FuzzCRC(f *testing.F) {
	f.Add(uint64(0), []byte("123456789"))
	f.Add(^uint64(0), make([]byte, 64))
	f.Add(uint64(1), allBytes())
	f.Fuzz(func(t *testing.T, seed uint64, data []byte) {
		want := bitwiseCRC(seed, data)
		for name, crc := range crcVariants() {
			if got := crc(seed, data); got != want {
				t.Errorf("%s: %016X, want %016X", name, got, want)
			}
		}
	})
}

func BenchmarkCRC(b *testing.B) {
	for _, name := range []string{"portable", "fast"} {
		crc, ok := crcVariants()[name]
		if !ok {
			continue
		}
		for _, n := range []int{64, 512, 4096, 65536} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				data := make([]byte, n)
				b.SetBytes(int64(n))
				c := uint64(0)
				for b.Loop() {
					c = crc(c, data)
				}
			})
		}
	}
}
