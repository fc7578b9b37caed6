package offline

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A want is a finding that a check must come to.
type want struct {
	code     Code
	severity Severity
	at       place
	says     string // a part of the message
}

// A place returns the device and the sector on it, -1 where there is no one place.
type place func(b *build) (device string, sector int64)

func onCache(sector uint64) place {
	return func(*build) (string, int64) { return "cache", int64(sector) }
}
func onDisk(*build) (string, int64)     { return "backing0", 8 }
func inSuper(*build) (string, int64)    { return "cache", 8 }
func nowhere(*build) (string, int64)    { return "cache", -1 }
func inUUIDs(b *build) (string, int64)  { return "cache", int64(b.uuids.P[0].Sector()) }
func inPrios(b *build) (string, int64)  { return "cache", int64(b.geo.BucketStart(b.prios[0])) }
func inNewest(b *build) (string, int64) { return "cache", int64(b.newest().sector) }
func anywhere(*build) (string, int64)   { return "cache", -2 }

// inEntry is the place of the ith entry that was made, inNode that of the ith node and a block in it.
func inEntry(i int) place {
	return func(b *build) (string, int64) { return "cache", int64(b.entries[i].sector) }
}

func inNode(i, block int) place {
	return func(b *build) (string, int64) { return "cache", int64(b.nodes[i].P[0].Sector()) + int64(block) }
}

func inRing(index int) place {
	return func(b *build) (string, int64) { return "cache", int64(b.geo.BucketStart(b.super.D[index])) }
}

func inBucket(n uint64) place {
	return func(b *build) (string, int64) { return "cache", int64(b.geo.BucketStart(n)) }
}

// What becomes of the volume of the first backing device.
type fate uint8

const (
	reads    fate = iota // it reads as reads says
	setFatal             // the set cannot be opened
	refused              // the set can, the volume must not be given
	gone                 // the backing device is no such thing
)

// A situation is a set in which something is to be found.
type situation struct {
	name  string
	build func(b *build)
	found []want // all that there is to find, in any order
	fate  fate
	reads []span // what does not come from the backing device
}

// flip turns a bit over.
func flip(p []byte) { p[0] ^= 0x10 }

// manyKeys returns n keys of one sector, with one free between two, whose data begins at bucket n.
func manyKeys(n int, from, bucket uint64) []ondisk.Key {
	list := make([]ondisk.Key, n)
	for i := range list {
		list[i] = dirtyKey(from+2*uint64(i), 1, dataAt(bucket, 0)+uint64(i))
	}
	return list
}

// spansOf says where keys are read from that nothing hides.
func spansOf(keys ...ondisk.Key) []span {
	var s []span
	for _, k := range keys {
		s = append(s, cached(k.Start(), k.End(), k.P[0].Sector()))
	}
	return s
}

// useBuckets gives every bucket from a on a live extent of one sector, up to b.
func useBuckets(b *build, from, to uint64) (list []ondisk.Key) {
	for n := from; n < to; n++ {
		list = append(list, dirtyKey(16+2*(n-from), 1, b.geo.BucketStart(n)))
	}
	return list
}

