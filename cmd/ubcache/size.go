package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/ubcache/ubcache/internal/offline"
)

// parseSize reads a size: digits, then nothing for bytes, k M G T P E for powers of 1024 (in either case, also
// as KiB and so on), or s for sectors of 512 bytes. There are no fractions, signs or spaces, and KB is refused:
// to some it means 1000.
func parseSize(s string) (int64, error) {
	digits := len(s) - len(strings.TrimLeft(s, "0123456789"))
	if strings.HasPrefix(s, "-") {
		return 0, fmt.Errorf("size %q is negative", s)
	}
	if digits == 0 {
		return 0, fmt.Errorf("size %q does not begin with a digit", s)
	}
	factor := int64(1)
	switch unit := strings.ToLower(s[digits:]); {
	case unit == "" || unit == "b":
	case unit == "s":
		factor = 512
	case len(unit) == 1 && strings.Contains("kmgtpe", unit), len(unit) == 3 && unit[1:] == "ib" && strings.Contains("kmgtpe", unit[:1]):
		factor = 1 << (10 * (1 + strings.Index("kmgtpe", unit[:1])))
	default:
		return 0, fmt.Errorf("size %q has the unknown unit %q: want k, M, G, T, P or E for powers of 1024 (or KiB and so on), "+
			"s for sectors of 512 bytes, or none for bytes", s, s[digits:])
	}
	n, err := strconv.ParseInt(s[:digits], 10, 64)
	if err != nil || n > math.MaxInt64/factor {
		return 0, fmt.Errorf("size %q is too large: at most %d bytes", s, int64(math.MaxInt64))
	}
	return n * factor, nil
}

// formatSize is the reverse of parseSize: with the largest unit that divides n.
func formatSize(n int64) string { return strings.TrimSuffix(offline.SizeText(n), " bytes") }

// sizeValue is a flag that holds a size in bytes.
type sizeValue struct {
	to    *int64
	least int64
}

func (v *sizeValue) Set(s string) error {
	n, err := parseSize(s)
	if err == nil && n < v.least {
		err = fmt.Errorf("size %q: must be at least %s", s, offline.SizeText(v.least))
	}
	if err != nil {
		return err
	}
	*v.to = n
	return nil
}

// String gives "0", which help does not print as a default, where the value is still to be worked out.
func (v *sizeValue) String() string {
	if v.to == nil {
		return "0"
	}
	return formatSize(*v.to)
}
func (v *sizeValue) Type() string { return "SIZE" }
