package volume

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Open opens the volume of a backing device on a set, and attaches it where it is not yet: one that was formatted for
// this set or for none, or that was run without its cache since. The device stays the caller's.
//
// Order of an attach (F 10): the slot is durable in the set before the superblock says that the device is attached,
// and a slot of an earlier life is retired in the same write. Dirty data makes the state DIRTY, durable, before anyone
// relies on it.
func Open(set *cacheset.Set, dev blockdev.Device) (_ *Volume, err error) {
	v := newVolume(set, dev.Info().Name)
	v.back.dev = dev
	defer func() {
		if err != nil {
			v.release()
		}
	}()
	if v.bio, err = blockdev.NewIO(dev, 2); err != nil {
		return nil, err
	}
	sb, err := cacheset.ReadSuperblock(v.bio)
	if err != nil {
		return nil, err
	}
	v.super.Store(sb)
	info := dev.Info()
	size, err := Accept(sb, info, set.UUID(), set.Geometry().BlockSectors)
	if err != nil {
		return nil, err
	}
	block := int64(sb.BlockSize) * ondisk.SectorSize
	v.first = sb.DataOffset()
	if !set.Claim(sb.UUID) {
		return nil, fmt.Errorf("%s: %w: a volume of that uuid, %v, is open", info.Name, ErrAttached, sb.UUID)
	}
	v.claim = sb.UUID
	if err := v.attach(); err != nil {
		return nil, fmt.Errorf("%s: %w", info.Name, err)
	}
	v.describe(info.Name, size, int(block))
	v.config.Store(&conf{Config: Config{Mode: sb.CacheMode(), Strict: true, SequentialCutoff: DefaultSequentialCutoff}})
	return v, v.open()
}

// Accept judges a backing device by its superblock, for a set of that uuid with blocks of so many sectors. It returns how
// many bytes of data the device has, or why it cannot be a volume of the set. Dirty data that the set does not know of
// only an attach finds.
func Accept(sb *ondisk.Superblock, info blockdev.Info, set ondisk.UUID, blockSectors uint32) (size int64, err error) {
	state := sb.State()
	block := int64(sb.BlockSize) * ondisk.SectorSize
	size = info.Size - int64(sb.DataOffset())*ondisk.SectorSize
	switch {
	case !sb.IsBacking():
		err = fmt.Errorf("version %d is that of a cache device; a backing device is wanted here", sb.Version)
	case uint32(sb.BlockSize) < blockSectors:
		err = fmt.Errorf("%w: %d bytes, and the set has %d; format it with --block %[3]d, after its data is safe elsewhere", ErrBlockSize,
			block, blockSectors*ondisk.SectorSize)
	case int64(sb.DataOffset())*ondisk.SectorSize%int64(max(info.LogicalBlock, ondisk.SectorSize)) != 0:
		err = fmt.Errorf("data begins at sector %d, which is no multiple of the device's block of %d bytes", sb.DataOffset(), info.LogicalBlock)
	case sb.SetUUID != set && (state == ondisk.StateClean || state == ondisk.StateDirty):
		err = fmt.Errorf("%w, %v; its state is %v", ErrOtherSet, sb.SetUUID, state)
	case size < block:
		err = fmt.Errorf("no room for data behind sector %d", sb.DataOffset())
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", info.Name, err)
	}
	return size / block * block, nil
}

// OpenFlash opens a flash-only volume: name is its label or its slot.
func OpenFlash(set *cacheset.Set, name string) (_ *Volume, err error) {
	v := newVolume(set, name)
	v.flash = true
	defer func() {
		if err != nil {
			v.release()
		}
	}()
	slots := set.Slots()
	found, err := FindFlash(slots, name)
	if err != nil {
		return nil, err
	}
	if !set.Claim(slots[found].UUID) {
		return nil, fmt.Errorf("flash-only volume %q: %w", name, ErrAttached)
	}
	v.claim = slots[found].UUID
	v.inode = uint32(found)
	if again := set.Slots(); again[found].UUID != v.claim || again[found].Retired() {
		return nil, fmt.Errorf("flash-only volume %q: %w", name, ErrNoVolume) // it was deleted just now
	}
	block := set.Geometry().BlockBytes()
	v.describe(name, int64(slots[found].Sectors)*ondisk.SectorSize/int64(block)*int64(block), block)
	v.config.Store(&conf{Config: Config{Mode: ondisk.Writeback, Strict: true, SequentialCutoff: DefaultSequentialCutoff}})
	return v, v.open()
}

