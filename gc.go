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
	Interval    time.Duration // from the beginning of one to the next, a moving average
	Nodes       uint64        // that the last one saw, those seen again after a pause too
	Holds       uint64        // times that the gate was shut, so that requests waited
	LongestHold time.Duration
	TotalHold   time.Duration
	Differences uint64 // buckets of which a collection found something else than the exact counters have: each is a bug
}

// GC returns the set's.
func (s *CacheSet) GC() GCStats { return GCStats{Policy: "exact"} }

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
