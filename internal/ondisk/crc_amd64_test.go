//go:build !purego

package ondisk

import "testing"

func testCRCConstants(t *testing.T, power func(n int) uint64, quotient uint64) {
	k := crcFoldingConstants
	if k.by64 != [2]uint64{power(512), power(576)} || k.by16 != [2]uint64{power(128), power(192)} || k.quot != quotient {
		t.Errorf("folding constants are wrong: %x", k)
	}
}
