package ondisk

import (
	"fmt"
	"math"
)

// Access is how far a device may be used, in growing order.
type Access uint8

const (
	AccessNone  Access = iota // refused
	AccessRead                // its content may be read
	AccessFlush               // and its dirty data written back to the backing device
	AccessWrite               // everything
)

func (a Access) String() string {
	return pick(a, "none", "read only", "read and flush", "read and write")
}

// A Limit is one rule that a superblock breaks, and what that leaves allowed. It matches ErrCorrupt.
type Limit struct {
	Rule    int    // number in the table of F 3.5; 0: a rule of ours alone
	Allows  Access // at most
	Field   string
	Value   string
	Want    string // the rule, in words
	Kernel  string // what the kernel says of it, "" where it says nothing
	Warning bool   // nothing is refused for it
}

func (l *Limit) Error() string {
	s := fmt.Sprintf("superblock: %s is %s, %s", l.Field, l.Value, l.Want)
	if l.Kernel != "" {
		s += fmt.Sprintf(" (kernel: %q)", l.Kernel)
	}
	return s
}

// Unwrap makes errors.Is(err, ErrCorrupt) true.
func (l *Limit) Unwrap() error { return ErrCorrupt }

// A Host is what acceptance depends on besides the superblock itself.
type Host struct {
	DeviceBytes  int64 // size of the whole device; 0: not known, and not checked
	LogicalBlock int   // bytes; 0: not known, and not checked
}

// Check applies the acceptance rules of F 3.5, in the kernel's order but that the number of journal buckets
// comes before the checksum, whose length it gives. It returns what is allowed and every rule broken; after a
// wrong offset, magic, journal length, checksum or version nothing further is looked at, for nothing further
// can be trusted. The first Limit is the one that the kernel would name.
//
// Where ours differs from the kernel: an unknown read-only-compatible feature allows reading, an unknown
// compatible one is only reported, the obsolete large-bucket layout may be read and flushed, and a set whose
// journal cannot advance may be read.
func (sb *Superblock) Check(h Host) (Access, []*Limit) {
	c := checker{access: AccessWrite}
	c.base(sb)
	if len(c.limits) > 0 {
		return AccessNone, c.limits
	}
	if sb.UUID.IsZero() {
		c.refuse(4, "uuid", "all zero", "must not be", "Bad UUID")
	}
	if h.LogicalBlock > 0 && int(sb.BlockSize)*SectorSize < h.LogicalBlock {
		c.refuse(5, "block_size", sectors(uint64(sb.BlockSize)), fmt.Sprintf("the device's logical block is %d bytes", h.LogicalBlock),
			"Superblock block size smaller than device block size")
	}
	if sb.IsBacking() {
		c.backing(sb, h)
	} else {
		c.cache(sb, h)
	}
	return c.access, c.limits
}

type checker struct {
	access Access
	limits []*Limit
}

func (c *checker) limit(a Access, l Limit) {
	l.Allows = a
	c.access = min(c.access, a)
	c.limits = append(c.limits, &l)
}

func (c *checker) refuse(rule int, field, value, want, kernel string) {
	c.limit(AccessNone, Limit{Rule: rule, Field: field, Value: value, Want: want, Kernel: kernel})
}

func sectors(n uint64) string { return fmt.Sprintf("%d sectors", n) }

// base holds what must be right before any other field is believed.
func (c *checker) base(sb *Superblock) {
	switch {
	case sb.Offset != SuperblockSector:
		c.refuse(1, "offset", fmt.Sprint(sb.Offset), "must be 8", "Not a bcache superblock (bad offset)")
	case sb.Magic != Magic:
		c.refuse(2, "magic", fmt.Sprintf("%x", sb.Magic), fmt.Sprintf("must be %x", Magic), "Not a bcache superblock (bad magic)")
	case sb.NJournal > MaxJournalBuckets:
		c.refuse(9, "njournal_buckets", fmt.Sprint(sb.NJournal), "must be at most 256", "Too many journal buckets")
	case !sb.ChecksumOK():
		c.refuse(3, "csum", fmt.Sprintf("%016x", sb.Csum), fmt.Sprintf("computed %016x", sb.ExpectedChecksum()), "Bad checksum")
	case !sb.IsBacking() && !sb.IsCache():
		c.refuse(6, "version", fmt.Sprint(sb.Version), "known are 0, 3, 5 (cache) and 1, 4, 6 (backing)", "Unsupported superblock version")
	}
}

func (c *checker) backing(sb *Superblock, h Host) {
	if sb.DataOffset() < DefaultDataOffset {
		c.refuse(7, "data_offset", sectors(sb.DataOffset()), "must be at least 16", "Bad data offset")
	}
	if b := uint64(sb.BlockSize); !isPow2(b) || b > pageSectors {
		c.refuse(0, "block_size", sectors(b), "must be a power of two, at most 8", "")
	} else if h.DeviceBytes > 0 {
		if dev := uint64(h.DeviceBytes) / SectorSize; sb.DataOffset() >= dev || dev-sb.DataOffset() < b {
			c.refuse(0, "data_offset", sectors(sb.DataOffset()),
				fmt.Sprintf("leaves no room for one block of %d on a device of %d", b, dev), "")
		}
	}
	if sb.CacheMode() > ModeNone {
		c.limit(AccessRead, Limit{Field: "cache_mode", Value: fmt.Sprint(uint8(sb.CacheMode())), Want: "must be at most 3"})
	}
}

