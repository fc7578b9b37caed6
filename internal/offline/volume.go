package offline

import (
	"errors"
	"fmt"
	"math"
	"sort"
	"sync"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// ErrUnreadable is matched by the error of a read from a range whose content the set cannot tell.
var ErrUnreadable = errors.New("content unknown: the index of the cache is damaged here")

// A RefusedError says why the content of a volume is not given: it would, or could, be old data. Errors of this
// kind protect data and can be overridden by nothing here.
type RefusedError struct {
	Device string
	Reason string
}

func (e *RefusedError) Error() string { return e.Device + ": " + e.Reason }

// A Backing is a backing device as it was found, and what the set has to say of it.
type Backing struct {
	Device blockdev.Info
	Super  *ondisk.Superblock
	Access ondisk.Access
	Limits []*ondisk.Limit

	// Slot is the device's slot in the set, -1 where it has none.
	Slot int
	// Cached says that the set's extents of Slot count: the device is attached, clean or dirty.
	Cached bool
	// Foreign says that the superblock names another set.
	Foreign bool

	dev blockdev.Device
}

// OpenBacking reads the superblock of a backing device and finds it in set, which may be nil: then the device
// is looked at alone. The error says that the device could not be read or is no backing device.
func OpenBacking(set *Set, dev blockdev.Device) (*Backing, error) {
	b := &Backing{Device: dev.Info(), Slot: -1, dev: dev}
	io, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return nil, err
	}
	defer io.Close()
	if b.Super, err = ReadSuperblock(io); err != nil {
		return nil, fmt.Errorf("%s: superblock: %w", b.Device.Name, err)
	}
	b.Access, b.Limits = b.Super.Check(ondisk.Host{DeviceBytes: b.Device.Size, LogicalBlock: b.Device.LogicalBlock})
	if b.Access > ondisk.AccessNone && !b.Super.IsBacking() {
		b.Access = ondisk.AccessNone
		b.Limits = []*ondisk.Limit{{Field: "version", Value: fmt.Sprint(b.Super.Version), Want: "that of a cache device; a backing device is wanted here"}}
	}
	if b.Access == ondisk.AccessNone {
		return b, fmt.Errorf("%s: %w", b.Device.Name, b.Limits[0])
	}
	if set == nil || set.Super == nil {
		return b, nil
	}
	b.Foreign = b.Super.SetUUID != set.Super.SetUUID
	for i := range set.Slots {
		if e := &set.Slots[i]; e.UUID == b.Super.UUID && !e.FlashOnly() {
			b.Slot = i
			break
		}
	}
	state := b.Super.State()
	b.Cached = b.Slot >= 0 && !b.Foreign && (state == ondisk.StateClean || state == ondisk.StateDirty)
	return b, nil
}

// Size returns the size of the exported device in bytes: what is behind the data offset, rounded down to the
// device's block.
func (b *Backing) Size() int64 {
	block := int64(b.Super.BlockSize) * ondisk.SectorSize
	return (b.Device.Size - int64(b.Super.DataOffset())*ondisk.SectorSize) / block * block
}

// refuse says why the volume of b must not be read, or nil.
func (b *Backing) refuse(set *Set) error {
	no := func(format string, args ...any) error {
		return &RefusedError{b.Device.Name, fmt.Sprintf(format, args...)}
	}
	switch state := b.Super.State(); {
	case b.Foreign && state == ondisk.StateDirty:
		return no("belongs to set %v, which may hold unflushed data of it; the cache device given is of set %v", b.Super.SetUUID, set.Super.SetUUID)
	case b.Foreign && state == ondisk.StateClean:
		return no("belongs to set %v, and the cache device given is of set %v; the state says clean, which a kernel may write before it is true", b.Super.SetUUID, set.Super.SetUUID)
	case state == ondisk.StateDirty && b.Slot < 0:
		return no("has unflushed data in set %v, and the set has no slot for it: the cache was formatted since", b.Super.SetUUID)
	}
	return nil
}

