package ondisk

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math/bits"
)

// SectorSize is the unit of every address and length on disk, in bytes, whatever the device's own block is.
const SectorSize = 512

// PageSize is the page size, in bytes, that the format's limits are computed with: that of x86-64.
const PageSize = 4096

const (
	pageSectors = PageSize / SectorSize

	// maxOrderPages is the largest run of pages that the kernel allocates in one piece on x86-64; it bounds
	// how much of a bucket metadata can use.
	maxOrderPages = 1024
)

// Limits of the format.
const (
	MaxJournalBuckets = 256          // superblock's d[]
	MaxJSetBytes      = 8 * PageSize // largest journal entry
	MaxStale          = 96           // no leaf pointer may be older than its bucket by more generations
	MaxInode          = 1<<20 - 1    // of a key
	MaxOffset         = 1<<63 - 1    // of a key, sectors
	MaxKeySize        = 1<<16 - 1    // sectors
	MaxKeyPtrs        = 6            // pointers in one key
	MinCacheBuckets   = 513          // fewer and no kernel activates the set
	MinJournalBuckets = 4            // fewer and the ring does not advance at run time
	DefaultDataOffset = 16           // sectors
	CheckDev          = 4095         // PTR_DEV of a check key
	maxMetaSectors    = pageSectors * maxOrderPages
)

// A UUID is 16 bytes in the order of its text.
type UUID [16]byte

// RetiredUUID marks a slot whose device was detached or whose volume was deleted. Source: invalid_uuid, F 8.2.
var RetiredUUID = UUID{0xa0, 0x3e, 0xf8, 0xed, 0x3e, 0xe1, 0xb8, 0x78, 0xc8, 0x50, 0xfc, 0x5e, 0xcb, 0x16, 0xcd, 0x99}

// IsZero reports whether all bytes are zero: no uuid, or a slot that was never used.
func (u UUID) IsZero() bool { return u == UUID{} }

// String returns the usual 36-character form in lower case.
func (u UUID) String() string {
	var b [36]byte
	hex.Encode(b[0:8], u[0:4])
	hex.Encode(b[9:13], u[4:6])
	hex.Encode(b[14:18], u[6:8])
	hex.Encode(b[19:23], u[8:10])
	hex.Encode(b[24:36], u[10:16])
	b[8], b[13], b[18], b[23] = '-', '-', '-', '-'
	return string(b[:])
}

// MarshalText makes a UUID a string in JSON.
func (u UUID) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText is the reverse of MarshalText.
func (u *UUID) UnmarshalText(b []byte) (err error) {
	*u, err = ParseUUID(string(b))
	return err
}

// ParseUUID reads the 36-character form, in either case.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return u, fmt.Errorf("%q is not a UUID: want 8-4-4-4-12 hexadecimal digits", s)
	}
	for i, r := range [][2]int{{0, 8}, {9, 13}, {14, 18}, {19, 23}, {24, 36}} {
		at := []int{0, 4, 6, 8, 10}[i]
		if _, err := hex.Decode(u[at:], []byte(s[r[0]:r[1]])); err != nil {
			return UUID{}, fmt.Errorf("%q is not a UUID: %w", s, err)
		}
	}
	return u, nil
}

// NewUUID returns a random (version 4) UUID.
func NewUUID() UUID {
	var u UUID
	rand.Read(u[:]) // never fails
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

// GenAfter returns how many generations a is ahead of b, 0 where b is ahead: generations are 8-bit and wrap.
func GenAfter(a, b uint8) uint8 {
	if d := a - b; d <= 128 {
		return d
	}
	return 0
}

func isPow2(n uint64) bool { return n != 0 && n&(n-1) == 0 }

// pow2up returns the smallest power of two not below n, for n up to 1<<63.
func pow2up(n uint64) uint64 {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len64(n-1)
}

func divUp(a, b uint64) uint64 { return (a + b - 1) / b }
