package pace

import "time"

// A State is what a policy goes by, at one moment of a collection.
type State struct {
	Nodes    int           // that the collection before saw, those seen again too; for the first one: nodes of the index
	Seen     int           // by this one, up to now
	Inflight int           // requests alive
	Waiters  int           // who sleeps until there is a bucket
	Interval time.Duration // from the beginning of one collection to the next, on average; 0: not known
	Elapsed  time.Duration // since this one began
	Slept    time.Duration // of that
}

// A Pacer is one policy. Its methods are called by one goroutine at a time. One is for one set, for some have a memory.
type Pacer interface {
	// Slice returns how many nodes are seen before the root is let go, at least 1.
	Slice(s State) int
	// Yield reports whether the root is let go at the end of a slice, and the collection sleeps. Else another slice
	// follows in the same hold.
	Yield(s State) bool
	// Sleep returns how long the collection sleeps between two holds.
	Sleep(s State) time.Duration
	// Allocates reports whether buckets that were reclaimable when a collection began may be allocated while it is on.
	Allocates() bool
	// Finished says that a collection is over.
	Finished()
}

// Names of the policies, in the order in which they came.
var Names = []string{"classic", "reclaim", "dynamic", "rescale", "paced"}

// New returns the policy of that name, nil if there is none.
func New(name string) Pacer {
	switch name {
	case "classic":
		return classic{}
	case "reclaim":
		return reclaim{}
	case "dynamic":
		return new(dynamic)
	case "rescale":
		return rescale{}
	case "paced":
		return paced{}
	}
	return nil
}