// A Volume is the logical content of a backing device and its cache together, or of a flash-only volume. It
// is a blockdev.Device that can only be read.
type Volume struct {
	info    blockdev.Info
	set     *Set
	cache   blockdev.Device // nil: nothing is cached
	backing blockdev.Device // nil: what is not cached reads as zeroes
	inode   uint32
	first   uint64   // key sector of the volume's byte 0
	extents []Extent // of the inode
	unknown []Range  // clipped to the volume

	onFailure func(off, length int64, err error)

	mu     sync.Mutex
	failed []Range // what could not be read, as it happened; sorted by nothing
}

// OpenVolume gives the volume of a backing device that OpenBacking found.
func OpenVolume(set *Set, b *Backing) (*Volume, error) {
	if err := b.refuse(set); err != nil {
		return nil, err
	}
	v := &Volume{
		set: set, cache: set.dev, backing: b.dev, first: b.Super.DataOffset(),
		info: blockdev.Info{Name: b.Device.Name, Size: b.Size(), LogicalBlock: int(b.Super.BlockSize) * ondisk.SectorSize},
	}
	if b.Cached {
		v.takeSlot(b.Slot)
	}
	v.finishInfo(b.Device)
	return v, nil
}

// OpenAlone gives the content of a backing device without its cache. That is right only where nothing of it is
// cached that counts: in the states none and stale. In the others it is refused.
func OpenAlone(b *Backing) (*Volume, error) {
	switch state := b.Super.State(); state {
	case ondisk.StateDirty:
		return nil, &RefusedError{b.Device.Name, fmt.Sprintf("state is dirty: the cache of set %v holds unflushed data of it; name its cache device too", b.Super.SetUUID)}
	case ondisk.StateClean:
		return nil, &RefusedError{b.Device.Name, fmt.Sprintf("state is clean in set %v, which a kernel may write before it is true: the cache may hold unflushed data; name its cache device too", b.Super.SetUUID)}
	}
	v := &Volume{backing: b.dev, first: b.Super.DataOffset(), info: blockdev.Info{
		Name: b.Device.Name, Size: b.Size(), LogicalBlock: int(b.Super.BlockSize) * ondisk.SectorSize,
	}}
	v.finishInfo(b.Device)
	return v, nil
}

// OpenFlash gives the flash-only volume with that label, or, where no label fits, in the slot of that number.
func OpenFlash(set *Set, name string) (*Volume, error) {
	slot := -1
	for i := range set.Slots {
		if e := &set.Slots[i]; e.FlashOnly() && e.LabelString() == name {
			if slot >= 0 {
				return nil, fmt.Errorf("%s: slots %d and %d both have the label %q: name the volume by its slot", set.Device.Name, slot, i, name)
			}
			slot = i
		}
	}
	if slot < 0 {
		if _, err := fmt.Sscanf(name+"\n", "%d\n", &slot); err != nil || slot < 0 || slot >= len(set.Slots) || !set.Slots[slot].FlashOnly() {
			return nil, fmt.Errorf("%s has no flash-only volume %q%s", set.Device.Name, name, set.flashNames())
		}
	}
	block := int64(set.Geo.BlockBytes())
	v := &Volume{set: set, cache: set.dev, info: blockdev.Info{
		Name: name, Size: int64(min(set.Slots[slot].Sectors, math.MaxInt64/ondisk.SectorSize)) * ondisk.SectorSize / block * block, LogicalBlock: int(block),
	}}
	v.takeSlot(slot)
	v.finishInfo(set.Device)
	return v, nil
}

func (s *Set) flashNames() string {
	out := ""
	for i := range s.Slots {
		if e := &s.Slots[i]; e.FlashOnly() {
			out += fmt.Sprintf(" %q (slot %d)", e.LabelString(), i)
		}
	}
	if out == "" {
		return ": it has none"
	}
	return ": it has" + out
}

func (v *Volume) finishInfo(under blockdev.Info) {
	i := &v.info
	i.PhysicalBlock, i.OptimalIO, i.MaxTransfer = max(under.PhysicalBlock, i.LogicalBlock), under.OptimalIO, under.MaxTransfer
	i.Rotational, i.Direct, i.Engine = under.Rotational, under.Direct, under.Engine
	i.ReadOnly = true
	i.BufferAlign = max(under.BufferAlign, 1)
	if v.cache != nil {
		i.BufferAlign = max(i.BufferAlign, v.set.Device.BufferAlign)
	}
}