func newVolume(set *cacheset.Set, name string) *Volume {
	v := &Volume{set: set, rt: set.Runtime(), log: set.Logger(), block: uint64(set.Geometry().BlockSectors)}
	v.name = name
	v.cache.dev = set.Device()
	v.changing.Init(v.rt)
	v.set.BindCond(&v.over)
	v.begun, v.wrote = 1, 1
	return v
}

func (v *Volume) describe(name string, size int64, block int) {
	cache := v.cache.dev.Info()
	info := blockdev.Info{
		Name: name, Size: size, LogicalBlock: block, PhysicalBlock: max(block, cache.PhysicalBlock), MaxTransfer: cache.MaxTransfer,
		BufferAlign: cache.BufferAlign, CanDiscard: true, Direct: cache.Direct, Engine: cache.Engine,
	}
	if v.back.dev != nil {
		b := v.back.dev.Info()
		info.LogicalBlock = max(block, b.LogicalBlock)
		info.Size = size / int64(info.LogicalBlock) * int64(info.LogicalBlock)
		info.PhysicalBlock = max(info.PhysicalBlock, b.PhysicalBlock)
		info.OptimalIO = b.OptimalIO
		info.BufferAlign = max(info.BufferAlign, b.BufferAlign)
	}
	v.info.Store(&info)
}

// attach finds the device's slot, or gives it one.
func (v *Volume) attach() error {
	sb := v.super.Load()
	state := sb.State()
	ours := sb.SetUUID == v.set.UUID()
	// A slot counts only for a device that was attached to this set all the time since.
	alive := ours && (state == ondisk.StateClean || state == ondisk.StateDirty)
	now := uint32(v.rt.WallTime().Unix())
	again := false
	change := func(slots []ondisk.UUIDEntry) error {
		slot, free := -1, -1
		again = false
		for i := range slots {
			switch e := &slots[i]; {
			case e.Unused():
				if free < 0 {
					free = i
				}
			case !e.Retired() && e.UUID == sb.UUID:
				if alive {
					slot = i
				} else {
					retire(e, now)
					again = true
				}
			}
		}
		switch {
		case slot >= 0:
			slots[slot].LastReg = now
			v.inode = uint32(slot)
			return nil
		case state == ondisk.StateDirty:
			return ErrUnflushed
		case free < 0 && again: // the one that it had is retired now; it may be had later
			return nil
		case free < 0:
			return cacheset.ErrNoSlot
		}
		again = false
		slots[free] = ondisk.UUIDEntry{UUID: sb.UUID, Label: labelOf(sb), FirstReg: now, LastReg: now}
		v.inode = uint32(free)
		return nil
	}
	err := takeSlot(v.set, change)
	if err == nil && again {
		err = takeSlot(v.set, change)
	}
	if err != nil {
		return err
	}
	v.set.Lock()
	dirty := v.set.DirtyLocked(v.inode)
	v.set.Unlock()
	want := state
	switch {
	case dirty > 0:
		want = ondisk.StateDirty
	case !alive:
		want = ondisk.StateClean
	}
	v.dirty.durable = want == ondisk.StateDirty
	v.dirty.clean = !v.dirty.durable
	if want == state && ours {
		return nil
	}
	super := *sb
	super.SetUUID = v.set.UUID()
	super.SetState(want)
	super.LastMount = now
	super.Seq++
	return v.storeSuper(&super)
}

// takeSlot is ChangeSlots with a change that takes a slot. If there is none, it waits until one that was retired can be had.
func takeSlot(set *cacheset.Set, fn func(slots []ondisk.UUIDEntry) error) error {
	for {
		err := set.ChangeSlots(fn)
		if !errors.Is(err, cacheset.ErrNoSlot) || !set.WaitSlot() {
			return err
		}
	}
}

// retire ends a slot: no device is taken for it again, and nobody may use its inode any more.
func retire(e *ondisk.UUIDEntry, now uint32) {
	e.UUID = ondisk.RetiredUUID
	e.Invalidated = now
	e.Flags = 0
}

// labelOf returns a superblock's label as a slot has it.
func labelOf(sb *ondisk.Superblock) (l [32]byte) {
	n := bytes.IndexByte(sb.Label[:], 0)
	if n < 0 {
		n = len(sb.Label)
	}
	copy(l[:], sb.Label[:n])
	return l
}

// BackingUUID returns the uuid of the backing device, "" of a flash-only volume.
func (v *Volume) BackingUUID() string {
	if v.flash {
		return ""
	}
	return v.super.Load().UUID.String()
}
