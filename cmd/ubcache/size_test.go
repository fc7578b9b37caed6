package main

import (
	"math"
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{
		"0": 0, "1": 1, "512": 512, "512b": 512, "512k": 512 << 10, "512K": 512 << 10, "512KiB": 512 << 10, "4kib": 4096,
		"4M": 4 << 20, "4GiB": 4 << 30, "1T": 1 << 40, "2P": 2 << 50, "7E": 7 << 60, "16s": 8192, "007": 7,
		"9223372036854775807": math.MaxInt64,
	} {
		if n, err := parseSize(s); err != nil || n != want {
			t.Errorf("%q: %d, %v; want %d", s, n, err, want)
		}
	}
	for s, want := range map[string]string{
		"":                      "does not begin with a digit",
		"k":                     "does not begin with a digit",
		" 1":                    "does not begin with a digit",
		"+1":                    "does not begin with a digit",
		"-1":                    "is negative",
		"-0":                    "is negative",
		"64kx":                  `unknown unit "kx"`,
		"1.5G":                  `unknown unit ".5G"`,
		"1 k":                   `unknown unit " k"`,
		"0x10":                  `unknown unit "x10"`,
		"1KB":                   `unknown unit "KB"`,
		"1kiB2":                 `unknown unit "kiB2"`,
		"8E":                    "too large",
		"9223372036854775808":   "too large",
		"9007199254740992k":     "too large",
		"18014398509481984s":    "too large",
		"99999999999999999999":  "too large",
		"99999999999999999999k": "too large",
	} {
		if n, err := parseSize(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %d, %v; want %q", s, n, err, want)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"1", "512k", "4GiB", "-1", "9223372036854775807", "8E", "16s", "1KB", "1ĸ"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseSize(s)
		if err != nil {
			return
		}
		if n < 0 {
			t.Fatalf("%q gives %d", s, n)
		}
		if back, err := parseSize(formatSize(n)); err != nil || back != n {
			t.Fatalf("%d is written as %q and read as %d, %v", n, formatSize(n), back, err)
		}
	})
}