// takeSlot makes the extents of a slot those of the volume.
func (v *Volume) takeSlot(slot int) {
	v.inode = uint32(slot)
	from := search(v.set.Extents, Pos{v.inode, 0})
	to := search(v.set.Extents, Pos{v.inode + 1, 0})
	v.extents = v.set.Extents[from:to]
	whole := Range{Pos{v.inode, v.first}, Pos{v.inode, v.first + uint64(v.info.Size)/ondisk.SectorSize}}
	for _, r := range v.set.Unknown {
		if r = r.clip(whole); !r.empty() {
			v.unknown = append(v.unknown, r)
		}
	}
}

// A Kind says where a piece of a volume is read from.
type Kind uint8

// Kinds of pieces.
const (
	FromBacking Kind = iota
	FromCache        // clean
	FromCacheDirty
	FromNowhere // reads as zeroes
	FromUnknown // cannot be read
)

// A piece is part of a read.
type piece struct {
	kind    Kind
	sectors uint64
	at      uint64 // sector on the device it is read from
}

// lookup returns what is at key sector s, up to key sector end.
func (v *Volume) lookup(s, end uint64) piece {
	i := search(v.extents, Pos{v.inode, s})
	limit := end
	if i < len(v.extents) {
		e := &v.extents[i]
		if e.Start <= s {
			p := piece{sectors: min(e.End(), end) - s, at: e.P.Advance(s - e.Start).Sector()}
			switch {
			case e.flags&extBad != 0:
				p.kind = FromUnknown
			case !e.Live():
				return v.uncached(s, s+p.sectors)
			case e.Dirty():
				p.kind = FromCacheDirty
			default:
				p.kind = FromCache
			}
			return p
		}
		limit = min(end, e.Start)
	}
	// No key here: nothing is cached, unless a part of the tree is missing.
	if u := sort.Search(len(v.unknown), func(i int) bool { return v.unknown[i].To.Sector > s }); u < len(v.unknown) {
		if from := v.unknown[u].From.Sector; from > s {
			limit = min(limit, from)
		} else {
			return piece{kind: FromUnknown, sectors: min(limit, v.unknown[u].To.Sector) - s}
		}
	}
	return v.uncached(s, limit)
}

func (v *Volume) uncached(s, end uint64) piece {
	if v.backing == nil {
		return piece{kind: FromNowhere, sectors: end - s}
	}
	return piece{kind: FromBacking, sectors: end - s, at: s}
}

// EachPiece calls fn with the pieces of the volume in order, neighbours of one kind joined: their offset and
// length in bytes. It stops where fn returns false.
func (v *Volume) EachPiece(off, length int64, fn func(kind Kind, off, length int64) bool) {
	s, end := v.first+uint64(off)/ondisk.SectorSize, v.first+uint64(off+length)/ondisk.SectorSize
	var kind Kind
	from := s
	for s < end {
		p := v.lookup(s, end)
		if s > from && p.kind != kind {
			if !fn(kind, int64(from-v.first)*ondisk.SectorSize, int64(s-from)*ondisk.SectorSize) {
				return
			}
			from = s
		}
		kind = p.kind
		s += p.sectors
	}
	if s > from {
		fn(kind, int64(from-v.first)*ondisk.SectorSize, int64(s-from)*ondisk.SectorSize)
	}
}

// Info describes the volume. Blocks are those of the backing device's superblock.
func (v *Volume) Info() blockdev.Info { return v.info }

// Unreadable returns the parts of the volume, offset and length in bytes, whose content is not known from the
// start: that part of the index is damaged.
func (v *Volume) Unreadable() [][2]int64 {
	var out [][2]int64
	v.EachPiece(0, v.info.Size, func(kind Kind, off, length int64) bool {
		if kind == FromUnknown {
			out = append(out, [2]int64{off, length})
		}
		return true
	})
	return out
}

// OnFailure has fn called when a part of the volume cannot be read, offset and length in bytes, the first time that
// this happens to it. fn must not block. Call it before there are queues.
func (v *Volume) OnFailure(fn func(off, length int64, err error)) { v.onFailure = fn }

// Close does nothing: the devices belong to whoever opened them.
func (v *Volume) Close() error { return nil }
