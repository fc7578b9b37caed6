package bucket

import (
	"cmp"
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Deltas gathers what one insert changes, net per bucket and generation. It is made once and used again and
// again: in steady state nothing is allocated. The zero value is ready.
type Deltas struct {
	list []delta
}

type delta struct {
	bucket      uint32
	gen         uint8
	live, dirty int32
}

// fewDeltas is how many are searched one by one. Above, doubles stay until they are sorted together.
const fewDeltas = 16

// Add adds live and dirty sectors, either may be negative, to what changes for pointers of generation gen into
// bucket b. One call is for at most ondisk.MaxKeySize sectors, 16,000 calls fit between two resets.
func (d *Deltas) Add(b uint32, gen uint8, live, dirty int32) {
	if n := len(d.list); n <= fewDeltas {
		for i := n - 1; i >= 0; i-- {
			if e := &d.list[i]; e.bucket == b && e.gen == gen {
				e.live += live
				e.dirty += dirty
				return
			}
		}
	}
	d.list = append(d.list, delta{b, gen, live, dirty})
}

// Put counts a fragment of n sectors that the index now has, at p. Pointers to other devices count nothing.
func (d *Deltas) Put(t *Table, p ondisk.Ptr, n uint32, dirty bool) {
	if b, ok := t.Bucket(p); ok {
		d.Add(b, p.Gen(), int32(n), onlyIf(dirty, int32(n)))
	}
}

// Drop counts a fragment of n sectors at p that the index had.
func (d *Deltas) Drop(t *Table, p ondisk.Ptr, n uint32, dirty bool) {
	if b, ok := t.Bucket(p); ok {
		d.Add(b, p.Gen(), -int32(n), -onlyIf(dirty, int32(n)))
	}
}

// Reset forgets what was added.
func (d *Deltas) Reset() { d.list = d.list[:0] }

func onlyIf(yes bool, n int32) int32 {
	if yes {
		return n
	}
	return 0
}

// sum brings doubles together.
func (d *Deltas) sum() {
	if len(d.list) <= fewDeltas {
		return
	}
	slices.SortFunc(d.list, func(a, b delta) int {
		return cmp.Or(cmp.Compare(a.bucket, b.bucket), cmp.Compare(a.gen, b.gen))
	})
	out := d.list[:1]
	for _, e := range d.list[1:] {
		if last := &out[len(out)-1]; last.bucket == e.bucket && last.gen == e.gen {
			last.live += e.live
			last.dirty += e.dirty
		} else {
			out = append(out, e)
		}
	}
	d.list = out
}

// Apply makes the changes gathered in d and resets it. It belongs into the critical section of the insert that
// they describe, after its keys were appended to the journal. open is the sequence number of the open journal
// entry, read after that. journalled says that the keys are in it: a fill or the move of clean data is not.
//
// What adds comes before what only takes away, so that no bucket is empty or clean in between. A change for
// another generation than the bucket's is void: those sectors were given up when the generation was raised.
// Where nothing stays live, the bucket waits for entry open before it is used again (V1), also if the change
// was nil in sum: a key came and went within the entry.
//
// A change that does not fit makes the bucket SUSPECT: see Anomaly.
func (t *Table) Apply(d *Deltas, open uint64, journalled bool) {
	t.tick()
	t.start = false
	d.sum()
	for i := range d.list {
		if e := &d.list[i]; e.live > 0 || e.dirty > 0 {
			t.apply(e, open, journalled)
		}
	}
	for i := range d.list {
		if e := &d.list[i]; e.live <= 0 && e.dirty <= 0 {
			t.apply(e, open, journalled)
		}
	}
	d.Reset()
}

func (t *Table) apply(e *delta, open uint64, journalled bool) {
	b := e.bucket
	w, s := t.get(b)
	if w.gen() != e.gen {
		if ondisk.GenAfter(e.gen, w.gen()) != 0 {
			t.anomaly(Anomaly{Bucket: b, Gen: e.gen, Live: e.live, Dirty: e.dirty, Reason: "pointer newer than its bucket"})
		}
		return
	}
	switch s.state() {
	case stateData, stateSuspect:
	case stateInc, stateReady: // a pointer into what nobody was given
		t.anomaly(Anomaly{Bucket: b, Gen: e.gen, Live: e.live, Dirty: e.dirty, Reason: "pointer into a free bucket"})
		s = s.withState(stateSuspect)
	default:
		t.anomaly(Anomaly{Bucket: b, Gen: e.gen, Live: e.live, Dirty: e.dirty, Reason: "extent in a bucket of metadata"})
		return // never reused as it is
	}

	live, dirty := int64(w.live())+int64(e.live), int64(w.dirty())+int64(e.dirty)
	if journalled && s.state() == stateData && w.live() != 0 && (w.dirty() != 0) == (dirty != 0) &&
		0 <= dirty && dirty <= live && 0 < live && live <= int64(t.geo.BucketSectors) && t.broken == 0 &&
		(dirty == 0 || w.pins() != 0 || t.eighths(uint32(dirty)) == t.eighths(w.dirty())) {
		// Nothing but the counts changes, as nearly always.
		w = w.withCounts(uint32(live), uint32(dirty))
		x := &t.entries[b]
		x.lo, x.hi = uint32(w), uint32(w>>32)
		t.live += uint64(e.live)
		t.dirty += uint64(e.dirty)
		return
	}
	if t.broken&breakDirty != 0 {
		dirty = 0
	}
	if dirty < 0 || dirty > live || live > int64(t.geo.BucketSectors) {
		t.anomaly(Anomaly{Bucket: b, Gen: e.gen, Live: e.live, Dirty: e.dirty, Reason: "counts do not fit"})
		s = s.withState(stateSuspect)
		dirty = min(max(dirty, int64(w.dirty())), maxSectors)
		live = min(max(live, int64(w.live()), dirty), maxSectors)
	}
	// Emptied: V1. Cleaned: the journal still has dirty keys, which count where the head-room is computed.
	if (live == 0 || dirty == 0 && w.dirty() != 0) && t.broken&breakEmptySeq == 0 {
		t.window.put(b, open)
		s |= windowBit
	}
	if !journalled && e.live < 0 {
		// No journal entry makes the leaf be written soon: until then the old pointer is on disk.
		s = t.leaveResidue(s)
	}
	t.set(b, w.withCounts(uint32(live), uint32(dirty)), s)
}

// Doubt makes a bucket of data SUSPECT, with counts of at least live and dirty: what a verifier does when it
// found other counts than ours.
func (t *Table) Doubt(b uint32, live, dirty uint32, reason string) {
	w, s := t.get(b)
	t.anomaly(Anomaly{Bucket: b, Gen: w.gen(), Live: int32(live) - int32(w.live()), Dirty: int32(dirty) - int32(w.dirty()), Reason: reason})
	if st := s.state(); st == stateFixed || st == stateMeta || st == stateGated {
		return
	}
	dirty = min(max(dirty, w.dirty()), maxSectors)
	live = min(max(live, w.live(), dirty), maxSectors)
	t.set(b, w.withCounts(live, dirty), s.withState(stateSuspect))
}

// Trust gives a SUSPECT bucket back its place, with counts that were verified, and reports whether it did: counts that
// cannot be (I2) leave it where it is. open is the open journal entry.
func (t *Table) Trust(b uint32, live, dirty uint32, open uint64) bool {
	w, s := t.get(b)
	if s.state() != stateSuspect || dirty > live || live > t.geo.BucketSectors {
		return false
	}
	for i := range t.pools { // it may have been ready when the doubt came up, and will be again
		t.pools[i].remove(b)
	}
	if live == 0 || dirty == 0 && w.dirty() != 0 { // as in apply
		t.window.put(b, open)
		s |= windowBit
	}
	t.set(b, w.withCounts(live, dirty), s.withState(stateData))
	return true
}