func (c *checker) cache(sb *Superblock, h Host) {
	if sb.HasFeatures() {
		if u := sb.Compat; u != 0 {
			c.limit(AccessWrite, Limit{
				Rule: 8, Field: "feature_compat", Value: fmt.Sprintf("%#x", u), Want: "no bit of it is known",
				Kernel: "Unsupported compatible feature found", Warning: true,
			})
		}
		if u := sb.ROCompat; u != 0 {
			c.limit(AccessRead, Limit{
				Rule: 8, Field: "feature_ro_compat", Value: fmt.Sprintf("%#x", u), Want: "no bit of it is known",
				Kernel: "Unsupported read-only compatible feature found",
			})
		}
		if u := sb.Incompat &^ knownIncompat; u != 0 {
			c.refuse(8, "feature_incompat", fmt.Sprintf("%#x", sb.Incompat), fmt.Sprintf("known is %#x", knownIncompat),
				"Unsupported incompatible feature found")
		} else if sb.Incompat&IncompatObsoLargeBucket != 0 && sb.Incompat&IncompatLargeBucket == 0 {
			c.limit(AccessFlush, Limit{
				Field: "feature_incompat", Value: fmt.Sprintf("%#x", sb.Incompat),
				Want: "the obsolete large-bucket layout: it may be read, and dirty data flushed out, nothing else",
			})
		}
	}
	n, block, bucket := sb.NBuckets(), uint64(sb.BlockSize), sb.BucketSectors()
	if n > math.MaxInt64 {
		c.refuse(10, "nbuckets", fmt.Sprint(n), "must be at most 2^63-1", "Too many buckets")
	}
	if n < 128 {
		c.refuse(11, "nbuckets", fmt.Sprint(n), "must be at least 128", "Not enough buckets")
	}
	if !isPow2(block) {
		c.refuse(12, "block_size", sectors(block), "must be a power of two", "Bad block size (not power of 2)")
	}
	if block > pageSectors {
		c.refuse(13, "block_size", sectors(block), "must be at most 8, a page", "Bad block size (larger than page size)")
	}
	switch {
	case !isPow2(bucket):
		c.refuse(14, "bucket_size", sectors(bucket), "must be a power of two", "Bad bucket size (not power of 2)")
	case bucket < pageSectors:
		c.refuse(15, "bucket_size", sectors(bucket), "must be at least 8, a page", "Bad bucket size (smaller than page size)")
	case bucket > 1<<31:
		c.refuse(0, "bucket_size", sectors(bucket), "must be at most 2^31", "")
	case n > math.MaxInt64/SectorSize/bucket || h.DeviceBytes > 0 && uint64(h.DeviceBytes)/SectorSize/bucket < n:
		c.refuse(16, "nbuckets", fmt.Sprint(n), fmt.Sprintf("of %d sectors each: the device has %d sectors", bucket, h.DeviceBytes/SectorSize),
			"Invalid superblock: device too small")
	case uint64(sb.FirstBucket)*bucket < 16:
		c.refuse(21, "first_bucket", fmt.Sprint(sb.FirstBucket), fmt.Sprintf("begins at sector %d, the superblock ends at 16", uint64(sb.FirstBucket)*bucket),
			"Invalid superblock: first bucket comes before end of super")
	}
	if sb.SetUUID.IsZero() {
		c.refuse(17, "set_uuid", "all zero", "must not be", "Bad UUID")
	}
	if sb.NrInSet < 1 || sb.NrInSet > 8 || sb.NrThisDev >= sb.NrInSet {
		c.refuse(18, "nr_in_set, nr_this_dev", fmt.Sprintf("%d, %d", sb.NrInSet, sb.NrThisDev), "must be 1 to 8, and less than that",
			"Bad cache device number in set")
	}
	for i, b := range sb.D[:sb.NJournal] {
		if b != uint64(sb.FirstBucket)+uint64(i) {
			c.refuse(19, fmt.Sprintf("d[%d]", i), fmt.Sprint(b), fmt.Sprintf("must be first_bucket + %d = %d", i, uint64(sb.FirstBucket)+uint64(i)),
				"Journal buckets not sequential")
			break
		}
	}
	if uint64(sb.FirstBucket)+uint64(sb.NJournal) > n {
		c.refuse(20, "first_bucket + njournal_buckets", fmt.Sprint(uint64(sb.FirstBucket)+uint64(sb.NJournal)),
			fmt.Sprintf("must be at most nbuckets, %d", n), "Too many journal buckets")
	}
	if n >= 128 && n < MinCacheBuckets {
		c.refuse(22, "nbuckets", fmt.Sprint(n), "must be at least 513", "ca->sb.nbuckets is too small")
	}
	if sb.NrInSet > 1 && sb.NrInSet <= 8 {
		c.limit(AccessRead, Limit{Field: "nr_in_set", Value: fmt.Sprint(sb.NrInSet), Want: "sets of more than one cache device are not supported"})
	}
	if sb.Sync() && sb.NJournal < MinJournalBuckets {
		c.limit(AccessRead, Limit{Field: "njournal_buckets", Value: fmt.Sprint(sb.NJournal), Want: "a journal of fewer than 4 buckets cannot advance: read only"})
	}
}
