package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
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
func formatSize(n int64) string {
	units := []string{"", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	i := 0
	for n != 0 && n&1023 == 0 && i < len(units)-1 {
		n >>= 10
		i++
	}
	return strconv.FormatInt(n, 10) + units[i]
}

// sizeValue is a flag that holds a size in bytes.
type sizeValue struct {
	to  *int64
	set bool
}

func (v *sizeValue) Set(s string) (err error) {
	*v.to, err = parseSize(s)
	v.set = err == nil
	return err
}

func (v *sizeValue) String() string {
	if v.to == nil || *v.to == 0 {
		return "0" // the default of a flag whose value is worked out
	}
	return formatSize(*v.to)
}
func (v *sizeValue) Type() string { return "SIZE" }
