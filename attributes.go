package ubcache

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/volume"
	"github.com/ubcache/ubcache/internal/writeback"
)

// Objects that have attributes, beside the volumes.
const (
	objectSet   = "set"
	objectCache = "cache"
)

// An Attribute is a value under the name and in the form that the kernel's sysfs has, without the newline.
type Attribute struct {
	Name, Value string
	Writable    bool
}

// An attr is how an attribute of T is read and set.
type attr[T any] struct {
	name string
	get  func(t T) string
	set  func(ctx context.Context, t T, value string) error // nil: read only
}

// An openVolume is a volume that has attributes, with its set.
type openVolume struct {
	*Volume
	set *CacheSet
}

var setAttributes = []attr[*CacheSet]{
	{"active_journal_entries", func(s *CacheSet) string { j := s.set.Info().Journal; return fmt.Sprint(j.Seq - j.LastSeq) }, nil},
	{"block_size", func(s *CacheSet) string { return human(int64(s.set.Geometry().BlockBytes())) }, nil},
	{"btree_cache_size", func(s *CacheSet) string { return human(int64(s.set.Info().NodeBytes)) }, nil},
	{"btree_nodes", btreeNodes, nil},
	{"btree_used_percent", btreeUsed, nil},
	{"bucket_size", func(s *CacheSet) string { return human(s.set.Geometry().BucketBytes()) }, nil},
	{"cache_available_percent", func(s *CacheSet) string { return fmt.Sprint(100 - s.set.Info().InUse) }, nil},
	{"cache_read_races", func(s *CacheSet) string {
		return sum(s, func(v *Volume) uint64 { return v.v.Stats().ReadRaces })
	}, nil},
	{"copy_gc_enabled", func(s *CacheSet) string { return fmt.Sprint(number(s.set.Moving())) }, func(_ context.Context, s *CacheSet, value string) error {
		n, err := integer("copy_gc_enabled", value, 0, 1)
		if err == nil {
			s.set.SetMoving(n == 1)
		}
		return err
	}},
	{"cutoff_writeback", func(*CacheSet) string { return fmt.Sprint(writeback.CutoffWriteback) }, nil},
	{"cutoff_writeback_sync", func(*CacheSet) string { return fmt.Sprint(writeback.CutoffWritebackSync) }, nil},
	{"flash_vol_create", writeOnly[*CacheSet], flashVolCreate},
	{"idle_max_writeback_rate", func(s *CacheSet) string { return fmt.Sprint(number(s.set.IdleMaxRate())) }, func(_ context.Context, s *CacheSet, value string) error {
		n, err := integer("idle_max_writeback_rate", value, 0, 1)
		if err == nil {
			s.set.SetIdleMaxRate(n == 1)
		}
		return err
	}},
	{"journal_delay_ms", func(s *CacheSet) string { return fmt.Sprint(s.set.JournalDelay().Milliseconds()) }, func(_ context.Context, s *CacheSet, value string) error {
		n, err := integer("journal_delay_ms", value, 0, math.MaxUint16)
		if err == nil {
			s.set.SetJournalDelay(time.Duration(n) * time.Millisecond)
		}
		return err
	}},
	{"reclaim", func(s *CacheSet) string { return fmt.Sprint(s.set.Info().Journal.Reclaims) }, nil},
	{"tree_depth", func(s *CacheSet) string { return fmt.Sprint(s.set.Info().Root.Level) }, nil},
	{"trigger_verify", writeOnly[*CacheSet], func(ctx context.Context, s *CacheSet, _ string) error { return s.Verify(ctx) }},
	{"writeback_keys_done", func(s *CacheSet) string {
		return sum(s, func(v *Volume) uint64 { return v.v.WritebackStatus().KeysDone })
	}, nil},
	{"writeback_keys_failed", func(s *CacheSet) string {
		return sum(s, func(v *Volume) uint64 { return v.v.WritebackStatus().KeysFailed })
	}, nil},
}

var cacheAttributes = []attr[*CacheSet]{
	{"block_size", func(s *CacheSet) string { return human(int64(s.set.Geometry().BlockBytes())) }, nil},
	{"bucket_size", func(s *CacheSet) string { return human(s.set.Geometry().BucketBytes()) }, nil},
	{"cache_replacement_policy", func(s *CacheSet) string {
		super := s.set.Info().CacheSuper
		return list(policies, int(super.Replacement()))
	}, func(_ context.Context, s *CacheSet, value string) error {
		i, err := word("cache_replacement_policy", value, policies)
		if err != nil {
			return err
		}
		return s.set.SetPolicy(ondisk.Replacement(i))
	}},
	{"discard", func(s *CacheSet) string { return fmt.Sprint(number(s.set.Discard())) }, func(_ context.Context, s *CacheSet, value string) error {
		n, err := integer("discard", value, 0, 1)
		if err == nil {
			err = s.set.SetDiscard(n == 1)
		}
		return err
	}},
	{"nbuckets", func(s *CacheSet) string { return fmt.Sprint(s.set.Geometry().NBuckets) }, nil},
}

