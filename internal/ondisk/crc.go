package ondisk

// CRC continues the format's CRC-64 (polynomial 0x42F0E1EBA9EA3693, most significant bit first) from seed over
// data. Source: F 2.
func CRC(seed uint64, data []byte) uint64 {
	for _, b := range data {
		seed = crcTable[byte(seed>>56)^b] ^ seed<<8
	}
	return seed
}

// Checksum is the checksum of all structures but version 1 bsets.
func Checksum(data []byte) uint64 { return ^CRC(^uint64(0), data) }

// NodeChecksum is the checksum of a version 1 bset in the node that the pointer word ptr refers to.
func NodeChecksum(ptr uint64, data []byte) uint64 { return ^CRC(ptr, data) }

var crcTable = func() (t [256]uint64) {
	for i := range t {
		c := uint64(i) << 56
		for range 8 {
			c = c<<1 ^ uint64(int64(c)>>63)&0x42F0E1EBA9EA3693
		}
		t[i] = c
	}
	return t
}()
