package ubcache

import (
	"time"

	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/volume"
)

// SetStats are the state of a set at a moment, and totals since it was opened. It takes microseconds to get them,
// whatever the size of the cache.
type SetStats struct {
	UUID                  string
	BucketSize, BlockSize int64 // bytes
	Buckets               uint64
	InUse                 int // percent of the buckets that hold what is needed: neither empty, clean nor free

	// Buckets by what is in them: nothing; clean data only; some dirty data; metadata; ready to be written, or about to
	// be; data under way; superblock and journal; counts that do not fit, so that they rest.
	Empty, Clean, Dirty, Metadata, Ready, Pinned, Fixed, Suspect uint64

	LiveBytes, DirtyBytes int64 // in the index
	Nodes                 int   // of the index, in memory
	NodeBytes             int64
	TreeDepth             int // 0: the root is a leaf

	JournalEntries, JournalKeys, JournalBytes    uint64
	NodeReads, NodeAppends, NodeRewrites, Splits uint64
	Sweeps, NodesSwept                           uint64 // walks over the whole index that came to their end; nodes that walks have seen
	NodesCoalesced                               uint64 // that were replaced by fewer
	NodesStale                                   uint64 // rewritten since pointers were old, or most keys said nothing
	TreesLowered                                 uint64 // times that a root went for its only child
	RoomWaits                                    uint64 // insertions that waited until a leaf was split
	IndexNodes, IndexKeys, IndexUsedPercent      int    // as the last walk has found: nodes, good keys, and how full nodes are; 0: none yet
	Batches, Evicted                             uint64 // times that buckets were made ready; clean buckets taken for that
	NoBucket                                     uint64 // times that data found no bucket ready
	DiscardedBuckets, DiscardErrors              uint64 // empty buckets that the device was told of; requests for that which failed
	DiscardedBytes                               int64
	SlotsFreed                                   uint64 // of volumes that are no more
	MovedBytes                                   int64  // dirty data brought together
	MovedBuckets                                 uint64 // that have none of it any more
	MaxLag                                       int    // generations that a bucket is ahead of its oldest pointer
	ReplayedKeys                                 uint64 // at the start
	MappedEntries                                uint64 // of these, from the process that died
	Verifications, Mismatches                    uint64 // times that all counts were held against the index; counts that differed, see Verify
	Failed                                       string // why the set has stopped; empty: it has not
}

// Stats returns the set's.
func (s *CacheSet) Stats() SetStats {
	i := s.set.Info()
	g := s.set.Geometry()
	n := func(c bucket.Category) uint64 { return uint64(i.Buckets[c]) }
	st := SetStats{
		UUID: s.UUID(), BucketSize: g.BucketBytes(), BlockSize: int64(g.BlockBytes()), Buckets: uint64(i.NBuckets), InUse: i.InUse,
		Empty: n(bucket.Empty), Clean: n(bucket.Clean), Dirty: n(bucket.Dirty), Metadata: n(bucket.Meta), Ready: n(bucket.Ready) + n(bucket.Inc),
		Pinned: n(bucket.Pinned), Fixed: n(bucket.Fixed), Suspect: n(bucket.Suspect),
		LiveBytes: int64(i.Live) * ondisk.SectorSize, DirtyBytes: int64(i.Dirty) * ondisk.SectorSize,
		Nodes: i.Nodes, NodeBytes: int64(i.NodeBytes), TreeDepth: int(i.Root.Level),
		JournalEntries: i.Journal.Entries, JournalKeys: i.Journal.Keys, JournalBytes: i.Journal.Bytes,
		NodeReads: i.NodeReads, NodeAppends: i.NodeAppends, NodeRewrites: i.NodeRewrites, Splits: i.NodeSplits,
		Sweeps: i.Table.Sweeps, NodesSwept: i.NodesSwept, NodesCoalesced: i.NodesCoalesced, NodesStale: i.NodesStale,
		TreesLowered: i.TreesLowered, RoomWaits: i.RoomWaits,
		IndexNodes: i.Index.Nodes, IndexKeys: i.Index.Keys, IndexUsedPercent: i.Index.UsedPercent,
		Batches: i.Table.Batches, Evicted: i.Table.Evicted, NoBucket: i.NoBucket, MaxLag: i.MaxLag,
		DiscardedBuckets: i.DiscardedBuckets, DiscardedBytes: int64(i.DiscardedBytes), DiscardErrors: i.DiscardErrors, SlotsFreed: i.SlotsFreed,
		MovedBytes: int64(i.MovedSectors) * ondisk.SectorSize, MovedBuckets: i.MovedBuckets,
		ReplayedKeys: i.ReplayedKeys, MappedEntries: i.MappedEntries,
		Verifications: i.VerifyPasses, Mismatches: i.VerifyMismatches,
	}
	if err := s.Err(); err != nil {
		st.Failed = err.Error()
	}
	return st
}