var situations = []situation{
	{name: "nothing", build: func(b *build) {}},
	{
		name: "ordinary",
		build: func(b *build) {
			b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(0, 8))), keySet(dirtyKey(1000, 16, dataAt(1, 0))))
			b.journal(dirtyKey(20, 1, dataAt(2, 0)), goneKey(1002, 2))
		},
		reads: []span{cached(16, 24, dataAt(0, 0)), cached(20, 21, dataAt(2, 0)), cached(40, 48, dataAt(0, 8)), cached(1000, 1002, dataAt(1, 0)), cached(1004, 1016, dataAt(1, 4))},
	},

	// The superblock.
	{
		name:  "superblock cannot be read",
		build: func(b *build) { b.cache.breaks(8, 1) },
		found: []want{{SuperUnreadable, Fatal, inSuper, ""}}, fate: setFatal,
	},
	{
		name:  "superblock with a flipped bit",
		build: func(b *build) { b.then(func() { flip(b.cache.at(8, 1)[72:]) }) },
		found: []want{{SuperRefused, Fatal, inSuper, "csum"}}, fate: setFatal,
	},
	{
		name:  "superblock of a backing device",
		build: func(b *build) { b.then(func() { copy(b.cache.at(8, 8), b.disks[0].at(8, 8)) }) },
		found: []want{{SuperRefused, Fatal, inSuper, "that of a backing device"}}, fate: setFatal,
	},
	{
		name:  "257 journal buckets",
		build: func(b *build) { b.then(func() { binary.LittleEndian.PutUint16(b.cache.at(8, 1)[206:], 257) }) },
		found: []want{{SuperRefused, Fatal, inSuper, "257"}}, fate: setFatal,
	},
	{
		name: "a journal of three buckets",
		build: func(b *build) {
			b.super.NJournal = 3
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
		},
		found: []want{{SuperLimited, Degraded, inSuper, "cannot advance"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "a read-only-compatible feature",
		build: func(b *build) {
			b.super.Version, b.super.ROCompat = ondisk.VersionCacheFeature, 4
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
		},
		found: []want{{SuperLimited, Degraded, inSuper, "feature_ro_compat"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "the obsolete large-bucket layout",
		build: func(b *build) {
			b.super.Version, b.super.Incompat = ondisk.VersionCacheFeature, ondisk.IncompatObsoLargeBucket
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
		},
		found: []want{{SuperLimited, Degraded, inSuper, "obsolete"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "a compatible feature",
		build: func(b *build) {
			b.super.Version, b.super.Compat = ondisk.VersionCacheFeature, 8
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
		},
		found: []want{{SuperFeature, Harmless, inSuper, "0x8"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "formatted and never used",
		build: func(b *build) {
			b.super.Flags, b.super.NJournal, b.super.Version = 0, 0, ondisk.VersionCache0
			b.disks[0].super.SetState(ondisk.StateNone)
			b.journal(dirtyKey(16, 8, dataAt(0, 0))) // of an earlier life
			b.super.NJournal = 4
			b.then(func() {
				b.super.NJournal = 0
				b.super.SetChecksum()
				b.super.Encode(b.cache.at(8, 8))
			})
		},
		found: []want{{SuperNoSync, Harmless, inSuper, "never used"}, {BackingDetached, Harmless, onDisk, "none"}},
	},

	// The journal.
	{
		name: "a journal bucket not in use cannot be read",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.cache.breaks(b.geo.BucketStart(b.super.D[3])+5, 1)
		},
		found: []want{{JournalUnreadable, AtRisk, inRing(3), "journal bucket 3"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "a journal bucket with needed entries cannot be read",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.nextBucket()
			b.journal(dirtyKey(32, 8, dataAt(0, 8)))
			b.cache.breaks(b.geo.BucketStart(b.super.D[0]), 1)
		},
		found: []want{{JournalUnreadable, AtRisk, inRing(0), ""}, {JournalGap, Fatal, inNewest, "journal entries 1-1 missing, needed are 1-2"}}, fate: setFatal,
	},
	{
		name: "no journal entry",
		build: func(b *build) {
			b.then(func() { clear(b.cache.at(b.newest().sector, 1)) })
		},
		found: []want{{JournalEmpty, Fatal, inRing(0), "no journal entries found"}}, fate: setFatal,
	},
	{
		name: "the newest entry is torn",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			torn := b.journal(dirtyKey(32, 8, dataAt(0, 8)))
			b.then(func() { flip(b.cache.at(torn.sector, 1)[250:]) })
		},
		found: []want{{JournalTorn, Harmless, inNewest, "seq 2"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "an entry is torn in the middle",
		build: func(b *build) {
			for i := range uint64(3) {
				b.journal(dirtyKey(16+8*i, 8, dataAt(0, 0)))
				b.nextBucket()
			}
			b.then(func() { flip(b.cache.at(b.entries[1].sector, 1)[250:]) })
		},
		found: []want{{JournalTorn, Harmless, inEntry(1), "seq 2"}, {JournalGap, Fatal, inEntry(2), "journal entries 2-2 missing, needed are 1-3"}}, fate: setFatal,
	},
	{
		name: "the first needed entries are missing",
		build: func(b *build) {
			b.ring.seq = 7
			b.journal(dirtyKey(16, 8, dataAt(0, 0))).LastSeq = 4
		},
		found: []want{{JournalGap, Fatal, inNewest, "journal entries 4-6 missing, needed are 4-7"}}, fate: setFatal,
	},
	{
		name: "the first needed entries are missing on a device that discards",
		build: func(b *build) {
			b.super.Flags |= ondisk.FlagDiscard
			b.ring.seq = 7
			b.journal(dirtyKey(16, 8, dataAt(0, 0))).LastSeq = 4
		},
		found: []want{{JournalDiscarded, Harmless, inNewest, "journal entries 4-6 missing"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "an entry is missing in the middle on a device that discards",
		build: func(b *build) {
			b.super.Flags |= ondisk.FlagDiscard
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.ring.seq++
			b.journal(dirtyKey(32, 8, dataAt(0, 8)))
		},
		found: []want{{JournalGap, Fatal, inNewest, "journal entries 2-2 missing, needed are 1-3"}}, fate: setFatal,
	},
	{
		name: "an entry needs more than it is",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.journal(dirtyKey(32, 8, dataAt(0, 8))).LastSeq = 9
		},
		found: []want{{JournalDamaged, AtRisk, inNewest, "last_seq is 9, larger than seq 2"}, {JournalGap, Fatal, inNewest, "entry 2 cannot be replayed"}}, fate: setFatal,
	},
	{
		name: "an entry is right but for its magic",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0))).LastSeq = 1
			b.nextBucket()
			b.journal(dirtyKey(32, 8, dataAt(0, 8))).LastSeq = 2
			b.then(func() { flip(b.cache.at(b.entries[0].sector, 1)[8:]) })
		},
		found: []want{{JournalDamaged, AtRisk, inEntry(0), "right but for its magic"}}, reads: spansOf(dirtyKey(32, 8, dataAt(0, 8))),
	},
	{
		name: "the newest entry is right but for its magic, and counts",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.journal(dirtyKey(32, 8, dataAt(0, 8)))
			b.then(func() { flip(b.cache.at(b.entries[1].sector, 1)[8:]) })
		},
		found: []want{{JournalDamaged, AtRisk, inNewest, "right but for its magic"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(32, 8, dataAt(0, 8))),
	},
	{
		name: "an entry went bad, and whole ones stand behind it in its bucket",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.journal(dirtyKey(16, 8, dataAt(0, 8)))
			b.journal(dirtyKey(32, 8, dataAt(0, 16)))
			b.then(func() { flip(b.cache.at(b.entries[1].sector, 1)[250:]) })
		},
		found: []want{{JournalTorn, Harmless, inEntry(1), "seq 2"}, {JournalGap, Fatal, inEntry(2), "journal entries 2-2 missing, needed are 1-3"}}, fate: setFatal,
	},
	{
		name: "a needed entry has words that are no key",
		build: func(b *build) {
			e := b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			binary.LittleEndian.PutUint64(e.Data, 7<<60)
		},
		found: []want{{JournalDamaged, AtRisk, inNewest, "ptrs is 7"}, {JournalGap, Fatal, inNewest, "entry 1"}}, fate: setFatal,
	},
	{
		name: "an entry is there twice",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.journal(dirtyKey(32, 8, dataAt(0, 8)))
			b.ring.seq = 1
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
		},
		found: []want{{JournalOrder, AtRisk, inNewest, "entry 1 is there twice"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(32, 8, dataAt(0, 8))),
	},
	{
		name: "entries in the wrong order in a bucket",
		build: func(b *build) {
			b.ring.seq = 2
			b.journal(dirtyKey(16, 8, dataAt(0, 0))).LastSeq = 1
			b.ring.seq = 1
			b.journal(dirtyKey(16, 16, dataAt(1, 0))).LastSeq = 1
		},
		found: []want{{JournalOrder, AtRisk, inEntry(0), "entry 2 lies before entry 1"}}, reads: []span{cached(16, 24, dataAt(0, 0)), cached(24, 32, dataAt(1, 8))},
	},
	{
		name: "a journal bucket left out",
		build: func(b *build) {
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			b.nextBucket()
			b.nextBucket()
			b.journal(dirtyKey(32, 8, dataAt(0, 8)))
		},
		found: []want{{JournalOrder, AtRisk, inNewest, "entry 2 is in journal bucket 2, entry 1 before it in 0"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(32, 8, dataAt(0, 8))),
	},
	{
		name:  "a journalled key of size 0",
		build: func(b *build) { b.journal(dirtyKey(16, 8, dataAt(0, 0)), goneKey(20, 0)) },
		found: []want{{JournalKey, AtRisk, inNewest, "size is 0"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "a journalled key that begins before its device",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(40, 8, dataAt(0, 8))))
			k := dirtyKey(0, 20, dataAt(1, 0))
			k.High += 5 << 20 // [-5, 20)
			b.journal(k)
		},
		found: []want{{JournalKey, AtRisk, inNewest, "size is larger than the end"}},
		reads: []span{unknown(16, 20), cached(20, 24, dataAt(0, 4)), cached(40, 48, dataAt(0, 8))},
	},
	{
		name: "a journalled key outside of the device",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.journal(dirtyKey(18, 2, 600*16))
		},
		found: []want{{JournalKey, AtRisk, inNewest, "bucket is not one of this device"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(18, 20)},
	},

	// Prio sets.
	{
		name:  "prio set cannot be read",
		build: func(b *build) { b.cache.breaks(b.geo.BucketStart(b.prios[0])+3, 1) },
		found: []want{{PrioUnreadable, Fatal, inPrios, ""}}, fate: setFatal,
	},
	{
		name:  "prio set with a flipped bit in its unused tail",
		build: func(b *build) { b.then(func() { flip(b.cache.at(b.geo.BucketStart(b.prios[0]), 16)[8191:]) }) },
		found: []want{{PrioDamaged, Fatal, inPrios, "bad csum reading priorities"}}, fate: setFatal,
	},
	{
		name:  "prio set in no bucket",
		build: func(b *build) { b.header.PrioBucket[0] = 600 },
		found: []want{{PrioChain, Fatal, inNewest, "would be in bucket 600"}}, fate: setFatal,
	},
	{
		name:  "prio set in the journal",
		build: func(b *build) { b.header.PrioBucket[0] = b.super.D[1] },
		found: []want{{PrioChain, Fatal, inRing(1), "which is journal"}}, fate: setFatal,
	},

	// The uuid array.
	{
		name:  "uuid_bucket points behind the device",
		build: func(b *build) { b.header.UUIDBucket.P[0] = ondisk.MakePtr(1, 600*16, 0) },
		found: []want{{UUIDPointer, Fatal, inNewest, "bad uuid pointer"}}, fate: setFatal,
	},
	{
		name:  "uuid_bucket is too small",
		build: func(b *build) { b.header.UUIDBucket = ondisk.NewChild(0, 0, 8, b.uuids.P[0]) },
		found: []want{{UUIDPointer, Fatal, inNewest, "16 sectors"}}, fate: setFatal,
	},
	{
		name:  "uuid_bucket begins within a bucket",
		build: func(b *build) { b.header.UUIDBucket.P[0] = b.uuids.P[0].Advance(1) },
		found: []want{{UUIDPointer, Fatal, inNewest, "runs past the end"}}, fate: setFatal,
	},
	{
		name:  "uuid array cannot be read",
		build: func(b *build) { b.cache.breaks(b.uuids.P[0].Sector()+15, 1) },
		found: []want{{UUIDUnreadable, Fatal, inUUIDs, ""}}, fate: setFatal,
	},
	{
		name: "two slots of one device",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.slots[3] = b.slots[0]
		},
		found: []want{{UUIDDuplicate, AtRisk, inUUIDs, "slots 0 and 3"}, {BackingAbsent, Harmless, inUUIDs, "slot 3"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "uuid entries of 64 bytes",
		build: func(b *build) {
			delete(b.slots, 0)
			b.slots[2] = ondisk.UUIDEntry{UUID: b.disks[0].super.UUID}
			b.oldUUIDs, b.header.Version = true, 0
			b.onlyLeaf(keySet(inInode(2, dirtyKey(16, 8, dataAt(0, 0)))))
		},
		found: []want{{UUIDOld, Harmless, inUUIDs, "64 bytes"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},

	// The tree.
	{
		name: "the root is nowhere",
		build: func(b *build) {
			b.root(ondisk.NewChild(ondisk.MaxInode, ondisk.MaxOffset, 16, ondisk.MakePtr(1, 0, 0)), 0)
		},
		found: []want{{RootPointer, Fatal, inNewest, "bad btree root"}}, fate: setFatal,
	},
	{
		name: "the root is at level 9",
		build: func(b *build) {
			b.onlyLeaf()
			b.header.Level = 9
		},
		found: []want{{RootPointer, Fatal, inNewest, "btree_level is 9"}}, fate: setFatal,
	},
	{
		name:  "the root cannot be read",
		build: func(b *build) { b.cache.breaks(b.onlyLeaf().P[0].Sector(), 1) },
		found: []want{{RootUnreadable, Fatal, inNode(0, 0), ""}}, fate: setFatal,
	},
	{
		name: "the root is damaged",
		build: func(b *build) {
			r := b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.then(func() { flip(b.cache.at(r.P[0].Sector(), 1)[40:]) })
		},
		found: []want{{RootDamaged, Fatal, inNode(0, 0), "bad checksum"}}, fate: setFatal,
	},
	{
		name: "a leaf cannot be read",
		build: func(b *build) {
			l, _ := b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet(dirtyKey(1000, 8, dataAt(1, 0))))
			b.journal(dirtyKey(20, 8, dataAt(2, 0)), goneKey(40, 8))
			b.cache.breaks(l.P[0].Sector()+3, 1)
		},
		found: []want{{NodeUnreadable, AtRisk, inNode(0, 0), "level 0"}},
		reads: []span{unknown(0, 1000), cached(20, 28, dataAt(2, 0)), {40, 48, source{fromDisk, 40}}, cached(1000, 1008, dataAt(1, 0))},
	},
	{
		name: "a leaf is damaged, and its range is the end of one inode and the beginning of the next",
		build: func(b *build) {
			b.flash(1, "f", 64)
			b.slots[2] = ondisk.UUIDEntry{UUID: b.disks[0].super.UUID}
			delete(b.slots, 0)
			l := b.leaf(Pos{1, 10}, keySet(inInode(1, dirtyKey(0, 10, dataAt(0, 0)))))
			m := b.leaf(Pos{2, 500}, keySet(inInode(1, dirtyKey(10, 10, dataAt(1, 0))), inInode(2, dirtyKey(100, 10, dataAt(2, 0)))))
			r := b.leaf(top, keySet(inInode(2, dirtyKey(500, 10, dataAt(3, 0)))))
			b.root(b.interior(keySet(l, m, r)), 1)
			b.then(func() { flip(b.cache.at(m.P[0].Sector(), 1)[60:]) })
		},
		found: []want{{NodeDamaged, AtRisk, inNode(1, 0), "bad checksum"}},
		reads: []span{unknown(0, 500), cached(500, 510, dataAt(3, 0))},
	},
	{
		name: "an append to a leaf was torn, and the journal has its keys",
		build: func(b *build) {
			l, _ := b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet())
			b.journal(manyKeys(25, 28, 2)...)
			b.then(func() { b.tornAppend(l, manyKeys(25, 28, 2)...) })
		},
		found: []want{{NodeTorn, Degraded, inNode(0, 1), "bad checksum"}},
		reads: append(spansOf(manyKeys(25, 28, 2)...), cached(16, 24, dataAt(0, 0))),
	},
	{
		name: "the last set of a leaf went bad, and the journal has some keys of its range, newer ones",
		build: func(b *build) {
			l, _ := b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet())
			b.journal(dirtyKey(28, 2, dataAt(1, 0)))
			b.then(func() { b.rottenAppend(l, manyKeys(25, 28, 2)...) })
		},
		found: []want{{NodeDamaged, AtRisk, inNode(0, 1), "bad checksum"}},
		reads: []span{unknown(0, 1000), cached(28, 30, dataAt(1, 0))},
	},
	{
		name: "an append to a leaf was torn, and the journal has keys beside its range alone",
		build: func(b *build) {
			l, _ := b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet(dirtyKey(1004, 4, dataAt(1, 0))))
			b.journal(dirtyKey(1000, 2, dataAt(1, 8)))
			b.then(func() { b.tornAppend(l, manyKeys(25, 18, 2)...) })
		},
		found: []want{{NodeDamaged, AtRisk, inNode(0, 1), "bad checksum"}},
		reads: []span{unknown(0, 1000), cached(1000, 1002, dataAt(1, 8)), cached(1004, 1008, dataAt(1, 0))},
	},
	{
		name: "an append to the only leaf was torn, and the journal has its keys",
		build: func(b *build) {
			l := b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.journal(manyKeys(25, 28, 2)...)
			b.then(func() { b.tornAppend(l, manyKeys(25, 28, 2)...) })
		},
		found: []want{{NodeTorn, Degraded, inNode(0, 1), ""}},
		reads: append(spansOf(manyKeys(25, 28, 2)...), cached(16, 24, dataAt(0, 0))),
	},
	{
		name: "an append to the only leaf was torn, and the journal is empty",
		build: func(b *build) {
			l := b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.then(func() { b.tornAppend(l, manyKeys(25, 18, 2)...) })
		},
		found: []want{{RootDamaged, Fatal, inNode(0, 1), ""}}, fate: setFatal,
	},
	{
		name: "a set of a leaf is damaged, and another stands behind it",
		build: func(b *build) {
			l, _ := b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet())
			b.journal(dirtyKey(18, 2, dataAt(1, 0)))
			b.then(func() {
				b.appendTo(l, manyKeys(25, 18, 2)...)
				b.appendTo(l, dirtyKey(200, 1, dataAt(4, 0)))
				flip(b.cache.at(l.P[0].Sector()+1, 1)[100:])
			})
		},
		found: []want{{NodeDamaged, AtRisk, inNode(0, 1), ""}},
		reads: []span{unknown(0, 1000), cached(18, 20, dataAt(1, 0))},
	},
	{
		name: "a block with the node's seq behind its last set",
		build: func(b *build) {
			l, _ := b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet())
			b.journal(dirtyKey(18, 2, dataAt(1, 0)))
			b.then(func() { copy(b.cache.at(l.P[0].Sector()+9, 1)[16:24], b.cache.at(l.P[0].Sector(), 1)[16:24]) })
		},
		found: []want{{NodeDamaged, AtRisk, inNode(0, 1), "corrupted btree"}},
		reads: []span{unknown(0, 1000), cached(18, 20, dataAt(1, 0))},
	},
	{
		name: "an append to the root, an interior node, was torn",
		build: func(b *build) {
			old := b.leaf(Pos{0, 1000}, keySet(dirtyKey(16, 8, dataAt(0, 0))))
			rest := b.leaf(top, keySet(dirtyKey(1000, 8, dataAt(1, 0))))
			root := b.interior(keySet(old, rest))
			b.root(root, 1)
			split := []ondisk.Key{b.leaf(Pos{0, 20}), b.leaf(Pos{0, 1000}), freeingKey(old)}
			b.journal(dirtyKey(40, 2, dataAt(2, 0)))
			b.then(func() { b.tornAppend(root, split...) })
		},
		found: []want{{RootDamaged, Fatal, inNode(2, 1), "level 1"}}, fate: setFatal,
	},
	{
		name: "an append to an interior node was torn, and the journal has a key of its range",
		build: func(b *build) {
			low := b.node(Pos{0, 500}, []bset{keySet(b.leaf(Pos{0, 500}, keySet(dirtyKey(16, 8, dataAt(0, 0)))))})
			high := b.interior(keySet(b.leaf(top, keySet(dirtyKey(500, 8, dataAt(1, 0))))))
			b.root(b.interior(keySet(low, high)), 2)
			b.journal(dirtyKey(40, 2, dataAt(2, 0)))
			b.then(func() { b.tornAppend(low, b.nodes[0], freeingKey(b.nodes[0])) })
		},
		found: []want{{NodeDamaged, AtRisk, inNode(1, 1), "level 1"}},
		reads: []span{unknown(0, 500), cached(40, 42, dataAt(2, 0)), cached(500, 508, dataAt(1, 0))},
	},
	{
		name: "an append to an interior node below the root was torn without cover",
		build: func(b *build) {
			low := b.node(Pos{0, 500}, []bset{keySet(b.leaf(Pos{0, 500}, keySet(dirtyKey(16, 8, dataAt(0, 0)))))})
			high := b.interior(keySet(b.leaf(top, keySet(dirtyKey(500, 8, dataAt(1, 0))))))
			b.root(b.interior(keySet(low, high)), 2)
			b.journal(dirtyKey(600, 2, dataAt(2, 0)))
			b.then(func() { b.tornAppend(low, b.nodes[0], freeingKey(b.nodes[0])) })
		},
		found: []want{{NodeDamaged, AtRisk, inNode(1, 1), "level 1"}},
		reads: []span{unknown(0, 500), cached(500, 508, dataAt(1, 0)), cached(600, 602, dataAt(2, 0))},
	},
	{
		name: "a child outside of the device",
		build: func(b *build) {
			bad := ondisk.NewChild(0, 1000, 16, ondisk.MakePtr(1, 600*16, 0))
			b.root(b.interior(keySet(b.leaf(Pos{0, 500}, keySet(dirtyKey(16, 8, dataAt(0, 0)))), bad, b.leaf(top))), 1)
		},
		found: []want{{NodeChild, AtRisk, inNode(2, 0), "bucket is not one of this device"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(500, 1000)},
	},
	{
		name: "a dirty child",
		build: func(b *build) {
			l := b.leaf(Pos{0, 1000}, keySet(dirtyKey(16, 8, dataAt(0, 0))))
			l.High |= 1 << 36
			b.root(b.interior(keySet(l, b.leaf(top))), 1)
		},
		found: []want{{NodeChild, AtRisk, inNode(2, 0), "is dirty"}},
		reads: []span{unknown(0, 1000)},
	},
	{
		name: "a child within a bucket",
		build: func(b *build) {
			bad := ondisk.NewChild(0, 1000, 8, ondisk.MakePtr(1, dataAt(0, 8), 0))
			b.root(b.interior(keySet(bad, b.leaf(top))), 1)
		},
		found: []want{{NodeChild, AtRisk, inNode(1, 0), "start of a bucket"}},
		reads: []span{unknown(0, 1000)},
	},
	{
		name: "children that end before their node",
		build: func(b *build) {
			b.root(b.interior(keySet(b.leaf(Pos{0, 1000}, keySet(dirtyKey(16, 8, dataAt(0, 0)))))), 1)
		},
		found: []want{{NodeCoverage, AtRisk, inNode(1, 0), "its 1 live children end at"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(1000, volumeEnd+16)},
	},
	{
		name: "no live child",
		build: func(b *build) {
			l := b.leaf(top, keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.root(b.interior(keySet(l), keySet(freeingKey(l))), 1)
		},
		found: []want{{NodeCoverage, AtRisk, inNode(1, 0), "its 0 live children"}, {BucketGenAhead, Harmless, anywhere, ""}},
		reads: []span{unknown(0, volumeEnd+16)},
	},
	{
		name: "keys of a leaf in the wrong order",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(40, 8, dataAt(0, 8)), dirtyKey(16, 8, dataAt(0, 0))))
		},
		found: []want{{NodeOrder, AtRisk, inNode(0, 0), "begins before"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(40, 8, dataAt(0, 8))),
	},
	{
		name: "keys of one set that overlap",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(20, 8, dataAt(1, 0)), dirtyKey(40, 8, dataAt(0, 8))))
		},
		found: []want{{NodeOrder, AtRisk, inNode(0, 0), "begins before"}},
		reads: []span{cached(16, 20, dataAt(0, 0)), unknown(20, 24), cached(24, 28, dataAt(1, 4)), cached(40, 48, dataAt(0, 8))},
	},
	{
		name: "children in the wrong order",
		build: func(b *build) {
			l, r := b.leaf(Pos{0, 1000}, keySet(dirtyKey(16, 8, dataAt(0, 0)))), b.leaf(top, keySet(dirtyKey(1000, 8, dataAt(1, 0))))
			b.root(b.interior(keySet(r, l)), 1)
		},
		found: []want{{NodeOrder, AtRisk, inNode(2, 0), "comes after"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(1000, 8, dataAt(1, 0))),
	},
	{
		name: "two live children of one position",
		build: func(b *build) {
			a, c := b.leaf(Pos{0, 1000}, keySet(dirtyKey(16, 8, dataAt(0, 0)))), b.leaf(Pos{0, 1000}, keySet(dirtyKey(32, 8, dataAt(1, 0))))
			b.root(b.interior(keySet(a, b.leaf(top, keySet(dirtyKey(1000, 8, dataAt(2, 0))))), keySet(c)), 1)
		},
		found: []want{{NodeOrder, AtRisk, inNode(3, 0), "both live"}},
		reads: []span{unknown(0, 1000), cached(1000, 1008, dataAt(2, 0))},
	},
	{
		name: "a leaf with a key of its neighbour's range",
		build: func(b *build) {
			b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(996, 8, dataAt(1, 0))), keySet(dirtyKey(1002, 8, dataAt(2, 0))))
		},
		found: []want{{NodeBounds, AtRisk, inNode(0, 0), "0:996 len 8"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), cached(996, 1000, dataAt(1, 0)), unknown(1000, 1004), cached(1004, 1010, dataAt(2, 2))},
	},
	{
		name: "an interior node with a child behind its end",
		build: func(b *build) {
			low := b.node(Pos{0, 500}, []bset{keySet(b.leaf(Pos{0, 500}, keySet(dirtyKey(16, 8, dataAt(0, 0)))), b.leaf(Pos{0, 700}, keySet(dirtyKey(600, 8, dataAt(1, 0)))))})
			high := b.interior(keySet(b.leaf(top, keySet(dirtyKey(500, 8, dataAt(2, 0)), dirtyKey(800, 8, dataAt(2, 8))))))
			b.root(b.interior(keySet(low, high)), 2)
		},
		found: []want{{NodeBounds, AtRisk, inNode(2, 0), "key 0:684 len 16"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(500, 700), cached(800, 808, dataAt(2, 8))},
	},
	{
		name: "merged keys that do not fit in the blocks written",
		build: func(b *build) {
			var old, inside []ondisk.Key
			for i := range uint64(20) {
				old = append(old, dirtyKey(16+16*i, 12, dataAt(i, 0)))
				inside = append(inside, dirtyKey(20+16*i, 2, dataAt(40, 2*i%16)+16*(2*i/16)))
			}
			b.onlyLeaf(keySet(old...), keySet(inside...))
		},
		found: []want{{NodeOverfull, Degraded, inNode(0, 0), ""}},
		reads: func() (s []span) {
			for i := range uint64(20) {
				s = append(s, cached(16+16*i, 28+16*i, dataAt(i, 0)), cached(20+16*i, 22+16*i, dataAt(40, 2*i%16)+16*(2*i/16)))
			}
			return s
		}(),
	},

	// Keys.
	{
		name: "an extent outside of the device",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet(dirtyKey(20, 2, 600*16)))
		},
		found: []want{{KeyBad, AtRisk, inNode(0, 0), "bucket is not one of this device"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(20, 22)},
	},
	{
		name: "an extent that leaves its bucket",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(30, 4, dataAt(0, 14))))
		},
		found: []want{{KeyBad, AtRisk, inNode(0, 0), "runs past the end of its bucket"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(30, 34)},
	},
	{
		name: "an extent of a slot that cannot exist",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), inInode(64, dirtyKey(30, 4, dataAt(0, 8)))))
		},
		found: []want{{KeyBad, AtRisk, inNode(0, 0), "not a slot"}},
		reads: []span{cached(16, 24, dataAt(0, 0))},
	},
	{
		name: "an extent that begins before its device",
		build: func(b *build) {
			k := dirtyKey(0, 20, dataAt(1, 0))
			k.High += 5 << 20
			b.twoLeaves(keySet(k, dirtyKey(100, 8, dataAt(0, 0))), keySet(dirtyKey(1000, 8, dataAt(1, 0))))
		},
		found: []want{{NodeDamaged, AtRisk, inNode(0, 0), "what it hides is not known"}},
		reads: []span{unknown(0, 1000), cached(1000, 1008, dataAt(1, 0))},
	},
	{
		name: "a pointer 97 generations behind",
		build: func(b *build) {
			b.gens[dataBucket] = 98
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
		},
		found: []want{{KeyTooStale, AtRisk, onCache(dataAt(0, 0)), "97 generations behind"}, {KeyStaleDirty, Harmless, onCache(dataAt(0, 0)), ""}},
	},
	{
		name: "pointers a little behind",
		build: func(b *build) {
			b.gens[dataBucket] = 97
			b.onlyLeaf(
				keySet(cleanKey(16, 8, dataAt(1, 0)), dirtyKey(40, 8, dataAt(1, 8))),
				keySet(cleanKey(20, 2, dataAt(0, 0)), withGen(96, dirtyKey(44, 2, dataAt(0, 2)))),
			)
		},
		found: []want{{KeyStale, Harmless, onCache(dataAt(0, 0)), "generation 97"}, {KeyStaleDirty, Harmless, onCache(dataAt(0, 2)), "generation 97"}},
		reads: []span{cached(16, 20, dataAt(1, 0)), cached(22, 24, dataAt(1, 6)), cached(40, 44, dataAt(1, 8)), cached(46, 48, dataAt(1, 14))},
	},
	{
		name: "placeholders of read misses",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet(fillKey(20, 2), fillKey(60, 2)))
		},
		found: []want{{KeyCheck, Harmless, inNode(0, 0), "placeholder"}},
		reads: []span{cached(16, 20, dataAt(0, 0)), cached(22, 24, dataAt(0, 6))},
	},
	{
		name: "an extent with two pointers",
		build: func(b *build) {
			k := dirtyKey(16, 8, dataAt(0, 0))
			k.High += 1 << 60
			k.P[1] = ondisk.MakePtr(1, dataAt(1, 0), 0)
			b.onlyLeaf(keySet(k, dirtyKey(40, 8, dataAt(2, 0))))
		},
		found: []want{{KeyManyPtrs, Degraded, inNode(0, 0), "several pointers"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(40, 8, dataAt(2, 0))),
	},
	{
		name: "size 0 in a leaf",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet(dirtyKey(20, 0, dataAt(1, 0)), goneKey(22, 0), cleanKey(100, 4, dataAt(2, 0))))
		},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(100, 4, dataAt(2, 0))),
	},
	{
		name: "a set of version 0",
		build: func(b *build) {
			b.onlyLeaf(bset{[]ondisk.Key{dirtyKey(16, 8, dataAt(0, 0))}, 0}, keySet(dirtyKey(20, 2, dataAt(1, 0))))
		},
		reads: []span{cached(16, 24, dataAt(0, 0)), cached(20, 22, dataAt(1, 0))},
	},

	// Buckets.
	{
		name: "an extent that lies in the root",
		build: func(b *build) {
			next := b.geo.BucketStart(b.next)
			b.onlyLeaf(keySet(dirtyKey(16, 8, next), dirtyKey(40, 8, dataAt(0, 0))))
		},
		found: []want{{BucketTwoRoles, AtRisk, inNode(0, 0), "is btree"}},
		reads: []span{unknown(16, 24), cached(40, 48, dataAt(0, 0))},
	},
	{
		name: "a leaf where the uuid array is",
		build: func(b *build) {
			u := b.geo.Bucket(b.uuids.P[0].Sector())
			bad := ondisk.NewChild(0, 1000, 16, ondisk.MakePtr(1, b.geo.BucketStart(u), 0))
			b.root(b.interior(keySet(bad, b.leaf(top, keySet(dirtyKey(1000, 8, dataAt(0, 0)))))), 1)
		},
		found: []want{{BucketTwoRoles, AtRisk, inUUIDs, "is uuid"}},
		reads: []span{unknown(0, 1000), cached(1000, 1008, dataAt(0, 0))},
	},
	{
		name: "the tree leads back to its root",
		build: func(b *build) {
			self := b.geo.BucketStart(b.next + 1)
			bad := ondisk.NewChild(0, 1000, 16, ondisk.MakePtr(1, self, 0))
			b.root(b.interior(keySet(bad, b.leaf(top))), 1)
		},
		found: []want{{BucketTwoRoles, AtRisk, inNode(1, 0), "is btree"}},
		reads: []span{unknown(0, 1000)},
	},
	{
		name: "two extents on the same sectors",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(40, 8, dataAt(0, 6))))
		},
		found: []want{{BucketShared, AtRisk, onCache(dataAt(0, 6)), "share sectors"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(40, 8, dataAt(0, 6))),
	},
	{
		name: "pointers ahead of the prio sets",
		build: func(b *build) {
			b.onlyLeaf(
				keySet(dirtyKey(16, 8, dataAt(0, 0)), withGen(3, cleanKey(40, 8, dataAt(0, 8)))),
				keySet(withGen(2, cleanKey(60, 8, dataAt(1, 0)))),
			)
			b.journal(withGen(2, dirtyKey(80, 8, dataAt(2, 0))))
		},
		found: []want{{BucketGenAhead, Harmless, inBucket(dataBucket), "generation 3, 1 in the prio set"}, {KeyStaleDirty, Harmless, onCache(dataAt(0, 0)), ""}},
		reads: []span{cached(40, 48, dataAt(0, 8)), cached(60, 68, dataAt(1, 0)), cached(80, 88, dataAt(2, 0))},
	},
	{
		name: "no bucket unused",
		build: func(b *build) {
			var l, r []ondisk.Key
			for i, k := range useBuckets(b, b.next+3, 600) {
				if i < 300 {
					l = append(l, k)
				} else {
					r = append(r, k)
				}
			}
			b.root(b.interior(keySet(b.leaf(Pos{0, r[0].Start()}, keySet(l...)), b.leaf(top, keySet(r...)))), 1)
		},
		found: []want{{BucketFew, Degraded, nowhere, "0 buckets are unused"}},
		reads: spansOf(useBuckets(&build{geo: ondisk.NewGeometry(&ondisk.Superblock{BlockSize: 1, BucketSize16: 16})}, 8+3, 600)...),
	},
	{
		name: "few buckets unused",
		build: func(b *build) {
			var l, r []ondisk.Key
			for i, k := range useBuckets(b, b.next+3, 598) {
				if i < 300 {
					l = append(l, k)
				} else {
					r = append(r, k)
				}
			}
			b.root(b.interior(keySet(b.leaf(Pos{0, r[0].Start()}, keySet(l...)), b.leaf(top, keySet(r...)))), 1)
		},
		found: []want{{BucketHeadroom, Harmless, nowhere, "2 buckets are unused"}},
		reads: spansOf(useBuckets(&build{geo: ondisk.NewGeometry(&ondisk.Superblock{BlockSize: 1, BucketSize16: 16})}, 8+3, 598)...),
	},

	// Slots.
	{
		name: "extents of slots that were never used",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), inInode(5, dirtyKey(16, 8, dataAt(1, 0))), inInode(6, cleanKey(16, 8, dataAt(2, 0)))))
		},
		found: []want{{SlotUnknownDirty, AtRisk, onCache(dataAt(1, 0)), "slot 5"}, {SlotUnknown, Degraded, onCache(dataAt(2, 0)), "slot 6"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "extents of retired slots",
		build: func(b *build) {
			b.slots[5] = ondisk.UUIDEntry{UUID: ondisk.RetiredUUID, Invalidated: 1}
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), inInode(5, dirtyKey(16, 8, dataAt(1, 0))), inInode(5, cleanKey(26, 8, dataAt(2, 0)))))
		},
		found: []want{{SlotRetiredDirty, Harmless, onCache(dataAt(1, 0)), "slot 5"}, {SlotRetired, Harmless, onCache(dataAt(2, 0)), "slot 5"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},

	// Backing devices.
	{
		name:  "a backing device not given",
		build: func(b *build) { b.slots[1] = ondisk.UUIDEntry{UUID: ondisk.UUID{9}} },
		found: []want{{BackingAbsent, Harmless, inUUIDs, "slot 1"}},
	},
	{
		name:  "a backing device that cannot be read",
		build: func(b *build) { b.disks[0].breaks(8, 1) },
		found: []want{{BackingUnreadable, AtRisk, onDisk, ""}, {BackingAbsent, Harmless, inUUIDs, "slot 0"}}, fate: gone,
	},
	{
		name:  "a backing device with a flipped bit",
		build: func(b *build) { b.then(func() { flip(b.disks[0].at(8, 1)[72:]) }) },
		found: []want{{BackingRefused, AtRisk, onDisk, "csum"}, {BackingAbsent, Harmless, inUUIDs, "slot 0"}}, fate: gone,
	},
	{
		name:  "a backing device that is a cache device",
		build: func(b *build) { b.then(func() { copy(b.disks[0].at(8, 8), b.cache.at(8, 8)) }) },
		found: []want{{BackingRefused, AtRisk, onDisk, "device too small"}, {BackingAbsent, Harmless, inUUIDs, "slot 0"}}, fate: gone,
	},
	{
		name: "a backing device that is a cache device of its size",
		build: func(b *build) {
			b.then(func() {
				sb := b.super
				sb.BucketSize16, sb.FirstBucket, sb.NJournal = 8, 3, 4
				sb.Word184 = 513
				sb.D = [256]uint64{3, 4, 5, 6}
				sb.SetChecksum()
				big := b.newDisk("backing0", 4<<20, fromDisk, 512)
				sb.Encode(big.at(8, 8))
				b.disks[0] = big
			})
		},
		found: []want{{BackingRefused, AtRisk, onDisk, "that of a cache device"}, {BackingAbsent, Harmless, inUUIDs, "slot 0"}}, fate: gone,
	},
	{
		name: "a backing device whose data starts before 16 sectors",
		build: func(b *build) {
			b.disks[0].super.Version, b.disks[0].super.Word184 = ondisk.VersionBackingOff, 15
		},
		found: []want{{BackingRefused, AtRisk, onDisk, "Bad data offset"}, {BackingAbsent, Harmless, inUUIDs, "slot 0"}}, fate: gone,
	},
	{
		name: "a backing device of an unknown mode",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.disks[0].super.SetCacheMode(7)
		},
		found: []want{{BackingLimited, Degraded, onDisk, "cache_mode"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "a dirty backing device of another set",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.disks[0].super.SetUUID = ondisk.UUID{1}
		},
		found: []want{{BackingForeign, Degraded, onDisk, "is dirty in set"}, {BackingAbsent, Harmless, inUUIDs, "slot 0"}}, fate: refused,
	},
	{
		name: "a clean backing device of another set",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.disks[0].super.SetUUID = ondisk.UUID{1}
			b.disks[0].super.SetState(ondisk.StateClean)
		},
		found: []want{{BackingForeign, Degraded, onDisk, "is clean in set"}, {BackingAbsent, Harmless, inUUIDs, "slot 0"}}, fate: refused,
	},
	{
		name: "dirty extents of a stale backing device",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(1, 0))))
			b.disks[0].super.SetState(ondisk.StateStale)
		},
		found: []want{{BackingDetached, Harmless, onDisk, "stale"}, {DirtyVoid, Harmless, onCache(dataAt(0, 0)), "stale"}},
	},
	{
		name: "dirty extents of a detached backing device",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(1, 0))))
			b.disks[0].super.SetState(ondisk.StateNone)
		},
		found: []want{{BackingDetached, Harmless, onDisk, "none"}, {DirtyVoid, Harmless, onCache(dataAt(0, 0)), "none"}},
	},
	{
		name: "a clean backing device without a slot",
		build: func(b *build) {
			delete(b.slots, 0)
			b.disks[0].super.SetState(ondisk.StateClean)
		},
		found: []want{{BackingNoSlot, Harmless, onDisk, "no slot"}},
	},
	{
		name:  "a dirty backing device without a slot",
		build: func(b *build) { delete(b.slots, 0) },
		found: []want{{BackingLost, AtRisk, onDisk, "no slot"}}, fate: refused,
	},
	{
		name: "a dirty backing device whose cache was formatted",
		build: func(b *build) {
			b.super.Flags = 0
		},
		found: []want{{SuperNoSync, Harmless, inSuper, ""}, {BackingLost, AtRisk, onDisk, "no slot"}}, fate: refused,
	},
	{
		name: "a backing device with smaller blocks than the set",
		build: func(b *build) {
			b.super.BlockSize = 8
			b.geo = ondisk.NewGeometry(&b.super)
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
		},
		found: []want{{BackingBlock, Degraded, onDisk, "block is 1 sectors, that of the set 8"}}, reads: spansOf(dirtyKey(16, 8, dataAt(0, 0))),
	},
	{
		name: "dirty extents under a clean state",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(1, 0))))
			b.disks[0].super.SetState(ondisk.StateClean)
		},
		found: []want{{DirtyUnderClean, Harmless, onCache(dataAt(0, 0)), "has state clean"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(1, 0))),
	},
	{
		name: "extents beyond the end",
		build: func(b *build) {
			b.flash(1, "f", 20)
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(volumeEnd-4, 8, dataAt(1, 0)), cleanKey(volumeEnd+40, 4, dataAt(2, 0)), inInode(1, cleanKey(16, 8, dataAt(3, 0)))))
		},
		found: []want{{DirtyBeyondEnd, AtRisk, onCache(dataAt(1, 0)), "ends beyond sector 2048"}, {KeyBeyondEnd, Harmless, onCache(dataAt(2, 0)), "ends beyond"}},
		reads: spansOf(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(volumeEnd-4, 4, dataAt(1, 0))),
	},

	// Data.
	{
		name: "data that cannot be read",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(1, 0)), dirtyKey(60, 8, dataAt(2, 0))))
			b.cache.breaks(dataAt(0, 3), 1)
			b.cache.breaks(dataAt(1, 0), 2)
		},
		found: []want{{DataDirty, AtRisk, onCache(dataAt(0, 0)), "0:16 len 8"}, {DataClean, Degraded, onCache(dataAt(1, 0)), "0:40 len 8"}},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(19, 20), cached(40, 48, dataAt(1, 0)), unknown(40, 42), cached(60, 68, dataAt(2, 0))},
	},
	{
		name: "a backing device that gives errors",
		build: func(b *build) {
			b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0))))
			b.disks[0].breaks(20, 6)
		},
		reads: []span{cached(16, 24, dataAt(0, 0)), unknown(24, 26)},
	},
}

