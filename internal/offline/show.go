package offline

import (
	"fmt"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// SuperShow returns what bcache-super-show 1.0.8 prints of a superblock on its standard output, byte for byte, its exit
// status, and the message with which it gives up, "" where it does not. keepGoing is its option -f.
//
// Of a superblock that lists more journal buckets than there are it computes a checksum over memory beyond; ours
// is over all there are, and never right.
func SuperShow(sb *ondisk.Superblock, keepGoing bool) (text, failure string, status int) {
	var s strings.Builder
	line := func(name, format string, args ...any) {
		s.WriteString(name)
		fmt.Fprintf(&s, format+"\n", args...)
	}
	if sb.Magic != ondisk.Magic {
		line("sb.magic\t\t", "bad magic")
		return s.String(), "Invalid superblock (bad magic)", 2
	}
	line("sb.magic\t\t", "ok")
	if sb.Offset != ondisk.SuperblockSector {
		line("sb.first_sector\t\t", "%d [expected %ds]", sb.Offset, ondisk.SuperblockSector)
		return s.String(), "Invalid superblock (bad sector)", 2
	}
	line("sb.first_sector\t\t", "%d [match]", sb.Offset)
	if sb.ChecksumOK() && sb.NJournal <= ondisk.MaxJournalBuckets {
		line("sb.csum\t\t\t", "%X [match]", sb.Csum)
	} else {
		line("sb.csum\t\t\t", "%X [expected %X]", sb.Csum, sb.ExpectedChecksum())
		if !keepGoing {
			return s.String(), "Corrupt superblock (bad csum)", 2
		}
	}
	backing := sb.Version == ondisk.VersionBacking || sb.Version == ondisk.VersionBackingOff
	switch {
	case backing:
		line("sb.version\t\t", "%d [backing device]", sb.Version)
	case sb.Version == ondisk.VersionCache0 || sb.Version == ondisk.VersionCache:
		line("sb.version\t\t", "%d [cache device]", sb.Version)
	default:
		line("sb.version\t\t", "%d [unknown]", sb.Version)
		return s.String(), "", 0
	}
	line("", "")
	line("dev.label\t\t", "%s", superShowLabel(sb.LabelString()))
	line("dev.uuid\t\t", "%v", sb.UUID)
	line("dev.sectors_per_block\t", "%d", sb.BlockSize)
	line("dev.sectors_per_bucket\t", "%d", sb.BucketSize16)
	if sb.Version == ondisk.VersionBackingOff && (sb.NJournal == 1 || sb.D[0] != 0) {
		return s.String(), "Possible experimental format detected, bailing", 3
	}
	if backing {
		line("dev.data.first_sector\t", "%d", sb.DataOffset())
		line("dev.data.cache_mode\t", "%s", superShowName(uint8(sb.CacheMode()), "writethrough", "writeback", "writearound", "no caching"))
		line("dev.data.cache_state\t", "%s", superShowName(uint8(sb.State()), "detached", "clean", "dirty", "inconsistent"))
	} else {
		first := uint64(sb.BucketSize16) * uint64(sb.FirstBucket)
		total := uint64(sb.BucketSize16) * sb.NBuckets()
		line("dev.cache.first_sector\t", "%d", first)
		line("dev.cache.cache_sectors\t", "%d", total-first)
		line("dev.cache.total_sectors\t", "%d", total)
		line("dev.cache.ordered\t", "%s", superShowBool(sb.Sync()))
		line("dev.cache.discard\t", "%s", superShowBool(sb.Discard()))
		line("dev.cache.pos\t\t", "%d", sb.NrThisDev)
		line("dev.cache.replacement\t", "%s", superShowName(uint8(sb.Replacement()), "lru", "fifo", "random"))
	}
	line("", "")
	line("cset.uuid\t\t", "%v", sb.SetUUID)
	return s.String(), "", 0
}

// superShowLabel escapes what is not a letter, digit, or one of "-._", the way the tool does: a byte is a signed
// number there, and is printed without leading zeroes.
func superShowLabel(label string) string {
	if label == "" {
		return "(empty)"
	}
	var s strings.Builder
	for _, c := range []byte(label) {
		switch {
		case c >= '0' && c <= '9', c >= 'A' && c <= 'Z', c >= 'a' && c <= 'z', c == '-', c == '.', c == '_':
			s.WriteByte(c)
		default:
			fmt.Fprintf(&s, "%%%x", uint32(int32(int8(c))))
		}
	}
	return s.String()
}

func superShowName(v uint8, names ...string) string {
	if int(v) < len(names) {
		return fmt.Sprintf("%d [%s]", v, names[v])
	}
	return fmt.Sprint(v)
}

func superShowBool(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// A Shown is all that there is to say about the superblock of a device: every field as it is stored, what follows
// from them, and what is wrong. Fields that have no meaning for the role are shown nevertheless.
type Shown struct {
	Device string `json:"device"`
	Size   int64  `json:"size_bytes"`
	Role   string `json:"role"`   // "cache device", "backing device", "unknown", "none"
	Access string `json:"access"` // what the superblock allows: "none", "read only", "read and flush", "read and write"

	Super    *ShownSuper    `json:"superblock,omitempty"` // nil where there is none, or it cannot be read
	Cache    *ShownCache    `json:"cache,omitempty"`
	Backing  *ShownBacking  `json:"backing,omitempty"`
	Problems []ShownProblem `json:"problems"`

	raw *ondisk.Superblock
}

// ShownSuper has the fields of a superblock, raw.
type ShownSuper struct {
	Csum         string      `json:"csum"`
	CsumExpected string      `json:"csum_expected"`
	CsumOK       bool        `json:"csum_ok"`
	Offset       uint64      `json:"offset_sectors"`
	Version      uint64      `json:"version"`
	Magic        string      `json:"magic"`
	UUID         ondisk.UUID `json:"uuid"`
	SetUUID      ondisk.UUID `json:"set_uuid"`
	Label        string      `json:"label"`
	Flags        string      `json:"flags"`
	Seq          uint64      `json:"seq"`
	Compat       string      `json:"feature_compat"`
	Incompat     string      `json:"feature_incompat"`
	ROCompat     string      `json:"feature_ro_compat"`
	Word184      uint64      `json:"nbuckets_or_data_offset"`
	BlockSize    uint16      `json:"block_size"`
	BucketSize   uint16      `json:"bucket_size"`
	NrInSet      uint16      `json:"nr_in_set"`
	NrThisDev    uint16      `json:"nr_this_dev"`
	LastMount    uint32      `json:"last_mount"`
	FirstBucket  uint16      `json:"first_bucket"`
	NJournal     uint16      `json:"njournal_buckets"`
	Journal      []uint64    `json:"journal_buckets"`
	BucketSizeHi uint16      `json:"obso_bucket_size_hi"`
}

// ShownCache is what follows for a cache device.
type ShownCache struct {
	Sync          bool   `json:"sync"`
	Discard       bool   `json:"discard"`
	Replacement   string `json:"replacement"`
	BlockBytes    int64  `json:"block_bytes"`
	BucketBytes   uint64 `json:"bucket_bytes"`
	NBuckets      uint64 `json:"nbuckets"`
	FirstBucket   uint64 `json:"first_bucket"`
	FirstByte     uint64 `json:"first_bucket_byte"`
	CacheBytes    uint64 `json:"usable_bytes"`
	UnusedBytes   int64  `json:"unused_bytes_at_end"`
	MetadataBytes int    `json:"metadata_bytes,omitempty"` // in each bucket; these need an accepted superblock
	NodeBytes     int64  `json:"btree_node_bytes,omitempty"`
	UUIDSlots     uint32 `json:"uuid_slots,omitempty"`
	PrioSets      uint64 `json:"prio_sets,omitempty"`
}

// ShownBacking is what follows for a backing device.
type ShownBacking struct {
	CacheMode  string `json:"cache_mode"`
	State      string `json:"state"`
	BlockBytes int64  `json:"block_bytes"`
	DataSector uint64 `json:"data_offset_sectors"`
	DataByte   uint64 `json:"data_offset_bytes"`
	DataBytes  int64  `json:"data_bytes"` // what a volume on it has: whole blocks
}

// A ShownProblem is one rule that is broken.
type ShownProblem struct {
	Rule    int    `json:"rule"` // in the table of docs/ondisk.md; 0: one of ours
	Field   string `json:"field"`
	Message string `json:"message"`
	Kernel  string `json:"kernel,omitempty"` // what a kernel says of it
	Allows  string `json:"allows"`           // what is left
}

// Show looks at the superblock of a device and judges it. It fails only where there is nothing to look at: where the
// device cannot be read or is too short.
func Show(dev blockdev.Device) (*Shown, error) {
	io, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return nil, err
	}
	defer io.Close()
	sb, err := ReadSuperblock(io.WithPurpose(blockdev.ForScan))
	if err != nil {
		return nil, err
	}
	info := dev.Info()
	return showSuper(sb, info.Name, info.Size, info.LogicalBlock), nil
}

func showSuper(sb *ondisk.Superblock, name string, size int64, logical int) *Shown {
	s := &Shown{Device: name, Size: size, Role: "none", Problems: []ShownProblem{}, raw: sb}
	access, limits := sb.Check(ondisk.Host{DeviceBytes: size, LogicalBlock: logical})
	s.Access = access.String()
	for _, l := range limits {
		s.Problems = append(s.Problems, ShownProblem{
			Rule: l.Rule, Field: l.Field, Message: fmt.Sprintf("%s is %s: %s", l.Field, l.Value, l.Want), Kernel: l.Kernel, Allows: l.Allows.String(),
		})
	}
	if sb.Magic != ondisk.Magic {
		return s // whatever this is, its fields are not fields
	}
	s.Super = &ShownSuper{
		Csum: fmt.Sprintf("%016x", sb.Csum), CsumExpected: fmt.Sprintf("%016x", sb.ExpectedChecksum()), CsumOK: sb.ChecksumOK(),
		Offset: sb.Offset, Version: sb.Version, Magic: fmt.Sprintf("%x", sb.Magic), UUID: sb.UUID, SetUUID: sb.SetUUID,
		Label: strings.ToValidUTF8(sb.LabelString(), "\ufffd"), Flags: fmt.Sprintf("%#016x", sb.Flags), Seq: sb.Seq,
		Compat: fmt.Sprintf("%#x", sb.Compat), Incompat: fmt.Sprintf("%#x", sb.Incompat), ROCompat: fmt.Sprintf("%#x", sb.ROCompat),
		Word184: sb.Word184, BlockSize: sb.BlockSize, BucketSize: sb.BucketSize16, NrInSet: sb.NrInSet, NrThisDev: sb.NrThisDev,
		LastMount: sb.LastMount, FirstBucket: sb.FirstBucket, NJournal: sb.NJournal, BucketSizeHi: sb.BucketSizeHi,
		Journal: append([]uint64{}, sb.D[:min(int(sb.NJournal), ondisk.MaxJournalBuckets)]...),
	}
	switch {
	case sb.IsBacking():
		s.Role = "backing device"
		s.showBacking(sb)
	case sb.IsCache():
		s.Role = "cache device"
		s.showCache(sb, access)
	default:
		s.Role = "unknown"
	}
	return s
}

func (s *Shown) showBacking(sb *ondisk.Superblock) {
	b := &ShownBacking{
		CacheMode: sb.CacheMode().String(), State: sb.State().String(), BlockBytes: int64(sb.BlockSize) * ondisk.SectorSize,
		DataSector: sb.DataOffset(), DataByte: sb.DataOffset() * ondisk.SectorSize,
	}
	if dev := uint64(s.Size) / ondisk.SectorSize; sb.DataOffset() < dev && sb.BlockSize > 0 {
		n := dev - sb.DataOffset()
		b.DataBytes = int64(n-n%uint64(sb.BlockSize)) * ondisk.SectorSize
	}
	s.Backing = b
}

func (s *Shown) showCache(sb *ondisk.Superblock, access ondisk.Access) {
	bucket := sb.BucketSectors() * ondisk.SectorSize
	c := &ShownCache{
		Sync: sb.Sync(), Discard: sb.Discard(), Replacement: sb.Replacement().String(),
		BlockBytes: int64(sb.BlockSize) * ondisk.SectorSize, BucketBytes: bucket, NBuckets: sb.NBuckets(),
		FirstBucket: uint64(sb.FirstBucket), FirstByte: uint64(sb.FirstBucket) * bucket,
	}
	if access > ondisk.AccessNone { // the sizes make sense, and fit the device
		g := ondisk.NewGeometry(sb)
		c.CacheBytes = (g.NBuckets - g.FirstBucket) * bucket
		c.UnusedBytes = s.Size - int64(g.NBuckets*bucket)
		c.MetadataBytes, c.NodeBytes = g.MetaBytes(), int64(g.NodeSectors)*ondisk.SectorSize
		c.UUIDSlots, c.PrioSets = g.NrUUIDs, g.NPrio
	}
	s.Cache = c
}

// Refused reports whether the device cannot be used at all.
func (s *Shown) Refused() bool { return s.Access == ondisk.AccessNone.String() }

// Text is for people: what bcache-super-show prints, and then what it does not.
func (s *Shown) Text() string {
	var t strings.Builder
	text, _, _ := SuperShow(s.raw, true)
	t.WriteString(text)
	line := func(name string, format string, args ...any) {
		fmt.Fprintf(&t, "%s\t%s%s\n", name, strings.Repeat("\t", max(0, (23-len(name))/8)), fmt.Sprintf(format, args...))
	}
	t.WriteByte('\n')
	line("dev.size", "%d bytes", s.Size)
	if c := s.Cache; c != nil {
		line("dev.block", "%d bytes", c.BlockBytes)
		line("dev.bucket", "%d bytes", c.BucketBytes)
		line("dev.cache.buckets", "%d, the first is %d, at byte %d", c.NBuckets, c.FirstBucket, c.FirstByte)
		line("dev.cache.journal", "%d buckets", s.Super.NJournal)
		if c.NodeBytes > 0 {
			line("dev.cache.btree_node", "%d bytes", c.NodeBytes)
			line("dev.cache.uuid_slots", "%d", c.UUIDSlots)
			line("dev.cache.prio_sets", "%d", c.PrioSets)
			line("dev.cache.unused_end", "%d bytes", c.UnusedBytes)
		}
	}
	if b := s.Backing; b != nil {
		line("dev.block", "%d bytes", b.BlockBytes)
		line("dev.data.offset", "%d sectors, %d bytes", b.DataSector, b.DataByte)
		line("dev.data.size", "%d bytes", b.DataBytes)
		line("dev.data.state", "%s", b.State)
	}
	if s.Super != nil && (s.Role == "unknown" || s.raw.Version >= ondisk.VersionCacheFeature) {
		s.rawText(line)
	}
	line("dev.access", "%s", s.Access)
	for _, p := range s.Problems {
		rule := "a rule of ubcache"
		if p.Rule > 0 {
			rule = fmt.Sprintf("rule %d", p.Rule)
		}
		if p.Kernel != "" {
			rule += fmt.Sprintf("; kernel: %q", p.Kernel)
		}
		line("problem", "%s (%s)", p.Message, rule)
	}
	return t.String()
}

// rawText prints the fields that bcache-super-show leaves out of superblocks whose version it does not know.
func (s *Shown) rawText(line func(name string, format string, args ...any)) {
	r := s.Super
	for _, f := range []struct {
		name  string
		value any
	}{
		{"uuid", r.UUID},
		{"set_uuid", r.SetUUID},
		{"label", fmt.Sprintf("%q", r.Label)},
		{"flags", r.Flags},
		{"seq", r.Seq},
		{"feature_compat", r.Compat},
		{"feature_incompat", r.Incompat},
		{"feature_ro_compat", r.ROCompat},
		{"nbuckets/data_offset", r.Word184},
		{"block_size", r.BlockSize},
		{"bucket_size", r.BucketSize},
		{"nr_in_set", r.NrInSet},
		{"nr_this_dev", r.NrThisDev},
		{"last_mount", r.LastMount},
		{"first_bucket", r.FirstBucket},
		{"njournal_buckets", r.NJournal},
		{"bucket_size_hi", r.BucketSizeHi},
	} {
		line("raw."+f.name, "%v", f.value)
	}
}
