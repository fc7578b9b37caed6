package ubcache

import (
	"time"

	"github.com/ubcache/ubcache/internal/cacheset"
)

// GCStats are what garbage collection does and has done since the set was opened. With the policy exact there is none:
// its background work is in SetStats.
type GCStats struct {
	Policy      string        // attribute gc_policy
	Running     bool          // a collection is under way
	Collections uint64        // that came to their end
	Last        time.Duration // how long the last of them took,
	Longest     time.Duration // the longest,
	Total       time.Duration // and all of them
	Interval    time.Duration // from the end of one to that of the next, a moving average; 0: there were no two
	Nodes       uint64        // that the last one saw, those that lead to where it went on after a pause again and again
	Holds       uint64        // times that the index was held, so that requests waited
	LongestHold time.Duration
	TotalHold   time.Duration
	Looked      uint64 // at buckets, to choose what is reused
	Differences uint64 // buckets of which a collection found less than the exact counters have: each is a bug
}

// GC returns the set's.
func (s *CacheSet) GC() GCStats {
	g := s.set.GC()
	return GCStats{
		Policy: g.Policy, Running: g.Running, Collections: g.Collections, Last: g.Last, Longest: g.Longest, Total: g.Total, Interval: g.Interval,
		Nodes: g.Nodes, Holds: g.Holds, LongestHold: g.LongestHold, TotalHold: g.TotalHold, Looked: g.Looked, Differences: g.Differences,
	}
}

// A Stall is how often, and how long, requests have waited for one cause since the set was opened: each wait of more than
// 100 microseconds counts, those for the devices to do what was asked of them too. No moment of a request counts twice;
// what several requests waited for together counts for each.
type Stall struct {
	// Cause is one of
	//
	//	allocation       no bucket could be reused for data that must go to the cache
	//	gens_write       the same, while generations were written so that buckets could be reused
	//	journal_space    room for keys in the journal
	//	journal_write    a journal entry to be durable
	//	set_lock         the lock that guards the index
	//	node_read        a node of the index to be read
	//	split            a node of the index to be rewritten or split, since it had no room
	//	collection_gate  a collection that keeps requests out
	//	backing_device   reads, writes and flushes of the backing device
	//	cache_device     reads and writes of data on the cache device
	//	overlap          another write to the same place
	//	writeback        dirty data of the same place that was on its way to the backing device
	//	superblock       the backing device's superblock, to say that there is dirty data
	//
	// More may come.
	Cause string
	Count uint64
	Total time.Duration
	Max   time.Duration
}

// Stalls returns them, every cause there is, in an order that does not change.
func (s *CacheSet) Stalls() []Stall {
	totals := s.set.Stalls()
	list := make([]Stall, len(totals))
	for c, t := range totals {
		list[c] = Stall{Cause: cacheset.Stall(c).String(), Count: t.Count, Total: t.Total, Max: t.Max}
	}
	return list
}
