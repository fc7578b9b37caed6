package offline

import (
	"context"
	"fmt"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Role is what a bucket is used for.
type Role uint8

// Roles. Free is every bucket that nothing live points to.
const (
	RoleFree Role = iota
	RoleSuper
	RoleJournal
	RoleBtree
	RolePrio
	RoleUUID
	RoleClean
	RoleDirty
)

var roleNames = [...]string{"free", "superblock", "journal", "btree", "prio", "uuid", "clean", "dirty"}

func (r Role) String() string { return roleNames[r] }

// MarshalText makes a Role a string in JSON.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// isMeta reports whether the bucket holds metadata.
func (r Role) isMeta() bool { return r >= RoleSuper && r <= RoleUUID }

// Options modify Open.
type Options struct {
	Parallel int // reads at once; default 16

	// Progress, if set, hears how far the reading of the tree is. Calls come one at a time.
	Progress func(nodes, of int64)

	// RuntimeDirs are folders in which a process that served the set may have left, when it died, what it had
	// acknowledged and not yet written: see Mapped. Whoever leaves them out sees the set without that.
	RuntimeDirs []string

	boot ondisk.UUID // for tests; default: this boot of the machine

	// EachNode, if set, gets every node of the tree as it was read, on each level in the order of keys, the
	// root first. Calls come one at a time; n and its sets are only valid during the call.
	EachNode func(ref NodeRef, n *ondisk.Node)
}

// A Set is a cache device as it was read. Nothing in it changes after Open but Report.
type Set struct {
	Device blockdev.Info
	Super  *ondisk.Superblock // nil where it could not be read
	Access ondisk.Access      // what the superblock allows
	Geo    ondisk.Geometry    // valid where Access is more than none
	Journal
	Mapped Mapped
	Report *Report

	Slots   []ondisk.UUIDEntry // index: inode
	Extents []Extent           // after replay, sorted, without overlap
	Unknown []Range            // what the tree says here could not be read; Extents in it are from the journal and count

	Gen       []uint8  // of each bucket, after replay
	DiskGen   []uint8  // of each bucket, as in the prio sets
	Prio      []uint16 // of each bucket
	OldestGen []uint8  // of any pointer to the bucket
	Role      []Role   // of each bucket
	Used      []uint32 // live sectors of each bucket
	Stats     Stats

	doubt []Range // where parts of the tree contradict each other

	dev blockdev.Device
	io  *blockdev.IO
	opt Options
}

// Stats are totals of what a set holds.
type Stats struct {
	Nodes        int64 `json:"btree_nodes"`
	Depth        int   `json:"btree_levels"` // 1: the root is a leaf
	Keys         int64 `json:"keys"`         // in leaves, as stored
	Extents      int64 `json:"extents"`      // live
	DirtyExtents int64 `json:"dirty_extents"`
	CachedBytes  int64 `json:"cached_bytes"` // dirty ones too
	DirtyBytes   int64 `json:"dirty_bytes"`
	ReplayedKeys int64 `json:"replayed_keys"`

	MappedEntries int64 `json:"mapped_entries"` // of the process that died, from its file in memory
}

// Open reads everything that dev says about the set that it holds. It reads only.
//
// The set it returns is never nil, and its Report says everything that was found, so that a check can go on
// from there. The error is not nil where the content cannot be given: the first fatal finding, or the reason
// why ctx ended. After that only Super, Access, Geo, Journal and Report may be looked at. Close it.
func Open(ctx context.Context, dev blockdev.Device, o Options) (*Set, error) {
	if o.Parallel <= 0 {
		o.Parallel = 16
	}
	s := &Set{Device: dev.Info(), Report: new(Report), dev: dev, opt: o}
	io, err := blockdev.NewIO(dev, o.Parallel)
	if err != nil {
		return s, err
	}
	s.io = io.WithPurpose(blockdev.ForScan)
	for _, step := range []func(context.Context) error{s.readSuper, s.readJournal, s.readMapped, s.readPrios, s.readUUIDs, s.readTree, s.replay} {
		if err := ctx.Err(); err != nil {
			return s, err
		}
		if err := step(ctx); err != nil {
			return s, err
		}
		if f := s.Report.first(Fatal); f != nil {
			return s, &FindingError{*f}
		}
		if s.Super != nil && !s.Super.Sync() {
			break // whatever is there is void: the set caches nothing
		}
	}
	s.account()
	return s, nil
}

// Close releases what Open took. The device stays open.
func (s *Set) Close() error {
	if s.io == nil {
		return nil
	}
	return s.io.Close()
}

// A FindingError is a finding that ended something. It matches ondisk.ErrCorrupt.
type FindingError struct{ Finding Finding }

func (e *FindingError) Error() string { return e.Finding.String() }

// Unwrap makes errors.Is(err, ondisk.ErrCorrupt) true.
func (e *FindingError) Unwrap() error { return ondisk.ErrCorrupt }

// find records a finding on the cache device. With 0 sectors it has no one place.
func (s *Set) find(code Code, sector uint64, sectors int64, format string, args ...any) {
	at := int64(sector)
	if sectors == 0 {
		at = -1
	}
	s.Report.add(code, s.Device.Name, at, sectors, format, args...)
}

// findInNewest records a finding about the header of the newest journal entry.
func (s *Set) findInNewest(code Code, format string, args ...any) {
	e := s.Entries[len(s.Entries)-1]
	s.find(code, e.Sector, 1, "journal entry %d: "+format, append([]any{e.Seq}, args...)...)
}

func (s *Set) tally(code Code, sector uint64, sectors int64, format string, args ...any) {
	s.Report.tally(code, s.Device.Name, int64(sector), sectors, format, args...)
}

// maxBuckets bounds the memory that a superblock can make us ask for, at 10 bytes for each: 64 TiB of cache in
// buckets of 64 KiB.
const maxBuckets = 1 << 30

// readSuper reads the superblock and judges it.
func (s *Set) readSuper(context.Context) error {
	sb, err := ReadSuperblock(s.io)
	if err != nil {
		s.find(SuperUnreadable, ondisk.SuperblockSector, 8, "%v", err)
		return nil
	}
	s.Super = sb
	access, limits := sb.Check(ondisk.Host{DeviceBytes: s.Device.Size, LogicalBlock: s.Device.LogicalBlock})
	if access > ondisk.AccessNone && sb.IsBacking() {
		s.find(SuperRefused, ondisk.SuperblockSector, 8, "superblock: version is %d, that of a backing device; a cache device is wanted here", sb.Version)
		access = ondisk.AccessNone
	}
	for _, l := range limits {
		code := SuperRefused
		switch {
		case l.Warning:
			code = SuperFeature
		case l.Allows > ondisk.AccessNone:
			code = SuperLimited
		}
		s.find(code, ondisk.SuperblockSector, 8, "%v", l)
	}
	s.Access = access
	if access == ondisk.AccessNone {
		return nil
	}
	if sb.NBuckets() > maxBuckets {
		s.find(SuperRefused, ondisk.SuperblockSector, 8, "superblock: nbuckets is %d; this program reads sets of up to %d", sb.NBuckets(), maxBuckets)
		s.Access = ondisk.AccessNone
		return nil
	}
	s.Geo = ondisk.NewGeometry(sb)
	s.makeTables()
	if !sb.Sync() {
		s.find(SuperNoSync, ondisk.SuperblockSector, 8, "superblock: SYNC is not set: never used since it was formatted")
	}
	return nil
}

func (s *Set) makeTables() {
	n := s.Geo.NBuckets
	s.Gen, s.DiskGen, s.OldestGen, s.Prio = make([]uint8, n), make([]uint8, n), make([]uint8, n), make([]uint16, n)
	s.Role, s.Used = make([]Role, n), make([]uint32, n)
}

// ReadSuperblock reads the superblock of either kind of device; the content is for Check to judge.
func ReadSuperblock(io *blockdev.IO) (*ondisk.Superblock, error) {
	size := io.Device().Info().Size
	if size < ondisk.SuperblockOffset+ondisk.SuperblockBytes {
		return nil, fmt.Errorf("the device has %d bytes, a superblock ends at %d", size, ondisk.SuperblockOffset+ondisk.SuperblockBytes)
	}
	b := make([]byte, ondisk.SuperblockBytes)
	if err := io.ReadAt(b, ondisk.SuperblockOffset); err != nil {
		return nil, err
	}
	return ondisk.DecodeSuperblock(b)
}

// readPrios follows the chain of prio sets.
func (s *Set) readPrios(context.Context) error {
	g := &s.Geo
	before, at := uint64(0), s.Newest.PrioBucket[s.Super.NrThisDev]
	buf := make([]byte, g.MetaBytes())
	for i := range g.NPrio {
		if !g.ValidBucket(at) {
			const text = "prio set %d of %d would be in bucket %d; buckets are %d to %d"
			args := []any{i, g.NPrio, at, g.FirstBucket, g.NBuckets - 1}
			if i == 0 {
				s.findInNewest(PrioChain, text, args...)
			} else {
				s.find(PrioChain, g.BucketStart(before), int64(g.MetaSectors), text, args...)
			}
			return nil
		}
		start := g.BucketStart(at)
		if s.Role[at] != RoleFree {
			s.find(PrioChain, start, int64(g.MetaSectors), "prio set %d of %d is in bucket %d, which is %v already", i, g.NPrio, at, s.Role[at])
			return nil
		}
		s.Role[at] = RolePrio
		if err := s.io.ReadAt(buf, int64(start)*ondisk.SectorSize); err != nil {
			s.find(PrioUnreadable, start, int64(g.MetaSectors), "prio set %d of %d: %v", i, g.NPrio, err)
			return nil
		}
		p, err := ondisk.DecodePrioSet(buf, g)
		if err != nil {
			s.find(PrioDamaged, start, int64(g.MetaSectors), "%v", err)
			return nil
		}
		first := i * g.PrioPerBucket
		for j := range min(g.PrioPerBucket, g.NBuckets-first) {
			s.Prio[first+j], s.DiskGen[first+j] = p.Entry(int(j))
		}
		before, at = at, p.NextBucket
	}
	copy(s.Gen, s.DiskGen)
	copy(s.OldestGen, s.DiskGen)
	return nil
}

// readUUIDs reads the uuid array.
func (s *Set) readUUIDs(context.Context) error {
	g, k := &s.Geo, &s.Newest.UUIDBucket
	fault := g.NodeFault(k)
	if fault != ondisk.FaultNone || !k.P[0].Available() || g.Remainder(k.P[0].Sector()) != 0 || k.Size() != g.MetaSectors {
		s.findInNewest(UUIDPointer, "uuid_bucket is %v: %v; want one pointer to the start of a bucket and %d sectors (kernel: %q)", k, fault, g.MetaSectors, "bad uuid pointer")
		return nil
	}
	buf := make([]byte, g.MetaBytes())
	if err := s.io.ReadAt(buf, int64(k.P[0].Sector())*ondisk.SectorSize); err != nil {
		s.find(UUIDUnreadable, k.P[0].Sector(), int64(g.MetaSectors), "uuid array: %v", err)
		return nil
	}
	old := s.Newest.Version == 0
	if old {
		s.find(UUIDOld, k.P[0].Sector(), int64(g.MetaSectors), "the uuid array has entries of 64 bytes")
	}
	s.Slots = make([]ondisk.UUIDEntry, 0, g.NrUUIDs)
	seen := make(map[ondisk.UUID]int)
	for i := range int(g.NrUUIDs) {
		e, err := ondisk.DecodeUUIDEntry(buf, i, old)
		if err != nil {
			return err
		}
		s.Slots = append(s.Slots, e)
		if e.Unused() || e.Retired() {
			continue
		}
		if first, ok := seen[e.UUID]; ok {
			s.find(UUIDDuplicate, k.P[0].Sector(), int64(g.MetaSectors), "slots %d and %d both have uuid %v", first, i, e.UUID)
		}
		seen[e.UUID] = i
	}
	return nil
}