// appendTo writes another set to a node that is on the device.
func (b *build) appendTo(ref ondisk.Key, keys ...ondisk.Key) (block int) {
	raw := b.cache.at(ref.P[0].Sector(), int(ref.Size()))
	n := ondisk.DecodeNode(raw, &b.geo, &ref)
	if n.Err != nil {
		b.t.Fatal(n.Err)
	}
	var words []byte
	for i := range keys {
		words = ondisk.AppendKey(words, &keys[i])
	}
	at := int(n.Used) * b.geo.BlockBytes()
	if at+32+len(words) > len(raw) {
		b.t.Fatal("no room for another set")
	}
	ondisk.EncodeBSet(raw[at:], b.geo.BSetMagic(), n.Seq, ref.P[0], words)
	return int(n.Used)
}

// tornAppend does the same and is cut off: only its first sector is written. Where there is no more, its last byte is wrong.
func (b *build) tornAppend(ref ondisk.Key, keys ...ondisk.Key) {
	words := 0
	for i := range keys {
		words += keys[i].Words()
	}
	at := b.appendTo(ref, keys...) * b.geo.BlockBytes()
	node := b.cache.at(ref.P[0].Sector(), int(ref.Size()))
	if size := ondisk.BSetHeaderBytes + 8*words; size > ondisk.SectorSize {
		clear(node[at+ondisk.SectorSize : at+size])
	} else {
		flip(node[at+size-1:])
	}
}

