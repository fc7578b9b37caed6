package ondisk

import "math/bits"

// Geometry is what follows from a cache superblock and the page size: sizes of buckets and of the metadata in
// them. Sizes are in sectors unless named otherwise.
type Geometry struct {
	BlockSectors  uint32 // unit of bsets, jsets and cached data
	BucketSectors uint32
	bucketShift   uint8
	NBuckets      uint64 // counting bucket 0
	FirstBucket   uint64 // first that may be used
	MetaSectors   uint32 // part of a bucket that metadata uses
	NodeSectors   uint32 // of a new btree node
	NrUUIDs       uint32 // slots in the uuid array
	PrioPerBucket uint64 // entries in one prio set
	NPrio         uint64 // prio sets
	SetMagic      uint64
	KernelReserve uint64 // unused buckets that a 7.2 kernel may need for splits during replay; older ones need less
	KernelFreeInc uint64 // buckets, unused or clean, that a kernel invalidates before it frees more
}

// NewGeometry derives the sizes. sb is an accepted cache superblock.
func NewGeometry(sb *Superblock) Geometry {
	bucket := sb.BucketSectors()
	g := Geometry{
		BlockSectors:  uint32(sb.BlockSize),
		BucketSectors: uint32(bucket),
		bucketShift:   uint8(bits.TrailingZeros64(bucket)),
		NBuckets:      sb.NBuckets(),
		FirstBucket:   uint64(sb.FirstBucket),
		SetMagic:      sb.SetMagic(),
		MetaSectors:   uint32(min(bucket, maxMetaSectors)),
	}
	g.NodeSectors = g.MetaSectors
	if g.MetaSectors*SectorSize > 256<<10 {
		g.NodeSectors = max(g.MetaSectors/4, 512)
	}
	g.NrUUIDs = g.MetaSectors * SectorSize / UUIDEntryBytes
	g.PrioPerBucket = uint64(g.MetaSectors*SectorSize-prioHeaderBytes) / prioEntryBytes
	g.NPrio = divUp(g.NBuckets, g.PrioPerBucket)
	g.KernelReserve = min(max(g.NBuckets>>7, 32), 256)
	g.KernelFreeInc = 4 * (pow2up(g.NBuckets) >> 10)
	return g
}

// replayNodes is how many nodes a kernel writes, at most, to replay as much of a journal as a node is long. It inserts key by
// key, and what it rewrites goes to a bucket each time that it does not get back before the replay is over: once in 170 keys
// where nodes are of 8 KiB, and as often in their parents' stead.
const replayNodes = 4

// ReplayBytes is how much of a journal KernelReserve buckets are enough to replay.
func (g *Geometry) ReplayBytes() int64 {
	return int64(g.KernelReserve) * int64(g.NodeSectors) * SectorSize / replayNodes
}

// MetaBytes is MetaSectors in bytes: the size of a prio set and of the uuid array.
func (g *Geometry) MetaBytes() int { return int(g.MetaSectors) * SectorSize }

// BlockBytes is BlockSectors in bytes.
func (g *Geometry) BlockBytes() int { return int(g.BlockSectors) * SectorSize }

// BucketBytes is BucketSectors in bytes.
func (g *Geometry) BucketBytes() int64 { return int64(g.BucketSectors) * SectorSize }

// Bucket returns the number of the bucket that sector of the cache device lies in.
func (g *Geometry) Bucket(sector uint64) uint64 { return sector >> g.bucketShift }

// BucketStart returns the first sector of bucket b.
func (g *Geometry) BucketStart(b uint64) uint64 { return b << g.bucketShift }

// Remainder returns how far into its bucket sector lies.
func (g *Geometry) Remainder(sector uint64) uint32 { return uint32(sector) & (g.BucketSectors - 1) }

// ValidBucket reports whether b is one that may hold data or metadata.
func (g *Geometry) ValidBucket(b uint64) bool { return b >= g.FirstBucket && b < g.NBuckets }

// JSetMagic, PrioMagic and BSetMagic are the magic numbers of this set. Source: F 3.6.
func (g *Geometry) JSetMagic() uint64 { return g.SetMagic ^ 0x245235C1A3625032 }

// PrioMagic is the magic number of the set's prio sets.
func (g *Geometry) PrioMagic() uint64 { return g.SetMagic ^ 0x6750E15F87337F91 }

// BSetMagic is the magic number of the set's bsets.
func (g *Geometry) BSetMagic() uint64 { return g.SetMagic ^ 0x90135C78B99E07F5 }

// JournalBuckets is how many buckets a set of n buckets gets for its journal when it is initialised.
func JournalBuckets(n uint64) int { return int(min(max(n>>7, 2), MaxJournalBuckets)) }