// volumeAttributes are those of every volume; backingAttributes and flashAttributes are those of one kind besides.
var volumeAttributes = []attr[openVolume]{
	{"backing_dev_uuid", func(v openVolume) string { return v.v.BackingUUID() }, nil},
	{"bypassed", func(v openVolume) string { return human(int64(v.v.Stats().Bypassed) * ondisk.SectorSize) }, nil},
	{"cache_bypass_hits", func(v openVolume) string { return fmt.Sprint(v.v.Stats().BypassHits) }, nil},
	{"cache_bypass_misses", func(v openVolume) string { return fmt.Sprint(v.v.Stats().BypassMisses) }, nil},
	{"cache_hit_ratio", func(v openVolume) string {
		s := v.v.Stats()
		return fmt.Sprint(s.Hits * 100 / max(s.Hits+s.Misses, 1))
	}, nil},
	{"cache_hits", func(v openVolume) string { return fmt.Sprint(v.v.Stats().Hits) }, nil},
	{"cache_miss_collisions", func(v openVolume) string { return fmt.Sprint(v.v.Stats().MissCollisions) }, nil},
	{"cache_misses", func(v openVolume) string { return fmt.Sprint(v.v.Stats().Misses) }, nil},
	{"cache_mode", func(v openVolume) string { return list(modes, int(v.v.Config().Mode)) }, func(_ context.Context, v openVolume, value string) error {
		i, err := word("cache_mode", value, modes)
		if err != nil {
			return err
		}
		if v.v.Flash() {
			return ErrReadOnlyAttribute
		}
		return v.v.SetMode(ondisk.CacheMode(i))
	}},
	{"crash_stability", func(v openVolume) string {
		i := 0
		if !v.v.Config().Strict {
			i = 1
		}
		return list(stabilities, i)
	}, func(_ context.Context, v openVolume, value string) error {
		i, err := word("crash_stability", value, stabilities)
		if err != nil {
			return err
		}
		return v.v.SetStrict(i == 0)
	}},
	{"dirty_data", func(v openVolume) string { return human(v.v.DirtySectors() * ondisk.SectorSize) }, nil},
	{"label", func(v openVolume) string { return v.v.Label() }, nil},
	{"sequential_cutoff", func(v openVolume) string { return human(v.v.Config().SequentialCutoff) }, func(_ context.Context, v openVolume, value string) error {
		n, err := size("sequential_cutoff", value, 0, math.MaxUint32)
		if err == nil {
			v.v.SetSequentialCutoff(n)
		}
		return err
	}},
	{"state", func(v openVolume) string { return stateName(v.v) }, nil},
}

var (
	modes       = []string{"writethrough", "writeback", "writearound", "none"}
	policies    = []string{"lru", "fifo", "random"}
	stabilities = []string{"strict", "kernel"}
	states      = []string{"no cache", "clean", "dirty", "inconsistent"}
)

func stateName(v *volume.Volume) string {
	if v.Flash() {
		return "flash only"
	}
	return states[v.State()]
}

// Objects returns what has attributes: "set", "cache", and the open volumes.
func (s *CacheSet) Objects() []string {
	list := []string{objectSet, objectCache}
	for _, v := range s.Volumes() {
		list = append(list, v.name)
	}
	return list
}

// Attributes returns those of an object, sorted by name.
func (s *CacheSet) Attributes(object string) ([]Attribute, error) {
	switch object {
	case objectSet:
		return all(s, allSetAttributes()), nil
	case objectCache:
		return all(s, cacheAttributes), nil
	}
	if v := s.Volume(object); v != nil {
		return all(openVolume{v, s}, v.attributes()), nil
	}
	return nil, fmt.Errorf("%w: %q; there are %s", ErrNoObject, object, strings.Join(s.Objects(), ", "))
}

// Attribute returns one attribute.
func (s *CacheSet) Attribute(object, name string) (string, error) {
	list, err := s.Attributes(object)
	if err != nil {
		return "", err
	}
	for _, a := range list {
		if a.Name == name {
			return a.Value, nil
		}
	}
	return "", noAttribute(object, name, list)
}

