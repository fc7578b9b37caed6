package control

import (
	"math"
	"strconv"
	"time"
)

// A Number is an exact count. Of a daemon of another version it may not be told.
type Number struct {
	n    int64
	told bool
}

// Num makes a Number; what is above 2^63 - 1 becomes that.
func Num[T int | int64 | uint64](n T) Number {
	if n > 0 && uint64(n) > math.MaxInt64 {
		return Number{math.MaxInt64, true}
	}
	return Number{int64(n), true}
}

// Value returns the count, and whether it is known.
func (n Number) Value() (int64, bool) { return n.n, n.told }

// Plus is a sum, known if both are.
func (n Number) Plus(m Number) Number {
	if !n.told || !m.told {
		return Number{}
	}
	return Number{n.n + m.n, true}
}

// String writes the count, or "-".
func (n Number) String() string {
	if !n.told {
		return "-"
	}
	return strconv.FormatInt(n.n, 10)
}

// IsZero leaves what is not told out of JSON.
func (n Number) IsZero() bool { return !n.told }

// MarshalJSON writes an integer, or null.
func (n Number) MarshalJSON() ([]byte, error) {
	if !n.told {
		return []byte("null"), nil
	}
	return strconv.AppendInt(nil, n.n, 10), nil
}

// UnmarshalJSON takes what is no integer for not told: one figure must not make the others unreadable.
func (n *Number) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseInt(string(b), 10, 64)
	*n = Number{v, err == nil}
	if err != nil {
		n.n = 0
	}
	return nil
}

// Status is what a daemon serves, and how that goes. Counters begin with the daemon.
type Status struct {
	Version string    `json:"version"` // of the program
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Set     Set       `json:"set"`
	Volumes []Volume  `json:"volumes"`
	Total   Counters  `json:"total"` // the sum over the volumes
}

// Set describes the cache set.
type Set struct {
	UUID         string  `json:"uuid"`
	Failed       string  `json:"failed,omitempty"` // why the set has stopped: nothing is acknowledged any more
	BucketBytes  Number  `json:"bucket_bytes,omitzero"`
	BlockBytes   Number  `json:"block_bytes,omitzero"`
	InUsePercent Number  `json:"in_use_percent,omitzero"` // of all buckets, those that are not available
	Buckets      Buckets `json:"buckets"`
	CachedBytes  Number  `json:"cached_bytes,omitzero"` // data in the cache, dirty data included
	DirtyBytes   Number  `json:"dirty_bytes,omitzero"`  // of that, data that is not on the backing devices yet
	Btree        Btree   `json:"btree"`
	Journal      Journal `json:"journal"`
	Batches      Number  `json:"allocation_batches,omitzero"` // times that buckets were made ready
	Evicted      Number  `json:"evicted_buckets,omitzero"`    // reused although clean data was in them
	NoBucket     Number  `json:"no_bucket_ready,omitzero"`    // times that data found none
	MovedBytes   Number  `json:"moved_bytes,omitzero"`        // dirty data brought together
	MovedBuckets Number  `json:"moved_buckets,omitzero"`      // that have none of it any more
	MaxLag       Number  `json:"max_generation_lag,omitzero"` // of a bucket over its oldest pointer

	// Empty buckets that the cache device was told of, if that is set, and requests for it that failed.
	Discarded      Number `json:"discarded_buckets,omitzero"`
	DiscardedBytes Number `json:"discarded_bytes,omitzero"`
	DiscardErrors  Number `json:"discard_errors,omitzero"`
	Verified       Number `json:"verifications,omitzero"`    // times that all counts were held against the index
	Mismatches     Number `json:"count_mismatches,omitzero"` // counts that were not what the index had: each is an error of ours

	Collection Collection       `json:"collection,omitzero"`
	Stalls     map[string]Stall `json:"stalls,omitempty"` // by cause

	// Volumes with dirty data whose backing devices the daemon was not given.
	Absent []AbsentVolume `json:"absent_volumes,omitempty"`
}

