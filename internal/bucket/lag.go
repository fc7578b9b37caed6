package bucket

import "github.com/ubcache/ubcache/internal/ondisk"

// leaveResidue notes that an older generation will stay in the index on disk.
func (t *Table) leaveResidue(s side) side {
	s |= residueBit
	if t.sweep.shadow != nil {
		s |= freshBit
	}
	return s
}

// raise makes a bucket's generation one greater, which makes all pointers into it stale. The sectors that they
// counted are gone. residue says that such pointers stay in the index on disk.
func (t *Table) raise(b uint32, w word, s side, residue bool) (word, side) {
	if residue {
		s = t.leaveResidue(s)
	}
	w = w.withGen(w.gen()+1).withCounts(0, 0)
	if s&(residueBit|windowBit) == 0 || t.broken&breakLag != 0 {
		s = s.withOldest(w.gen()) // no pointer is left anywhere
		t.sweep.none(b)
	} else {
		t.sweep.older(b)
		if w.gen()-s.oldest() > ondisk.MaxStale {
			t.stats.OverLag++
		}
	}
	if t.recount != nil {
		t.recount.zero(b)
	}
	return w, s
}

// JournalPassed says that journal entries before lastSeq are not needed any more: lastSeq is that of an entry
// that is durable. Buckets that only those entries had pointers into are rid of them: their lag is gone. It does
// a bounded part of the work and reports whether there is more; call it until there is not.
func (t *Table) JournalPassed(lastSeq uint64) (more bool) {
	t.passed = max(t.passed, lastSeq)
	for range expireSlice {
		b, ok, more := t.window.expire(t.passed)
		if !more {
			return false
		}
		if !ok {
			continue
		}
		w, s := t.get(b)
		s &^= windowBit
		if !s.residue() {
			s = s.withOldest(w.gen())
			t.sweep.none(b)
		}
		t.set(b, w, s)
	}
	return true
}

const (
	expireSlice = 64
	sweepSlice  = 2048
)

// A sweepState is a sweep of generations under way: a walk over all nodes that finds out how old pointers in
// the index really are.
//
// shadow holds, for each bucket, how much older than its bucket the oldest pointer found so far is. That a
// bucket starts with no age, and grows by one when its generation is raised, is the same as starting with its
// generation at the beginning, but needs no pass over all buckets under the lock.
type sweepState struct {
	shadow  []uint8 // nil: no sweep
	start   uint64  // the journal entry open when it began
	ending  bool
	done    uint32 // when ending: buckets below have their result
	evicted uint64 // sectors since the last sweep began
}

// none: no older pointer into b is left.
func (s *sweepState) none(b uint32) {
	if s.shadow != nil && b >= s.done {
		s.shadow[b] = 0
	}
}

// older: the bucket's generation was raised, so every pointer found is one older.
func (s *sweepState) older(b uint32) {
	if s.shadow != nil && b >= s.done && s.shadow[b] < 255 {
		s.shadow[b]++
	}
}

// MaxLag returns the greatest distance between a bucket's generation and the oldest that may be found of it in
// the index or in a needed journal entry.
func (t *Table) MaxLag() int {
	for lag := len(t.lags) - 1; lag > 0; lag-- {
		if t.lags[lag] != 0 {
			return lag
		}
	}
	return 0
}

// Lags returns how many buckets have a lag of at least n.
func (t *Table) Lags(n int) (buckets int) {
	for _, c := range t.lags[n:] {
		buckets += c
	}
	return buckets
}

// SweepLag is the lag from which on a sweep is due.
const SweepLag = 48

// SweepDue reports whether it is time for a sweep: some bucket lags by 48 or more, or as much as the cache
// holds was evicted since the last one. The sweep should be done before MaxLag reaches 80.
func (t *Table) SweepDue() bool {
	return t.sweep.shadow == nil &&
		(t.MaxLag() >= SweepLag || t.sweep.evicted >= uint64(len(t.entries))*uint64(t.geo.BucketSectors))
}

// NewShadow returns the memory that a sweep needs, one byte a bucket. The set's lock is not needed, and should
// not be held: clearing it may take milliseconds.
func (t *Table) NewShadow() []uint8 { return make([]uint8, len(t.entries)) }

// SweepBegin begins a sweep. open is the open journal entry; shadow is from NewShadow, and used for this sweep
// only. Then comes the walk: all nodes, interior ones too, in key order. For every pointer that is physically in
// a node and counts nothing, since it is stale, its key is bad, or it is a freeing key's: SweepSee. Those of live
// keys need no call. What a rewrite leaves out counts as there until that rewrite is durable. In the end, SweepEnd.
func (t *Table) SweepBegin(open uint64, shadow []uint8) {
	t.sweep = sweepState{shadow: shadow[:len(t.entries)], start: open}
}

// SweepSee notes a pointer that counts nothing. One as new as its bucket will be older when that is used again.
func (t *Table) SweepSee(p ondisk.Ptr) {
	b, ok := t.Bucket(p)
	if !ok || t.sweep.shadow == nil {
		return
	}
	w, s := t.get(b)
	age := ondisk.GenAfter(w.gen(), p.Gen())
	t.sweep.shadow[b] = max(t.sweep.shadow[b], age)
	if age > w.gen()-s.oldest() { // our own bookkeeping says there is none so old
		t.anomaly(Anomaly{Bucket: b, Gen: p.Gen(), Reason: "pointer older than any known"})
		s = s.withOldest(p.Gen())
	}
	t.set(b, w, t.leaveResidue(s))
}

// SweepEnd takes over what the walk found. lastSeq is the oldest needed entry of a durable one: until it has
// passed the entry that was open at the beginning, nothing happens and ready is false. It does a bounded part
// of the work; call it until more is false.
func (t *Table) SweepEnd(lastSeq uint64) (ready, more bool) {
	sw := &t.sweep
	if sw.shadow == nil {
		return true, false
	}
	if lastSeq <= sw.start {
		return false, true
	}
	sw.ending = true
	end := min(uint64(sw.done)+sweepSlice, uint64(len(t.entries)))
	for b := sw.done; uint64(b) < end; b++ {
		w, s := t.get(b)
		age := sw.shadow[b]
		if s&(freshBit|windowBit) == 0 {
			age = 0 // raised meanwhile, but without a trace
		}
		was := s
		if s&freshBit == 0 {
			s &^= residueBit
		}
		if s = s.withOldest(w.gen()-age) &^ freshBit; s != was {
			t.set(b, w, s)
		}
	}
	sw.done = uint32(end)
	if end < uint64(len(t.entries)) {
		return true, true
	}
	sw.shadow, sw.done, sw.ending = nil, 0, false
	t.stats.Sweeps++
	return true, false
}

// SweepAbort gives up a sweep. What was known before stays known; of what the sweep found nothing is kept
// but that there is residue.
func (t *Table) SweepAbort() {
	t.sweep.shadow, t.sweep.done, t.sweep.ending = nil, 0, false
}
