package ubcache

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/volume"
)

// A WriteBackError says which ranges of a volume could not be written back, in bytes, and how much is dirty still. It
// matches its cause.
type WriteBackError = volume.WriteBackError

// A Range is Len bytes at Off.
type Range = volume.Range

// WriteBack writes all data that is dirty now to the backing device, as fast as it goes. If nothing became dirty
// meanwhile, the backing device is marked clean, and is complete without the cache. What cannot be written back is in
// the *WriteBackError, and stays dirty; so is what is left when ctx ends, and writeback goes on at its usual rate.
func (v *Volume) WriteBack(ctx context.Context) error { return v.v.WriteBack(ctx) }

// Detach writes all dirty data back and takes the volume from the set. On return it is served from its backing device
// alone, which says so itself: state none. Requests go on meanwhile; nothing new is cached. If ctx ends first, or data
// cannot be written back, the volume is as it was.
func (v *Volume) Detach(ctx context.Context) error { return v.v.Detach(ctx) }

// CloseVolume closes one volume of a set that goes on. Its queues must be closed before.
func (s *CacheSet) CloseVolume(ctx context.Context, name string) error {
	s.mu.Lock()
	i := slices.IndexFunc(s.volumes, func(v *Volume) bool { return v.name == name })
	if i < 0 {
		s.mu.Unlock()
		return fmt.Errorf("%w: %q", ErrNoObject, name)
	}
	v := s.volumes[i]
	s.volumes = slices.Delete(slices.Clone(s.volumes), i, i+1)
	s.mu.Unlock()
	return s.closeVolume(ctx, v)
}

// closeVolume closes a volume. One whose device does not answer is left alone when ctx has ended.
func (s *CacheSet) closeVolume(ctx context.Context, v *Volume) error {
	err := s.set.Bound(ctx, v.close)
	if errors.Is(err, cacheset.ErrHangs) {
		return fmt.Errorf("volume %q: %w", v.name, err)
	}
	return err
}

// A FlashVolume is a volume whose data is in the cache and nowhere else.
type FlashVolume struct {
	Slot  int
	Label string
	Size  int64 // bytes
	Dirty int64 // bytes that hold data
}

// FlashVolumes returns the flash-only volumes of the set, open or not.
func (s *CacheSet) FlashVolumes() []FlashVolume {
	slots := s.set.Slots()
	list := []FlashVolume{}
	s.set.Lock()
	defer s.set.Unlock()
	for i := range slots {
		if e := &slots[i]; e.FlashOnly() {
			dirty := s.set.DirtyLocked(uint32(i)) * ondisk.SectorSize
			list = append(list, FlashVolume{i, e.LabelString(), int64(e.Sectors) * ondisk.SectorSize, dirty})
		}
	}
	return list
}

// An AbsentVolume is a volume with a backing device that is not open, and has dirty data in the set.
type AbsentVolume struct {
	Slot  int
	UUID  string // of the backing device
	Label string
	Dirty int64 // bytes
}

// AbsentVolumes returns the volumes with dirty data that are not open, flash-only ones left out.
func (s *CacheSet) AbsentVolumes() (list []AbsentVolume) {
	slots := s.set.Slots()
	s.set.Lock()
	defer s.set.Unlock()
	for i := range slots {
		e := &slots[i]
		if e.Unused() || e.Retired() || e.FlashOnly() || s.set.ClaimedLocked(e.UUID) {
			continue
		}
		if n := s.set.DirtyLocked(uint32(i)); n > 0 {
			list = append(list, AbsentVolume{i, e.UUID.String(), e.LabelString(), n * ondisk.SectorSize})
		}
	}
	return list
}

// CreateFlash makes a flash-only volume of size bytes, for OpenVolume to open by its label, and returns its slot. It
// takes no space until it is written to; a set without room for more data refuses writes with ErrNoSpace.
func (s *CacheSet) CreateFlash(_ context.Context, label string, size int64) (slot int, err error) {
	return volume.CreateFlash(s.set, label, size)
}

// GrowFlash gives a flash-only volume, named by its label or slot, more bytes, which read as zeroes.
func (s *CacheSet) GrowFlash(_ context.Context, name string, size int64) error {
	s.growing.Lock()
	defer s.growing.Unlock()
	slots := s.set.Slots()
	slot, err := volume.FindFlash(slots, name)
	if err == nil {
		err = volume.GrowFlash(s.set, name, size)
	}
	if err != nil {
		return err
	}
	for _, v := range s.Volumes() {
		if v.v.Flash() && int(v.v.Inode()) == slot {
			return v.grown()
		}
	}
	return nil
}

// DeleteFlash ends a flash-only volume, named by its label or slot, and all its data. It must not be open: ErrAttached.
func (s *CacheSet) DeleteFlash(_ context.Context, name string) error {
	return volume.DeleteFlash(s.set, name)
}

// grown lets blocking calls reach what the volume has got.
func (v *Volume) grown() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return nil // what opens it next sees its size
	}
	v.v.Grown()
	io, err := blockdev.NewIO(v.v, volumeDepth)
	if err != nil {
		return err
	}
	v.old = append(v.old, v.io.Swap(io)) // calls may be under way on it
	return nil
}

// closeIO ends blocking calls.
func (v *Volume) closeIO() error {
	v.mu.Lock()
	v.closed = true
	v.mu.Unlock()
	errs := []error{v.io.Load().Close()}
	for _, io := range v.old {
		errs = append(errs, io.Close())
	}
	return errors.Join(errs...)
}
