package sim

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// variable is what the environment asks for certain runs with: "seed=7 cut=123 strength=torn", or parts of it, or
// "seeds=100-199".
const variable = "UBCACHE_SIM"

// only is what is asked for; nil or "": all.
type only struct {
	seeds    []uint64
	seed     *uint64
	cut      *int
	strength string
}

func fromEnvironment() (only, error) { return parseOnly(os.Getenv(variable)) }

func parseOnly(s string) (only, error) {
	var o only
	for _, f := range strings.Fields(s) {
		key, value, _ := strings.Cut(f, "=")
		var err error
		switch key {
		case "seed":
			o.seed = new(uint64)
			*o.seed, err = strconv.ParseUint(value, 0, 64)
		case "seeds":
			var first, last uint64
			if _, err = fmt.Sscanf(value, "%d-%d", &first, &last); err == nil && (last < first || last-first > 1<<20) {
				err = fmt.Errorf("seeds %s: want first-last", value)
			}
			for n := first; err == nil && n <= last; n++ {
				o.seeds = append(o.seeds, n)
			}
		case "cut":
			o.cut = new(int)
			if value == "never" {
				*o.cut = uncut
				break
			}
			*o.cut, err = strconv.Atoi(value)
		case "strength":
			o.strength = value
			if _, ok := strength(value); !ok && value != "kill" && value != "stop" {
				err = fmt.Errorf("no strength %q: want prefix, reordered, torn, kill or stop", value)
			}
		default:
			err = fmt.Errorf("no key %q: want seed, seeds, cut, strength", key)
		}
		if err != nil {
			return only{}, fmt.Errorf("%s=%q: %w", variable, s, err)
		}
	}
	return o, nil
}

func strength(name string) (blockdev.Strength, bool) {
	for s := blockdev.Prefix; s <= blockdev.Torn; s++ {
		if s.String() == name {
			return s, true
		}
	}
	return 0, false
}

// Seeds returns the numbers from 0 to n-1, or those that the environment asks for by
//
//	UBCACHE_SIM="seed=7 cut=123 strength=torn"
//	UBCACHE_SIM="seeds=100-199"
//
// of which cut and strength are for Loop.Run, and may be left out.
func Seeds(n int) []uint64 {
	if o, err := fromEnvironment(); err == nil { // else Run complains
		switch {
		case o.seed != nil:
			return []uint64{*o.seed}
		case o.seeds != nil:
			return o.seeds
		}
	}
	list := make([]uint64, n)
	for i := range list {
		list[i] = uint64(i)
	}
	return list
}

// command returns what repeats one run of a test.
func command(test string, seed uint64, cut int, strength string) string {
	at := strconv.Itoa(cut)
	if cut == uncut {
		at = "never"
	}
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	pattern := strings.ReplaceAll(strings.Join(parts, "/"), "'", `'\''`)
	return fmt.Sprintf("%s=\"seed=%d cut=%s strength=%s\" go test -run '%s' %s", variable, seed, at, strength, pattern, here())
}

// here returns the package whose test runs, as go test wants it from the top of the module.
func here() string {
	dir, err := os.Getwd()
	if err != nil {
		return "."
	}
	for up := dir; ; up = filepath.Dir(up) {
		if _, err := os.Stat(filepath.Join(up, "go.mod")); err == nil {
			if rel, err := filepath.Rel(up, dir); err == nil {
				return "./" + filepath.ToSlash(rel)
			}
		}
		if up == filepath.Dir(up) {
			return "."
		}
	}
}