// VolumeStats are totals since a volume was opened, and its state.
type VolumeStats struct {
	Hits, Misses, BypassHits, BypassMisses uint64 // read requests; a half hit is a miss

	BypassedBytes                                             int64  // of reads and writes that went round the cache
	BypassSequential, BypassFull, BypassMode, BypassUnaligned uint64 // requests, by reason

	MissCollisions  uint64 // fills voided by writes
	FillsSkipped    uint64 // misses that were not copied to the cache for want of room
	ReadRaces       uint64 // cache reads repeated since the bucket was reused meanwhile
	CacheReadErrors uint64

	CacheWriteErrors             uint64 // writes of data to the cache device that failed
	NoRoom                       uint64 // writes of which not all found room in the cache
	DeclinedFull, DeclinedNoRoom uint64 // writes in writeback mode that did not stay in the cache: too much is in use; no bucket was ready

	Reads, Writes, Flushes, Discards, Zeroes uint64
	ReadBytes, WrittenBytes                  int64
	InvalidationWaits                        uint64 // writes that waited until what they overwrite was invalidated durably

	DirtyBytes  int64
	Mode, State string

	Flash     bool // there is no backing device
	Slot      int  // in the set
	Attached  bool // a backing device that has the cache before it
	Writeback WritebackStats
}

// WritebackStats say how dirty data of a volume goes back to its backing device. Rates are in bytes per second.
// Source: B 5.3.
type WritebackStats struct {
	Running   bool // else dirty data stays in the cache until a detach
	Draining  bool // as fast as it goes, for WriteBack or Detach
	Detaching bool
	AtMax     bool // as fast as it goes, since nobody uses the set

	Rate                   int64 // that writeback is held to otherwise
	Target, Dirty          int64 // bytes, when the rate was last worked out
	Proportional, Integral int64 // the shares of the rate for being off the target, and for having been so
	Change                 int64 // of the rate, the last time
	NextIO                 time.Duration

	KeysDone, KeysFailed uint64 // extents that were made clean; those that were not, since they were written to meanwhile
	Errors               uint64 // reads and writes that failed
}

// writebackStats puts a status in bytes.
func writebackStats(s volume.WritebackStatus) WritebackStats {
	bytes := func(sectors int64) int64 { return sectors * ondisk.SectorSize }
	t := &s.Terms
	return WritebackStats{
		Running: s.Running, Draining: s.Draining, Detaching: s.Detaching, AtMax: s.AtMax,
		Rate: bytes(t.Rate), Target: bytes(t.Target), Dirty: bytes(t.Dirty), Proportional: bytes(t.Proportional), Integral: bytes(t.Integral),
		Change: bytes(t.Change), NextIO: max(s.NextIO, 0), KeysDone: s.KeysDone, KeysFailed: s.KeysFailed, Errors: s.Errors,
	}
}

// Stats returns the volume's.
func (v *Volume) Stats() VolumeStats {
	s := v.v.Stats()
	st := VolumeStats{
		Hits: s.Hits, Misses: s.Misses, BypassHits: s.BypassHits, BypassMisses: s.BypassMisses,
		BypassedBytes: int64(s.Bypassed) * ondisk.SectorSize, BypassSequential: s.BypassSequential, BypassFull: s.BypassFull,
		BypassMode: s.BypassMode, BypassUnaligned: s.BypassUnaligned, MissCollisions: s.MissCollisions, FillsSkipped: s.FillsSkipped,
		CacheWriteErrors: s.CacheWriteErrors, NoRoom: s.NoRoom, DeclinedFull: s.DeclinedFull, DeclinedNoRoom: s.DeclinedNoRoom,
		ReadRaces: s.ReadRaces, CacheReadErrors: s.CacheReadErrors, Reads: s.Reads, Writes: s.Writes, Flushes: s.Flushes,
		Discards: s.Discards, Zeroes: s.Zeroes, ReadBytes: int64(s.ReadSectors) * ondisk.SectorSize,
		WrittenBytes: int64(s.WrittenSectors) * ondisk.SectorSize, InvalidationWaits: s.InvalidationWaits,
		DirtyBytes: v.v.DirtySectors() * ondisk.SectorSize, Mode: modes[v.v.Config().Mode], State: stateName(v.v),
		Flash: v.v.Flash(), Slot: int(v.v.Inode()),
	}
	if !st.Flash {
		w := v.v.WritebackStatus()
		st.Attached, st.Writeback = w.Attached, writebackStats(w)
	}
	return st
}