// rottenAppend appends keys to a node, and turns over a bit of the last.
func (b *build) rottenAppend(ref ondisk.Key, keys ...ondisk.Key) {
	words := 0
	for i := range keys {
		words += keys[i].Words()
	}
	at := b.appendTo(ref, keys...) * b.geo.BlockBytes()
	flip(b.cache.at(ref.P[0].Sector(), int(ref.Size()))[at+ondisk.BSetHeaderBytes+8*words-1:])
}

// TestSituations builds each set and checks it: all is found that there is, with the right severity and in the
// right place, nothing else, and the volume reads as it must.
func TestSituations(t *testing.T) {
	for i := range situations {
		sit := &situations[i]
		t.Run(sit.name, func(t *testing.T) {
			t.Parallel()
			b := newBuild(t)
			sit.build(b)
			s, found := b.check()
			sit.compare(t, b, s.Report.Findings())
			again, err := Open(context.Background(), b.cache, Options{})
			defer func() { again.Close() }()
			if fatal := err != nil; fatal != (sit.fate == setFatal) {
				t.Fatalf("open: %v", err)
			}
			var f *FindingError
			if err != nil && (!errors.As(err, &f) || !errors.Is(err, ondisk.ErrCorrupt) || f.Finding.Severity != Fatal) {
				t.Errorf("open: %v is not a fatal finding", err)
			}
			if sit.fate == setFatal {
				return
			}
			if (sit.fate == gone) != (len(found) == 0) {
				t.Fatalf("%d backing devices accepted", len(found))
			}
			back, err := OpenBacking(again, b.disks[0])
			if (err != nil) != (sit.fate == gone) {
				t.Fatalf("backing device: %v", err)
			}
			if sit.fate == gone {
				return
			}
			v, err := OpenVolume(again, back)
			var refusal *RefusedError
			if sit.fate == refused {
				if !errors.As(err, &refusal) || refusal.Device != "backing0" {
					t.Errorf("volume: %v, want a refusal", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			mustRead(t, v, sit.reads...)
		})
	}
}

// compare holds what was found against what there is.
func (sit *situation) compare(t *testing.T, b *build, got []Finding) {
	t.Helper()
	used := make([]bool, len(got))
	for _, w := range sit.found {
		dev, sector := w.at(b)
		i := slices.IndexFunc(got, func(f Finding) bool { return f.Code == w.code })
		switch {
		case i < 0:
			t.Errorf("no %s", w.code)
			continue
		case got[i].Severity != w.severity || got[i].Device != dev || got[i].Sector != sector && sector != -2 || !strings.Contains(got[i].Message, w.says):
			t.Errorf("want %s %s at sector %d of %s that says %q, got: %v", w.severity, w.code, sector, dev, w.says, &got[i])
		case (got[i].Sector >= 0) != (got[i].Sectors > 0) || got[i].Count < 1:
			t.Errorf("%+v: sectors or count", got[i])
		}
		used[i] = true
	}
	for i := range got {
		if !used[i] {
			t.Errorf("not expected: %v", &got[i])
		}
	}
}

// notProvoked are codes that no situation leads to, and why.
var notProvoked = map[Code]string{}

// TestEveryCodeIsProvoked: a kind of finding that no set of ours leads to may be dead, or wrong.
func TestEveryCodeIsProvoked(t *testing.T) {
	provoked := map[Code]bool{}
	for i := range situations {
		for _, w := range situations[i].found {
			provoked[w.code] = true
			if w.severity != w.code.Severity() {
				t.Errorf("%s: %s has severity %v, expected is %v", situations[i].name, w.code, w.code.Severity(), w.severity)
			}
		}
	}
	for _, c := range slices.Sorted(maps.Keys(codes)) {
		if why, ok := notProvoked[c]; ok == provoked[c] {
			t.Errorf("%s: provoked is %v, reason why not: %q", c, provoked[c], why)
		}
	}
	t.Logf("%d of %d codes provoked", len(provoked), len(codes))
}

var _ blockdev.Device = (*disk)(nil)
