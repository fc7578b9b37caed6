package cacheset

import (
	"slices"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// uuidBytes is the size of a slot.
const uuidBytes = 128

// Claim makes a device's, or a flash-only volume's, uuid the caller's until Unclaim; false if it is someone's already. A
// copy of an open device has its uuid: it must not touch the slot.
func (s *Set) Claim(id ondisk.UUID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.claimed[id] {
		return false
	}
	s.claimed[id] = true
	return true
}

// Unclaim ends a claim.
func (s *Set) Unclaim(id ondisk.UUID) {
	s.mu.Lock()
	delete(s.claimed, id)
	s.mu.Unlock()
}

// ClaimedLocked reports whether a uuid is somebody's: see Claim.
func (s *Set) ClaimedLocked(id ondisk.UUID) bool { return s.claimed[id] }

// Slots returns a copy of the uuid array: slot i belongs to inode i.
func (s *Set) Slots() []ondisk.UUIDEntry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.slots)
}

// ChangeSlots has fn change a copy of the uuid array, and makes it durable; if fn returns an error, nothing changes.
// One change at a time is made.
//
// Order: the array is written to a new bucket; an entry that names it is written, behind a flush; then the old bucket
// may be used again. Source: F 8.6, 16.
func (s *Set) ChangeSlots(fn func(slots []ondisk.UUIDEntry) error) error {
	s.attaching.Lock()
	defer s.attaching.Unlock()
	slots := s.Slots()
	if err := fn(slots); err != nil {
		return err
	}
	return s.writeSlots(slots)
}

func (s *Set) writeSlots(slots []ondisk.UUIDEntry) error {
	s.mu.Lock()
	places, err := s.takeMetaLocked(true, 1)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if err := s.putSlots(slots, places[0]); err != nil {
		s.mu.Lock()
		s.table.Return(s.bucketOf(places[0]))
		s.mu.Unlock()
		return err
	}
	s.mu.Lock()
	old := s.uuids
	s.dead.Signal()
	s.slots, s.uuids = slots, ondisk.NewChild(0, 0, s.geo.MetaSectors, places[0])
	seq := s.journal.RequestEntryLocked(false)
	if old.Ptrs() > 0 {
		s.table.FreeAfter(s.bucketOf(old.P[0]), seq)
	}
	s.mu.Unlock()
	return s.journal.WaitDurable(s.stop, seq)
}

func (s *Set) putSlots(slots []ondisk.UUIDEntry, at ondisk.Ptr) error {
	buf := s.pool.Get(s.geo.MetaBytes())
	defer buf.Release()
	clear(buf.Data)
	for i := range slots {
		slots[i].Encode(buf.Data[i*uuidBytes:][:uuidBytes])
	}
	return s.io.WithPurpose(blockdev.ForUUID).WriteAt(buf.Data, int64(at.Sector())*ondisk.SectorSize, 0)
}