// A Collection is what garbage collection does and has done; with the policy exact there is none.
type Collection struct {
	Policy      string `json:"policy,omitempty"`
	Running     bool   `json:"running"`
	Count       Number `json:"count,omitzero"`
	Last        Number `json:"last_milliseconds,omitzero"`
	Longest     Number `json:"longest_milliseconds,omitzero"`
	Total       Number `json:"total_milliseconds,omitzero"`
	Interval    Number `json:"average_interval_milliseconds,omitzero"`
	Nodes       Number `json:"nodes,omitzero"` // that the last one saw
	Holds       Number `json:"holds,omitzero"` // of the index: requests waited
	LongestHold Number `json:"longest_hold_microseconds,omitzero"`
	TotalHold   Number `json:"total_hold_microseconds,omitzero"`
	Differences Number `json:"differences,omitzero"` // from the exact counts: each is an error of ours
}

// A Stall is how often, and how long, requests have waited for one cause: each wait of more than 100 microseconds counts.
type Stall struct {
	Count Number `json:"count,omitzero"`
	Total Number `json:"total_microseconds,omitzero"`
	Max   Number `json:"max_microseconds,omitzero"`
}

// An AbsentVolume is a volume of the set that is not served, though it has dirty data.
type AbsentVolume struct {
	Slot       Number `json:"slot"`
	UUID       string `json:"uuid"` // of the backing device
	Label      string `json:"label,omitempty"`
	DirtyBytes Number `json:"dirty_bytes"`
}

// Buckets says how many buckets of the cache device are in which state; each is in one.
type Buckets struct {
	Total     Number `json:"total,omitzero"`
	Available Number `json:"available,omitzero"` // may be reused without writing anything back: empty, clean and ready ones
	Empty     Number `json:"empty,omitzero"`     // no data
	Clean     Number `json:"clean,omitzero"`     // all data is on the backing devices too
	Ready     Number `json:"ready,omitzero"`     // prepared for the next data
	Dirty     Number `json:"dirty,omitzero"`     // some data is not on the backing devices yet
	Metadata  Number `json:"metadata,omitzero"`  // index, generations, list of volumes
	Pinned    Number `json:"pinned,omitzero"`    // in the hands of requests
	Fixed     Number `json:"fixed,omitzero"`     // superblock and journal
	Suspect   Number `json:"suspect,omitzero"`   // content in doubt, put aside until it is verified
}

// Btree describes the index, and counts what was done to its nodes on disk.
type Btree struct {
	Nodes    Number `json:"nodes_in_memory,omitzero"`
	Bytes    Number `json:"bytes_in_memory,omitzero"`
	Depth    Number `json:"depth,omitzero"` // 0: the root is a leaf
	Reads    Number `json:"node_reads,omitzero"`
	Appends  Number `json:"node_appends,omitzero"`
	Rewrites Number `json:"node_rewrites,omitzero"`
	Splits   Number `json:"node_splits,omitzero"`

	// What is done in the background, from one walk over all nodes to the next.
	Sweeps      Number `json:"sweeps,omitzero"`          // walks that came to their end
	Swept       Number `json:"nodes_swept,omitzero"`     // seen by walks
	Coalesced   Number `json:"nodes_coalesced,omitzero"` // replaced by fewer
	Stale       Number `json:"nodes_stale,omitzero"`     // rewritten since pointers were old, or most keys said nothing
	Lowered     Number `json:"trees_lowered,omitzero"`   // a root gave way to its only child
	RoomWaits   Number `json:"room_waits,omitzero"`      // insertions that waited until a node was split
	TreeNodes   Number `json:"btree_nodes,omitzero"`     // all there are, as the last walk has found
	Keys        Number `json:"keys,omitzero"`            // those that are good, by the same
	UsedPercent Number `json:"btree_used_percent,omitzero"`
}

// Journal counts what was written to the journal, and what was read from it at the start.
type Journal struct {
	Entries  Number `json:"entries,omitzero"`
	Keys     Number `json:"keys,omitzero"`
	Bytes    Number `json:"bytes,omitzero"`
	Replayed Number `json:"replayed_keys,omitzero"`  // at the start
	Mapped   Number `json:"mapped_entries,omitzero"` // at the start, left in memory by a process that died
}

