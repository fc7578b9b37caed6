package offline

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// CheckOptions modify Check.
type CheckOptions struct {
	Options

	// Data reads all cached data too. Without it only metadata is read.
	Data bool

	// DataProgress, if set, hears how far the reading of data is, in bytes. Calls come one at a time.
	DataProgress func(done, of int64)
}

// Check reads everything that a cache device and its backing devices say, and holds the parts against each
// other. It reads only. What it finds is in the Report of the set it returns, which is never nil. Close the
// set. The error is not nil only where the check could not be carried through: ctx ended.
func Check(ctx context.Context, cache blockdev.Device, backings []blockdev.Device, o CheckOptions) (*Set, []*Backing, error) {
	s, err := Open(ctx, cache, o.Options)
	var found []*Backing
	for _, dev := range backings {
		if b := s.checkBacking(dev, err == nil); b != nil {
			found = append(found, b)
		}
	}
	if err != nil {
		var f *FindingError
		if errors.As(err, &f) {
			err = nil
		}
		return s, found, err
	}
	if !s.Super.Sync() {
		return s, found, nil
	}
	s.checkKeys(found)
	s.checkShared()
	s.checkBuckets()
	if o.Data {
		err = s.checkData(ctx, o.DataProgress)
	}
	return s, found, err
}

// checkBacking looks at one backing device; readable says that the set could be read.
func (s *Set) checkBacking(dev blockdev.Device, readable bool) *Backing {
	name := dev.Info().Name
	b, err := OpenBacking(s, dev)
	add := func(code Code, format string, args ...any) {
		s.Report.add(code, name, ondisk.SuperblockSector, 8, format, args...)
	}
	if b == nil || b.Super == nil {
		add(BackingUnreadable, "%v", err)
		return nil
	}
	if b.Access == ondisk.AccessNone {
		for _, l := range b.Limits {
			add(BackingRefused, "%v", l)
		}
		return nil
	}
	for _, l := range b.Limits {
		add(BackingLimited, "%v", l)
	}
	if s.Super == nil || s.Access == ondisk.AccessNone {
		return b
	}
	state := b.Super.State()
	attached := state == ondisk.StateClean || state == ondisk.StateDirty
	switch {
	case b.Foreign && attached:
		add(BackingForeign, "is %v in set %v; the cache device is of set %v", state, b.Super.SetUUID, s.Super.SetUUID)
	case !attached:
		add(BackingDetached, "state is %v, set %v: nothing of it is cached that counts", state, b.Super.SetUUID)
	case !readable:
	case state == ondisk.StateDirty && b.Slot < 0:
		add(BackingLost, "state is dirty, and the set has no slot for uuid %v (kernel: %q)", b.Super.UUID, "Couldn't find uuid for … in set")
	case state == ondisk.StateClean && b.Slot < 0:
		add(BackingNoSlot, "state is clean, and the set has no slot for uuid %v", b.Super.UUID)
	}
	if attached && !b.Foreign && b.Super.BlockSize < s.Super.BlockSize {
		add(BackingBlock, "block is %d sectors, that of the set %d (kernel: %q)", b.Super.BlockSize, s.Super.BlockSize, "block size less than set's block size")
	}
	return b
}

// checkKeys holds every extent against its slot and its backing device.
func (s *Set) checkKeys(backings []*Backing) {
	bySlot := make(map[uint32]*Backing)
	for _, b := range backings {
		if b.Slot >= 0 && !b.Foreign {
			bySlot[uint32(b.Slot)] = b
		}
	}
	dirty := make([]int64, len(s.Slots)) // bytes
	for i := range s.Extents {
		if e := &s.Extents[i]; e.Live() && e.Dirty() && int(e.Inode) < len(dirty) {
			dirty[e.Inode] += int64(e.Size) * ondisk.SectorSize
		}
	}
	for i := range s.Slots {
		if e := &s.Slots[i]; !e.Unused() && !e.Retired() && !e.FlashOnly() && bySlot[uint32(i)] == nil {
			s.find(BackingAbsent, s.Newest.UUIDBucket.P[0].Sector(), int64(s.Geo.MetaSectors),
				"slot %d, uuid %v, label %q: its backing device was not given; %d bytes of it are dirty", i, e.UUID, e.LabelString(), dirty[i])
		}
	}
	for i := range s.Extents {
		e := &s.Extents[i]
		if e.Stale() {
			code := KeyStale
			if e.Dirty() {
				code = KeyStaleDirty
			}
			s.tally(code, e.P.Sector(), int64(e.Size), "extent %v, its bucket is at generation %d", e.Key(), s.Gen[s.Geo.Bucket(e.P.Sector())])
		}
		if !e.Live() {
			continue
		}
		slot := &s.Slots[e.Inode]
		b := bySlot[e.Inode]
		end := uint64(1) << 63
		pick := func(dirty, clean Code) Code {
			if e.Dirty() {
				return dirty
			}
			return clean
		}
		switch {
		case slot.Unused():
			s.tally(pick(SlotUnknownDirty, SlotUnknown), e.P.Sector(), int64(e.Size), "extent %v is of slot %d, which was never used", e.Key(), e.Inode)
			continue
		case slot.Retired():
			s.tally(pick(SlotRetiredDirty, SlotRetired), e.P.Sector(), int64(e.Size), "extent %v is of slot %d, which was retired", e.Key(), e.Inode)
			continue
		case slot.FlashOnly():
			end = slot.Sectors
		case b == nil:
			continue
		case !b.Cached:
			if e.Dirty() {
				s.tally(DirtyVoid, e.P.Sector(), int64(e.Size), "extent %v is void: %s has state %v", e.Key(), b.Device.Name, b.Super.State())
			}
			continue
		default:
			end = b.Super.DataOffset() + uint64(b.Size())/ondisk.SectorSize
			if e.Dirty() && b.Super.State() == ondisk.StateClean {
				s.tally(DirtyUnderClean, e.P.Sector(), int64(e.Size), "extent %v is dirty, and %s has state clean", e.Key(), b.Device.Name)
			}
		}
		if e.End() > end {
			s.tally(pick(DirtyBeyondEnd, KeyBeyondEnd), e.P.Sector(), int64(e.Size), "extent %v ends beyond sector %d, the end of slot %d", e.Key(), end, e.Inode)
		}
	}
}

