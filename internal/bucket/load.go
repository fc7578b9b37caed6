package bucket

import (
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A Loader builds a Table from what is on disk. In this order:
//
//	PrioSet for each prio set, Fixed for superblock and journal, Meta for prio sets and uuid array
//	Node, Extent, Pointer for what a walk of the tree finds, in any order
//	Journal for every key of a needed journal entry
//	Finish
//
// Generations in pointers may be ahead of those stored, and are adopted, wherever in the walk they appear: what
// was counted for an older generation is dropped then. Calls are short, 10 ns or so, and must not overlap.
type Loader struct {
	t      *Table
	report Report
}

// A Report says what a Loader met.
type Report struct {
	Nodes, Extents uint64 // counted
	Stale          uint64 // pointers older than their bucket
	Raised         uint64 // generations that a pointer was ahead of

	// DirtyDropped says that dirty extents were counted before a newer generation was found in their bucket: who
	// counts volumes in the same walk has counted them too, and counts again (behaviour 9.9).
	DirtyDropped bool

	// Conflicts are buckets with two roles, which the kernel refuses; here they are metadata, never reused.
	Conflicts uint64

	// Outside are pointers to where no bucket of this device is.
	Outside uint64

	// Overfull are buckets with more live sectors than they have, now SUSPECT.
	Overfull uint64
}

// NewLoader begins with all generations 0 and nothing known. run may be nil, for the real runtime.
func NewLoader(run *rt.Runtime, g *ondisk.Geometry, o Options) (*Loader, error) {
	if g.NBuckets >= 1<<32 || g.BucketSectors > maxSectors/2+1 || g.NBuckets == 0 {
		return nil, ErrTooLarge
	}
	if run == nil {
		run = rt.New()
	}
	o = o.withDefaults(g)
	n := uint32(g.NBuckets)
	t := &Table{geo: *g, opt: o, run: run, broken: o.Broken, entries: make([]entry, n), window: newWindow(), discard: newDiscards(n)}
	for i := emptyFree; i < tiers; i++ {
		t.index[i] = newBitset(n)
	}
	t.sparse, t.fillShift = newBitset(n), fillShift(g.BucketSectors)
	t.pools[poolCommon] = newRing(t.spare() + mostReplay*int(g.KernelReserve) + int(g.KernelFreeInc) + mostSlack(int(g.NBuckets)) + (o.Ready+o.Batch)*o.most)
	t.supply.times = 1
	t.pools[poolMeta] = newRing(o.BtreeReserve)
	t.pools[poolMoving] = newRing(o.MovingReserve)
	t.batch.list = make([]uint32, 0, len(t.pools[poolCommon].buf)+o.BtreeReserve+o.MovingReserve)
	t.clock.per = max(int64(g.NBuckets*uint64(g.BucketSectors)/1024), 1)
	t.clock.now.Store(maxAge)
	for b := range n {
		s := side(0).withStamp(maxAge)
		if !g.ValidBucket(uint64(b)) {
			s = s.withState(stateFixed)
		}
		t.entries[b].side = uint32(s)
	}
	return &Loader{t: t}, nil
}

// PrioSet takes over generations and priorities of prio set number set, which lies in bucket at.
func (l *Loader) PrioSet(set int, at uint32, p *ondisk.PrioSet) {
	t := l.t
	first := uint64(set) * t.geo.PrioPerBucket
	for b := first; b < min(first+t.geo.PrioPerBucket, t.geo.NBuckets); b++ {
		prio, gen := p.Entry(int(b - first))
		w, s := t.get(uint32(b))
		s = s.withOldest(gen).withStamp(min(prio, maxAge)) // the clock is at maxAge
		l.put(uint32(b), w.withGen(gen), s)
	}
	t.prio[t.named] = append(t.prio[t.named], at)
}

// Gen returns a bucket's generation as far as it is known by now.
func (l *Loader) Gen(b uint32) uint8 { return l.t.Gen(b) }

// Fixed says that a bucket belongs to the superblock or the journal. Those in front of the first usable one
// are known.
func (l *Loader) Fixed(b uint32) {
	w, s := l.t.get(b)
	l.put(b, w, s.withState(stateFixed))
}

// Meta says that a bucket holds a prio set or the uuid array.
func (l *Loader) Meta(b uint32) {
	w, s := l.t.get(b)
	l.role(b, w, s)
}

// Node counts a node that a live key of an interior node, or the journal, refers to.
func (l *Loader) Node(p ondisk.Ptr) {
	if b, w, s, ok := l.see(p); ok {
		l.report.Nodes++
		l.role(b, w, s)
	}
}

// Extent counts a live leaf key's pointer to size sectors. It reports whether the pointer is good as far as is
// known by now.
func (l *Loader) Extent(p ondisk.Ptr, size uint32, dirty bool) bool {
	b, w, s, ok := l.see(p)
	if !ok {
		return false
	}
	if s.state() != stateData {
		l.report.Conflicts++
		return true
	}
	l.report.Extents++
	live, d := w.live()+size, w.dirty()
	if dirty {
		d += size
	}
	l.put(b, w.withCounts(min(live, maxSectors), min(d, maxSectors)), s)
	return true
}

// Pointer sees a pointer that counts nothing: a freeing key's, or a key's that is hidden or bad. If it is as new
// as its bucket, it is residue all the same: it stays when the generation is raised.
func (l *Loader) Pointer(p ondisk.Ptr) {
	if b, w, s, ok := l.see(p); ok {
		l.put(b, w, s|residueBit)
	}
}

// Journal sees a pointer of a key in a needed journal entry, and pins its bucket, whatever its generation: until
// the key is inserted again the index may show older ones, that do not count for this bucket. Unpin when it was.
// ok is false if the pointer is not to a bucket of this device: there is nothing to unpin.
func (l *Loader) Journal(p ondisk.Ptr) (b uint32, ok bool) {
	if b, ok = l.t.Bucket(p); !ok {
		l.report.Outside++
		return 0, false
	}
	l.see(p)
	w, s := l.t.get(b)
	l.put(b, w.withPins(min(w.pins()+1, maxPins)), s)
	return b, true
}

// Finish builds the index and the counters. durable is the newest journal entry, lastSeq the oldest needed.
//
// What comes next: AllocatePrioSets (and TakeUnused, for a set without contents), then a first batch, and replay, with
// Apply and Unpin for each key: before or beside each other, since what the journal's keys point to is pinned.
func (l *Loader) Finish(durable, lastSeq uint64) (*Table, Report) {
	t := l.t
	l.t = nil
	t.durable, t.passed, t.start = durable, lastSeq, true
	for i := range t.entries {
		b := uint32(i)
		w, s := t.get(b)
		if w.live() > t.geo.BucketSectors && s.state() == stateData {
			l.report.Overfull++
			s = s.withState(stateSuspect)
		}
		if s.oldest() != w.gen() {
			s |= residueBit
		}
		t.entries[b].side = uint32(s)
		t.live += uint64(w.live())
		t.dirty += uint64(w.dirty())
		t.counts[categoryOf(w, s)]++
		t.rooms[roomOf(w, s)]++
		t.lags[w.gen()-s.oldest()]++
		if tr := tierOf(w, s); tr != tierNone {
			t.index[tr].add(b)
			t.retier(b, tierNone, tr)
		}
		t.filled[0]++
		t.setFill(b, 0, t.fill(w, s))
	}
	return t, l.report
}

// AllocatePrioSets takes unused buckets for the prio sets that there are not yet: as a rule the second of the
// two that alternate, of a set without contents both. It must come first after Finish. Where there are not
// enough, the kernel could not start this set either.
func (t *Table) AllocatePrioSets() error {
	for i := range t.prio {
		for len(t.prio[i]) < t.PrioSets() {
			b, _, ok := t.TakeUnused()
			if !ok {
				return ErrNoSpace
			}
			t.prio[i] = append(t.prio[i], b)
		}
	}
	return nil
}

func (l *Loader) put(b uint32, w word, s side) {
	l.t.entries[b] = entry{uint32(w), uint32(w >> 32), uint32(s)}
}

// role makes a bucket metadata.
func (l *Loader) role(b uint32, w word, s side) {
	if s.state() == stateFixed || w.live() != 0 {
		l.report.Conflicts++
		if s.state() == stateFixed {
			return
		}
		w = w.withCounts(0, 0)
	}
	l.put(b, w, s.withState(stateMeta))
}

// see takes note of a pointer's generation; ok is true if the pointer is good.
func (l *Loader) see(p ondisk.Ptr) (b uint32, w word, s side, ok bool) {
	t := l.t
	if b, ok = t.Bucket(p); !ok {
		l.report.Outside++
		return
	}
	w, s = t.get(b)
	gen := p.Gen()
	if ondisk.GenAfter(gen, w.gen()) != 0 {
		l.report.Raised++
		if w.dirty() != 0 {
			l.report.DirtyDropped = true
		}
		w = w.withGen(gen).withCounts(0, 0)
		if s.state() == stateMeta {
			s = s.withState(stateData) // a node that was there before
		}
		l.put(b, w, s)
	}
	if ondisk.GenAfter(s.oldest(), gen) != 0 {
		s = s.withOldest(gen)
		l.put(b, w, s)
	}
	if gen != w.gen() {
		l.report.Stale++
		return b, w, s, false
	}
	return b, w, s, true
}