// Volume describes a volume.
type Volume struct {
	Name        string   `json:"name"`
	SizeBytes   Number   `json:"size_bytes,omitzero"`
	BlockBytes  Number   `json:"block_bytes,omitzero"`
	Mode        string   `json:"cache_mode,omitempty"`
	State       string   `json:"state,omitempty"` // of the backing device: clean, dirty, ...
	NBD         []string `json:"nbd,omitempty"`   // URIs
	Connections Number   `json:"connections,omitzero"`
	Flash       bool     `json:"flash_only,omitempty"` // there is no backing device

	Writeback *Writeback `json:"writeback,omitempty"` // of a volume that is attached
	Job       *Job       `json:"job,omitempty"`       // the last one since the daemon started
	Counters
}

// Writeback describes how dirty data of a volume goes back to its backing device.
type Writeback struct {
	Running      bool   `json:"running"`                                // else dirty data stays
	Draining     bool   `json:"draining"`                               // as fast as it goes, for a flush or a detach
	Detaching    bool   `json:"detaching"`                              // no data is added to the cache any more
	AtMax        bool   `json:"at_max_rate"`                            // as fast as it goes, since nobody uses the set
	Rate         Number `json:"rate_bytes_per_second,omitzero"`         // that it is held to otherwise
	Target       Number `json:"target_bytes,omitzero"`                  // of dirty data
	Dirty        Number `json:"dirty_bytes,omitzero"`                   // when the rate was last worked out
	Proportional Number `json:"proportional_bytes_per_second,omitzero"` // the rate's share for being off the target
	Integral     Number `json:"integral_bytes_per_second,omitzero"`     // its share for having been so
	Change       Number `json:"change_bytes_per_second,omitzero"`       // of the rate, the last time
	NextIO       Number `json:"next_io_milliseconds,omitzero"`          // until the next write
	KeysDone     Number `json:"keys_done,omitzero"`                     // extents written back
	KeysFailed   Number `json:"keys_failed,omitzero"`                   // not made clean: they were written to meanwhile
	Errors       Number `json:"errors,omitzero"`                        // reads and writes that failed; the data stays dirty
}

// Counters are those of one volume, or of all.
type Counters struct {
	DirtyBytes Number   `json:"dirty_bytes,omitzero"`
	Requests   Requests `json:"requests"`
	Cache      Cache    `json:"cache"`
	Bypassed   Bypassed `json:"bypassed"`

	// Writes in writeback mode that did not stay in the cache, though they were not bypassed, by reason.
	Declined map[string]Number `json:"writeback_declined,omitempty"`
}

// Requests counts what clients asked for.
type Requests struct {
	Reads        Number `json:"reads,omitzero"`
	ReadBytes    Number `json:"read_bytes,omitzero"`
	Writes       Number `json:"writes,omitzero"`
	WrittenBytes Number `json:"written_bytes,omitzero"`
	Flushes      Number `json:"flushes,omitzero"`
	Discards     Number `json:"discards,omitzero"`
	Zeroes       Number `json:"zeroes,omitzero"`
}

// Cache counts read requests that were not bypassed. One that was only partly in the cache is a miss. Beside these it
// counts what happened on the way.
type Cache struct {
	Hits            Number   `json:"hits,omitzero"`
	Misses          Number   `json:"misses,omitzero"`
	HitRatioPercent *float64 `json:"hit_ratio_percent,omitempty"` // nil while there were no such requests
	MissCollisions  Number   `json:"miss_collisions,omitzero"`    // data of a miss that was not kept: a write came between
	FillsSkipped    Number   `json:"fills_skipped,omitzero"`      // data of a miss that was not kept: no room
	Waits           Number   `json:"invalidation_waits,omitzero"` // writes that waited until what they overwrite was durably invalid
	ReadRaces       Number   `json:"read_races,omitzero"`         // reads repeated, their bucket was reused meanwhile
	ReadErrors      Number   `json:"read_errors,omitzero"`        // of the cache device
	WriteErrors     Number   `json:"write_errors,omitzero"`       // of the cache device, where data was to go there
	NoRoom          Number   `json:"writes_no_room,omitzero"`     // writes of which not all found room in the cache
}

