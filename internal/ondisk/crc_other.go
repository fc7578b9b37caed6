//go:build !amd64 || purego

package ondisk

const (
	hasFastCRC = false
	minFastCRC = 0
)

func fastCRC(uint64, []byte) uint64 { panic("ondisk: no fast CRC on this processor") }
