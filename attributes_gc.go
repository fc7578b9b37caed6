package ubcache

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/pace"
)

// Values of gc_policy and gc_reclaim.
var (
	gcPolicies = append([]string{cacheset.Exact}, pace.Names...)
	reclaims   = []string{"policy", "on", "off"}
)

// gcAttributes are those of garbage collection. gc_policy, gc_min_nodes, gc_sleep_ms, gc_reclaim and gc_count_btree_waiters
// are ours; the others have the kernel's names and meaning. Source: B 7.4.
var gcAttributes = []attr[*CacheSet]{
	{"average_key_size", func(s *CacheSet) string {
		f := s.set.GC().Found
		return human(int64(f.Data/max(f.Keys, 1)) * 512)
	}, nil},
	{"bset_tree_stats", bsetTreeStats, nil},
	{"btree_gc_average_duration_ms", func(s *CacheSet) string { return fmt.Sprint(s.set.GC().Average.Milliseconds()) }, nil},
	{"btree_gc_average_frequency_sec", func(s *CacheSet) string { return seconds(s.set.GC().Interval) }, nil},
	{"btree_gc_last_sec", func(s *CacheSet) string {
		g := s.set.GC()
		if g.Collections == 0 {
			return "-1"
		}
		return seconds(g.Since)
	}, nil},
	{"btree_gc_max_duration_ms", func(s *CacheSet) string { return fmt.Sprint(s.set.GC().Longest.Milliseconds()) }, nil},
	{"gc_after_writeback", func(s *CacheSet) string {
		yes, armed := s.set.GCAfterWriteback()
		return fmt.Sprint(number(yes) + 2*number(armed))
	}, func(_ context.Context, s *CacheSet, value string) error {
		n, err := integer("gc_after_writeback", value, 0, 1)
		if err == nil {
			s.set.SetGCAfterWriteback(n == 1)
		}
		return err
	}},
	{
		"gc_count_btree_waiters", func(s *CacheSet) string { return fmt.Sprint(number(s.set.GCTuning().Waiters)) },
		tuneGC("gc_count_btree_waiters", 1, func(t *cacheset.GCTuning, n int64) { t.Waiters = n == 1 }),
	},
	{
		"gc_min_nodes", func(s *CacheSet) string { return fmt.Sprint(s.set.GCTuning().MinNodes) },
		tuneGC("gc_min_nodes", math.MaxInt32, func(t *cacheset.GCTuning, n int64) { t.MinNodes = int(n) }),
	},
	{"gc_policy", func(s *CacheSet) string {
		name := s.set.GCPolicy()
		for i, p := range gcPolicies {
			if p == name {
				return list(gcPolicies, i)
			}
		}
		return name
	}, func(_ context.Context, s *CacheSet, value string) error {
		i, err := word("gc_policy", value, gcPolicies)
		if err != nil {
			return err
		}
		return s.set.SetGCPolicy(gcPolicies[i])
	}},
	{"gc_reclaim", func(s *CacheSet) string { return list(reclaims, int(s.set.GCTuning().Reclaim)) }, func(_ context.Context, s *CacheSet, value string) error {
		i, err := word("gc_reclaim", value, reclaims)
		if err == nil {
			s.set.TuneGC(func(t *cacheset.GCTuning) { t.Reclaim = cacheset.Reclaim(i) })
		}
		return err
	}},
	{
		"gc_sleep_ms", func(s *CacheSet) string { return fmt.Sprint(s.set.GCTuning().Sleep.Milliseconds()) },
		tuneGC("gc_sleep_ms", math.MaxUint16, func(t *cacheset.GCTuning, n int64) { t.Sleep = time.Duration(n) * time.Millisecond }),
	},
	{"trigger_gc", writeOnly[*CacheSet], func(_ context.Context, s *CacheSet, _ string) error {
		s.set.TriggerGC()
		return nil
	}},
}

// tuneGC sets a number from 0 to most.
func tuneGC(name string, most int64, change func(t *cacheset.GCTuning, n int64)) func(context.Context, *CacheSet, string) error {
	return func(_ context.Context, s *CacheSet, value string) error {
		n, err := integer(name, value, 0, most)
		if err == nil {
			s.set.TuneGC(func(t *cacheset.GCTuning) { change(t, n) })
		}
		return err
	}
}

func seconds(d time.Duration) string { return fmt.Sprint(int64(d / time.Second)) }

// bsetTreeStats has the kernel's lines. Here nodes have no search trees, so floats and failed are 0. Of nodes that are not
// in memory nothing is known that would not have to be read: sets and bytes are those of the nodes that are.
func bsetTreeStats(s *CacheSet) string {
	t := s.set.Sets()
	var b strings.Builder
	for _, l := range []struct {
		name string
		n    uint64
	}{
		{"btree nodes", uint64(t.Nodes)},
		{"written sets", t.Written},
		{"unwritten sets", t.Unwritten},
		{"written key bytes", t.WrittenBytes},
		{"unwritten key bytes", t.UnwrittenBytes},
		{"floats", 0},
		{"failed", 0},
	} {
		fmt.Fprintf(&b, "%-25s%d\n", l.name+":", l.n)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// btreeNodes and btreeUsed are what the last walk over the index has found: a collection, or a sweep.
func btreeNodes(s *CacheSet) string {
	if g := s.set.GC(); g.Policy != cacheset.Exact && g.Collections > 0 {
		return fmt.Sprint(g.Nodes)
	}
	return fmt.Sprint(s.set.Info().Index.Nodes)
}

func btreeUsed(s *CacheSet) string {
	if g := s.set.GC(); g.Policy != cacheset.Exact && g.Found.Room > 0 {
		f := g.Found
		return fmt.Sprint(f.Words * 100 / f.Room)
	}
	return fmt.Sprint(s.set.Info().Index.UsedPercent)
}