// Bypassed counts requests that were kept out of the cache.
type Bypassed struct {
	ReadHits   Number            `json:"read_hits,omitzero"`   // read requests that were in the cache all the same
	ReadMisses Number            `json:"read_misses,omitzero"` // the other read requests
	Bytes      Number            `json:"bytes,omitzero"`       // reads and writes
	ByReason   map[string]Number `json:"by_reason,omitempty"`  // requests, reads and writes
}

// HitRatio returns hits in percent of hits and misses, nil without any.
func (c *Cache) HitRatio() *float64 {
	hits, known := c.Hits.Value()
	misses, also := c.Misses.Value()
	if !known || !also || hits < 0 || misses < 0 || hits+misses <= 0 {
		return nil
	}
	// Rounded down: 100 is said only where there was no miss.
	r := math.Floor(float64(hits)/float64(hits+misses)*10000) / 100
	if misses > 0 {
		r = min(r, 99.99)
	}
	return &r
}

// Sum adds up the counters of volumes.
func Sum(volumes []Volume) Counters {
	zero := Num(0)
	t := Counters{
		DirtyBytes: zero,
		Requests:   Requests{zero, zero, zero, zero, zero, zero, zero},
		Cache:      Cache{Hits: zero, Misses: zero, MissCollisions: zero, FillsSkipped: zero, Waits: zero, ReadRaces: zero, ReadErrors: zero, WriteErrors: zero, NoRoom: zero},
		Bypassed:   Bypassed{ReadHits: zero, ReadMisses: zero, Bytes: zero, ByReason: map[string]Number{}},
		Declined:   map[string]Number{},
	}
	reasons := func(to, from map[string]Number) {
		for reason, n := range from {
			if old, ok := to[reason]; ok {
				n = n.Plus(old)
			}
			to[reason] = n
		}
	}
	add := func(to *Number, n Number) { *to = to.Plus(n) }
	for i := range volumes {
		v := &volumes[i].Counters
		add(&t.DirtyBytes, v.DirtyBytes)
		r, s := &t.Requests, &v.Requests
		add(&r.Reads, s.Reads)
		add(&r.ReadBytes, s.ReadBytes)
		add(&r.Writes, s.Writes)
		add(&r.WrittenBytes, s.WrittenBytes)
		add(&r.Flushes, s.Flushes)
		add(&r.Discards, s.Discards)
		add(&r.Zeroes, s.Zeroes)
		c, d := &t.Cache, &v.Cache
		add(&c.Hits, d.Hits)
		add(&c.Misses, d.Misses)
		add(&c.MissCollisions, d.MissCollisions)
		add(&c.FillsSkipped, d.FillsSkipped)
		add(&c.Waits, d.Waits)
		add(&c.ReadRaces, d.ReadRaces)
		add(&c.ReadErrors, d.ReadErrors)
		add(&c.WriteErrors, d.WriteErrors)
		add(&c.NoRoom, d.NoRoom)
		add(&t.Bypassed.ReadHits, v.Bypassed.ReadHits)
		add(&t.Bypassed.ReadMisses, v.Bypassed.ReadMisses)
		add(&t.Bypassed.Bytes, v.Bypassed.Bytes)
		reasons(t.Bypassed.ByReason, v.Bypassed.ByReason)
		reasons(t.Declined, v.Declined)
	}
	t.Cache.HitRatioPercent = t.Cache.HitRatio()
	return t
}

// An Attribute is one setting or reading of an object, under the name that it has in the kernel's sysfs.
type Attribute struct {
	Name     string `json:"name"`
	Value    string `json:"value"` // without the newline at the end; empty for those that can only be written
	Writable bool   `json:"writable"`
}

// The other replies, and what requests bring.
type (
	objectsReply struct {
		Objects []string `json:"objects"`
	}
	attributesReply struct {
		Attributes []Attribute `json:"attributes"`
	}
	valueReply struct {
		Value string `json:"value"`
	}
	valueRequest struct {
		Value *string `json:"value"`
	}
	flashReply struct {
		Flash []FlashVolume `json:"flash"`
	}
	flashRequest struct {
		Label *string `json:"label"`
		Size  *int64  `json:"size"`
	}
	sizeRequest struct {
		Size *int64 `json:"size"`
	}
	errorReply struct {
		Error *Error `json:"error"`
	}
)
