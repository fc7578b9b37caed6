package cacheset

import (
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Broken are rules of the reuse gate and of the backing device's state (B 9.3, F 10, F 16) that a set does not keep.
// It is for tests alone, which see to it that each is found out when it is missing: a crash loop that finds none of
// them proves nothing.
type Broken uint16

// The rules that may be left out.
const (
	// SkipJ1: what replaces a key (dirty data that was moved, or is clean now) is not journalled.
	SkipJ1 Broken = 1 << iota
	// SkipJ2: the replay leaves out keys whose pointer is stale, so that older ones on the disk show again.
	SkipJ2
	// SkipM1: a copy does not take over the journal pins of the nodes that it replaces: the entries go before the
	// parent has the pointer to the copy.
	SkipM1
	// SkipF1: keys become clean without a flush of the backing device that began after the data was written there.
	SkipF1
	// SkipV1: a bucket whose last key was overwritten is ready while the entry of the overwriting key is not durable.
	SkipV1
	// SkipV3: keys that became clean are not journalled, and the state does not wait for them. No data is lost by that
	// alone, for the backing device has it: but the state says CLEAN of a volume that a crash gives dirty keys.
	SkipV3
	// SkipV4: an evicted bucket is ready while its new generation is not durable.
	SkipV4
	// SkipV5: the bucket of a replaced node may be taken, and its new generation stored, while its parent's append is
	// not durable.
	SkipV5
	// SkipDirtyState: a dirty key is journalled before the backing superblock says DIRTY.
	SkipDirtyState
	// EarlyClean: the backing superblock says CLEAN before the keys that became clean are durable.
	EarlyClean
	// EarlySlot: a retired slot is zeroed when its keys are gone from memory, not from the disk.
	EarlySlot
	// EarlyDiscard: empty buckets are discarded although a needed journal entry, or a leaf on the disk, has pointers to them.
	EarlyDiscard
)

// Broken returns the rules that the set does not keep: none, but in tests.
func (s *Set) Broken() Broken { return s.opt.Broken }

// buckets returns what of it is the bucket table's.
func (b Broken) buckets() (t bucket.Breakage) {
	if b&SkipV1 != 0 {
		t |= bucket.BreakV1
	}
	if b&SkipV4 != 0 {
		t |= bucket.BreakV4
	}
	if b&SkipV5 != 0 {
		t |= bucket.BreakV5
	}
	if b&EarlyDiscard != 0 {
		t |= bucket.BreakDiscard
	}
	return t
}

// skipStale leaves a key of an entry out if its pointer is stale: against J2, for tests.
func (s *Set) skipStale(k *ondisk.Key) (skipped bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.Ptrs() != 1 {
		return false
	}
	b, ok := s.table.Bucket(k.P[0])
	if !ok || s.table.Gen(b) == k.P[0].Gen() {
		return false
	}
	s.table.Unpin(b)
	return true
}
