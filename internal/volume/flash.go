package volume

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Sentinels of flash-only volumes.
var (
	// ErrFlashExists: there is a flash-only volume of that label already.
	ErrFlashExists = errors.New("there is a flash-only volume of that name already")
	// ErrFlashSize: a size that a flash-only volume cannot have.
	ErrFlashSize = errors.New("bad size of a flash-only volume")
	// ErrFlashLabel: a label that a flash-only volume cannot have.
	ErrFlashLabel = errors.New("bad label of a flash-only volume")
)

// maxFlash is the largest flash-only volume, in bytes: keys end at 43 bits and more, and int64 offsets bound it.
const maxFlash = 1 << 60

// CreateFlash makes a flash-only volume of so many bytes, whose name is its label. It returns its slot.
//
// Its keys are those of the slot's inode: a slot is taken that no volume has left keys of.
func CreateFlash(set *cacheset.Set, label string, size int64) (slot int, err error) {
	if err := checkFlashSize(set, size); err != nil {
		return 0, err
	}
	e := ondisk.UUIDEntry{Flags: ondisk.UUIDFlashOnly, Sectors: uint64(size) / ondisk.SectorSize}
	if len(label) == 0 || len(label) > len(e.Label) {
		return 0, fmt.Errorf("%w: it has %d bytes, 1 to %d are possible", ErrFlashLabel, len(label), len(e.Label))
	}
	for i := range len(label) {
		if label[i] <= ' ' || label[i] == 0x7f {
			return 0, fmt.Errorf("%w: %q", ErrFlashLabel, label)
		}
	}
	if _, err := strconv.Atoi(label); err == nil {
		return 0, fmt.Errorf("%w: %q would be taken for a slot's number", ErrFlashLabel, label)
	}
	copy(e.Label[:], label)
	set.Runtime().Read(e.UUID[:])
	e.UUID[6], e.UUID[8] = e.UUID[6]&0x0f|0x40, e.UUID[8]&0x3f|0x80
	e.FirstReg = uint32(set.Runtime().WallTime().Unix())
	e.LastReg = e.FirstReg
	err = takeSlot(set, func(slots []ondisk.UUIDEntry) error {
		slot = -1
		for i := range slots {
			switch s := &slots[i]; {
			case s.FlashOnly() && s.LabelString() == label:
				return fmt.Errorf("%w: %q, slot %d", ErrFlashExists, label, i)
			case s.Unused() && slot < 0:
				slot = i
			}
		}
		if slot < 0 {
			return cacheset.ErrNoSlot
		}
		slots[slot] = e
		return nil
	})
	return slot, err
}

// checkFlashSize judges a size in bytes.
func checkFlashSize(set *cacheset.Set, size int64) error {
	if block := int64(set.Geometry().BlockBytes()); size < block || size%block != 0 || size > maxFlash {
		return fmt.Errorf("%w: %d bytes; it must be a multiple of the set's block, %d", ErrFlashSize, size, block)
	}
	return nil
}

// FindFlash returns the slot of a flash-only volume: name is its label or its slot.
func FindFlash(slots []ondisk.UUIDEntry, name string) (slot int, err error) {
	found := -1
	for i := range slots {
		e := &slots[i]
		if !e.FlashOnly() {
			continue
		}
		if e.LabelString() == name {
			return i, nil
		}
		if n, err := strconv.Atoi(name); err == nil && n == i {
			found = i
		}
	}
	if found < 0 {
		return 0, fmt.Errorf("%q: %w", name, ErrNoVolume)
	}
	return found, nil
}

// GrowFlash gives a flash-only volume more bytes; an open one has them at once. What is new reads as zeroes.
func GrowFlash(set *cacheset.Set, name string, size int64) error {
	if err := checkFlashSize(set, size); err != nil {
		return err
	}
	return set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
		i, err := FindFlash(slots, name)
		if err != nil {
			return err
		}
		if old := int64(slots[i].Sectors) * ondisk.SectorSize; size < old {
			return fmt.Errorf("%w: %q has %d bytes already, and cannot become smaller", ErrFlashSize, name, old)
		}
		slots[i].Sectors = uint64(size) / ondisk.SectorSize
		return nil
	})
}

// Grown takes up the size that GrowFlash gave an open flash-only volume.
func (v *Volume) Grown() {
	info := v.Info()
	slots := v.set.Slots()
	block := int64(info.LogicalBlock)
	info.Size = int64(slots[v.inode].Sectors) * ondisk.SectorSize / block * block
	v.info.Store(&info)
}

// DeleteFlash ends a flash-only volume that is not open: its data is gone, and its space comes back.
//
// Order: the slot is retired, durably; then its keys go, now or at the next start (cacheset, dead.go).
func DeleteFlash(set *cacheset.Set, name string) error {
	slots := set.Slots()
	i, err := FindFlash(slots, name)
	if err != nil {
		return err
	}
	id := slots[i].UUID
	if !set.Claim(id) {
		return fmt.Errorf("flash-only volume %q: %w", name, ErrAttached)
	}
	defer set.Unclaim(id)
	now := uint32(set.Runtime().WallTime().Unix())
	return set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
		if slots[i].UUID != id {
			return fmt.Errorf("%q: %w", name, ErrNoVolume)
		}
		retire(&slots[i], now)
		return nil
	})
}