// checkShared looks for live extents that lie on the same sectors of the cache device.
func (s *Set) checkShared() {
	order := make([]int32, 0, s.Stats.Extents)
	for i := range s.Extents {
		if s.Extents[i].Live() {
			order = append(order, int32(i))
		}
	}
	slices.SortFunc(order, func(a, b int32) int {
		return cmp.Compare(s.Extents[a].P.Sector(), s.Extents[b].P.Sector())
	})
	for i := 1; i < len(order); i++ {
		a, b := &s.Extents[order[i-1]], &s.Extents[order[i]]
		if a.P.Sector()+uint64(a.Size) > b.P.Sector() {
			s.tally(BucketShared, b.P.Sector(), int64(b.Size), "extents %v and %v share sectors", a.Key(), b.Key())
		}
	}
}

// checkBuckets counts what a kernel needs to find when it activates the set. Source: F 9.6.
func (s *Set) checkBuckets() {
	g := &s.Geo
	var unused, clean uint64
	for b := g.FirstBucket; b < g.NBuckets; b++ {
		switch s.Role[b] {
		case RoleFree:
			unused++
		case RoleClean:
			clean++
		}
		if s.Gen[b] != s.DiskGen[b] {
			s.tally(BucketGenAhead, g.BucketStart(b), int64(g.BucketSectors), "bucket %d: generation %d, %d in the prio set", b, s.Gen[b], s.DiskGen[b])
		}
	}
	reserve := g.NPrio + g.KernelReserve
	switch {
	case unused < g.NPrio:
		s.find(BucketFew, 0, 0, "%d buckets are unused, a kernel needs %d for its prio sets", unused, g.NPrio)
	case unused < reserve:
		s.find(BucketHeadroom, 0, 0, "%d buckets are unused; with %d a kernel could split nodes during replay as often as it may need to", unused, reserve)
	case unused+clean < reserve+g.KernelFreeInc:
		s.find(BucketHeadroom, 0, 0, "%d buckets are unused and %d clean; with %d in all a kernel could go on writing at once", unused, clean, reserve+g.KernelFreeInc)
	}
}

// checkData reads every live extent from the cache device, in the order in which it lies there.
func (s *Set) checkData(ctx context.Context, progress func(done, of int64)) error {
	var order []int32
	for i := range s.Extents {
		if s.Extents[i].Live() {
			order = append(order, int32(i))
		}
	}
	slices.SortFunc(order, func(a, b int32) int {
		return cmp.Compare(s.Extents[a].P.Sector(), s.Extents[b].P.Sector())
	})
	next := make(chan []int32)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var done int64
	for range s.opt.Parallel {
		wg.Go(func() {
			var buf []byte
			for run := range next {
				first, last := &s.Extents[run[0]], &s.Extents[run[len(run)-1]]
				size := int(last.P.Sector()+uint64(last.Size)-first.P.Sector()) * ondisk.SectorSize
				if len(buf) < size {
					buf = make([]byte, size)
				}
				if err := s.io.ReadAt(buf[:size], int64(first.P.Sector())*ondisk.SectorSize); err != nil {
					s.findUnreadable(run, buf)
				}
				mu.Lock()
				done += int64(size)
				if progress != nil {
					progress(min(done, s.Stats.CachedBytes), s.Stats.CachedBytes)
				}
				mu.Unlock()
			}
		})
	}
	for len(order) > 0 && ctx.Err() == nil {
		n := s.runLength(order)
		next <- order[:n]
		order = order[n:]
	}
	close(next)
	wg.Wait()
	return ctx.Err()
}

// runLength returns how many of the extents, which are sorted by cache sector, follow one another without a gap,
// up to 1 MiB.
func (s *Set) runLength(order []int32) int {
	const most = 1 << 20 / ondisk.SectorSize
	first := s.Extents[order[0]].P.Sector()
	end := first + uint64(s.Extents[order[0]].Size)
	n := 1
	for ; n < len(order); n++ {
		e := &s.Extents[order[n]]
		if e.P.Sector() != end || end+uint64(e.Size)-first > most {
			break
		}
		end += uint64(e.Size)
	}
	return n
}

// findUnreadable reads extents one by one, after they could not be read together, and reports which cannot be.
func (s *Set) findUnreadable(run []int32, buf []byte) {
	for _, i := range run {
		e := &s.Extents[i]
		err := s.io.ReadAt(buf[:int(e.Size)*ondisk.SectorSize], int64(e.P.Sector())*ondisk.SectorSize)
		if err == nil {
			continue
		}
		code := DataClean
		if e.Dirty() {
			code = DataDirty
		}
		s.find(code, e.P.Sector(), int64(e.Size), "extent %v: %v", e.Key(), err)
	}
}