func noAttribute(object, name string, list []Attribute) error {
	var names []string
	for _, a := range list {
		names = append(names, a.Name)
	}
	return fmt.Errorf("%w: %s has no %q; there are %s", ErrNoAttribute, object, name, strings.Join(names, ", "))
}

// SetAttribute sets one attribute. It returns when the change is in effect for requests that come from now on, and
// stored where the kernel stores it: cache_mode, cache_replacement_policy and discard in the superblock. Where that takes long,
// as detach does, the end of ctx gives it up.
func (s *CacheSet) SetAttribute(ctx context.Context, object, name, value string) error {
	value = strings.TrimSpace(value)
	switch object {
	case objectSet:
		return change(ctx, s, object, allSetAttributes(), name, value)
	case objectCache:
		return change(ctx, s, object, cacheAttributes, name, value)
	}
	if v := s.Volume(object); v != nil {
		return change(ctx, openVolume{v, s}, object, v.attributes(), name, value)
	}
	return fmt.Errorf("%w: %q; there are %s", ErrNoObject, object, strings.Join(s.Objects(), ", "))
}

// allSetAttributes returns those of a set, sorted by name.
func allSetAttributes() []attr[*CacheSet] {
	return byName(slices.Concat(setAttributes, gcAttributes))
}

func byName[T any](list []attr[T]) []attr[T] {
	slices.SortFunc(list, func(a, b attr[T]) int { return strings.Compare(a.name, b.name) })
	return list
}

// attributes returns those of the volume's kind, sorted by name.
func (v *Volume) attributes() []attr[openVolume] {
	list := backingAttributes
	if v.v.Flash() {
		list = flashAttributes
	}
	return byName(slices.Concat(volumeAttributes, list))
}

// writeOnly is the value of what can only be written.
func writeOnly[T any](T) string { return "" }

// sum adds up a count of the open volumes.
func sum(s *CacheSet, of func(v *Volume) uint64) string {
	var n uint64
	for _, v := range s.Volumes() {
		n += of(v)
	}
	return fmt.Sprint(n)
}

func all[T any](t T, list []attr[T]) []Attribute {
	out := make([]Attribute, len(list))
	for i, a := range list {
		out[i] = Attribute{a.name, a.get(t), a.set != nil}
	}
	return out
}

func change[T any](ctx context.Context, t T, object string, list []attr[T], name, value string) error {
	i := slices.IndexFunc(list, func(a attr[T]) bool { return a.name == name })
	switch {
	case i < 0:
		return noAttribute(object, name, all(t, list))
	case list[i].set == nil:
		return fmt.Errorf("%s of %s: %w", name, object, ErrReadOnlyAttribute)
	}
	return list[i].set(ctx, t, value)
}

// list prints words with the active one in brackets.
func list(words []string, active int) string {
	out := slices.Clone(words)
	if active < len(out) {
		out[active] = "[" + out[active] + "]"
	}
	return strings.Join(out, " ")
}

func word(name, value string, words []string) (int, error) {
	if i := slices.Index(words, value); i >= 0 {
		return i, nil
	}
	return 0, &ValueError{name, value, "one of " + strings.Join(words, ", ")}
}

func integer(name, value string, low, high int64) (int64, error) {
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n < low || n > high {
		return 0, &ValueError{name, value, fmt.Sprintf("a number from %d to %d", low, high)}
	}
	return n, nil
}

// size reads a number of bytes, with or without a unit. The kernel's own documentation writes units where its code
// refuses them.
func size(name, value string, low, high int64) (int64, error) {
	v := strings.TrimSuffix(strings.ToLower(value), "ib")
	shift := 0
	if n := len(v); n > 0 {
		if i := strings.IndexByte("kmgtpezy", v[n-1]); i >= 0 {
			shift, v = 10*(i+1), v[:n-1]
		}
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 || n > high>>shift || n<<shift < low {
		return 0, &ValueError{name, value, fmt.Sprintf("a number of bytes from %d to %d, or one with a unit such as 4M", low, high)}
	}
	return n << shift, nil
}

func number(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// human prints bytes as the kernel does: divided by 1024 at least once. Source: B 7.
func human(n int64) string {
	sign := ""
	if n < 0 {
		sign, n = "-", -n
	}
	rest, unit := int64(0), 0
	for {
		rest = n % 1024
		n /= 1024
		unit++
		if n < 1000 {
			break
		}
	}
	return fmt.Sprintf("%s%d.%d%c", sign, n, rest*10/1024, "kMGTPEZY"[unit-1])
}
