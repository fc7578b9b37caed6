package bucket

import (
	"errors"
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Recount counts live and dirty sectors a second time, from a walk over the index, to compare with a Table's
// exact counts. While requests go on, the walk has a cursor, a position in the order of keys, and keeps a rule:
//
//   - a node's keys are added under the set's lock, and the cursor moves behind them in the same hold;
//   - a change to keys at or before the cursor goes to Recount.Apply too, right before Table.Apply: what crosses
//     the cursor is gathered in two Deltas;
//   - the table zeroes the recount of a bucket whose generation it raises, between Watch and Unwatch.
//
// Then both are equal at the end, exactly: there is no tolerance.
//
// A recount is of a window of the table, so that one of a very large cache can be made in several walks.
type Recount struct {
	t     *Table
	first uint32 // bucket that sums begins with
	sums  []sum
}

type sum struct{ live, dirty uint32 }

// RecountBytes is the memory that a recount takes for each bucket.
const RecountBytes = 8

// NewRecount takes the memory for a recount of n buckets from first on, or of those that there are. The set's lock is
// not needed, and should not be held.
func (t *Table) NewRecount(first, n uint32) *Recount {
	first = min(first, t.NBuckets())
	return &Recount{t: t, first: first, sums: make([]sum, min(n, t.NBuckets()-first))}
}

// Watch makes the table keep r up from now on, in the place of any other.
func (t *Table) Watch(r *Recount) { t.recount = r }

// Unwatch ends that.
func (t *Table) Unwatch() { t.recount = nil }

func (r *Recount) zero(b uint32) {
	if i := b - r.first; i < uint32(len(r.sums)) { // what is before first wraps around
		r.sums[i] = sum{}
	}
}

func (r *Recount) add(b uint32, gen uint8, live, dirty uint32) {
	if i := b - r.first; i < uint32(len(r.sums)) && r.t.Gen(b) == gen {
		r.sums[i].live += live
		r.sums[i].dirty += dirty
	}
}

// Add counts an extent that the walk found. Pointers that are stale, or not of this device, count nothing.
func (r *Recount) Add(p ondisk.Ptr, size uint32, dirty bool) {
	if b, ok := r.t.Bucket(p); ok {
		r.add(b, p.Gen(), size, uint32(onlyIf(dirty, int32(size))))
	}
}

// Apply makes a change to keys that the walk has been at. It leaves d as it is.
func (r *Recount) Apply(d *Deltas) {
	for _, e := range d.list {
		r.add(e.bucket, e.gen, uint32(e.live), uint32(e.dirty))
	}
}

// Compare compares a bounded number of buckets from bucket from on, begin with 0. It calls differ for each whose counts
// are not those of the table, and sound, if it is not nil, for each that is SUSPECT though they are; both may change the
// bucket: see Doubt and Trust. It returns the bucket to go on with; done says that it was at the end.
func (r *Recount) Compare(from uint32, differ func(b, live, dirty uint32), sound func(b, live, dirty uint32)) (next uint32, done bool) {
	from = max(from, r.first)
	last := uint64(r.first) + uint64(len(r.sums))
	end := min(uint64(from)+sweepSlice, last)
	for b := from; uint64(b) < end; b++ {
		w, s := r.t.get(b)
		switch c := r.sums[b-r.first]; {
		case c.live != w.live() || c.dirty != w.dirty():
			differ(b, c.live, c.dirty)
		case sound != nil && s.state() == stateSuspect:
			sound(b, c.live, c.dirty)
		}
	}
	return uint32(end), end == last
}

// Check compares everything that the table keeps twice, and the invariants that can be seen in it alone: I2, I3,
// I4, and the lag of I5. It looks at every bucket, with the lock held: for tests and checkers.
func (t *Table) Check() error {
	var (
		errs   []error
		counts [categories]int
		lags   [256]int
		tier   [tiers]int
		filled [fills + 1]int
		sparse int
		live   uint64
		dirty  uint64
		room   [rooms]int
		window int
		ready  = map[uint32]bool{}
	)
	fail := func(format string, args ...any) {
		if len(errs) < 10 {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	for _, p := range t.pools {
		for i := range p.n {
			b := p.buf[(p.head+i)%len(p.buf)]
			if ready[b] {
				fail("bucket %d is in the pools twice", b)
			}
			ready[b] = true
		}
	}
	for i := range t.entries {
		b := uint32(i)
		w, s := t.get(b)
		c := categoryOf(w, s)
		counts[c]++
		lags[w.gen()-s.oldest()]++
		live += uint64(w.live())
		dirty += uint64(w.dirty())
		room[roomOf(w, s)]++
		if w.dirty() > w.live() || c != Suspect && w.live() > t.geo.BucketSectors {
			fail("%v: counts do not fit (I2)", t.Info(b))
		}
		if (c == Meta || c == Fixed || c == Ready || c == Inc) && w.live() != 0 {
			fail("%v: has live sectors", t.Info(b))
		}
		if (c == Ready) != ready[b] && c != Suspect {
			fail("%v: in a pool: %v (I3)", t.Info(b), ready[b])
		}
		if _, in := t.window.seq[b]; in != s.inWindow() {
			fail("%v: in the journal window: %v", t.Info(b), in)
		} else if in {
			window++
		}
		if c == Ready && s.inWindow() && t.window.seq[b] > t.durable {
			fail("%v: the journal is durable up to %d (I4)", t.Info(b), t.durable)
		}
		if s.oldest() != w.gen() && s&(residueBit|windowBit) == 0 {
			fail("%v: lags without a reason", t.Info(b))
		}
		f := t.fill(w, s)
		filled[f]++
		if is := 0 < f && f < fills; is != t.sparse.has(b) {
			fail("%v: %d eighths dirty, to be moved: %v", t.Info(b), f, t.sparse.has(b))
		} else if is {
			sparse++
		}
		tr := tierOf(w, s)
		tier[tr]++
		for i := emptyFree; i < tiers; i++ {
			if t.index[i].has(b) != (i == tr) {
				fail("%v: in tier %d: %v, should be in %d", t.Info(b), i, t.index[i].has(b), tr)
			}
		}
		if d := &t.discard; d.index.has(b) != (t.discardable(tr) && !d.isDone(b)) {
			fail("%v: to be discarded: %v; discarded: %v", t.Info(b), d.index.has(b), d.isDone(b))
		}
	}
	for i := emptyFree; i < tiers; i++ {
		if tier[i] != t.index[i].count {
			fail("tier %d has %d buckets, counted %d", i, t.index[i].count, tier[i])
		}
	}
	if filled != t.filled || sparse != t.sparse.count {
		fail("eighths %v, %d to be moved; counted %v, %d", t.filled, t.sparse.count, filled, sparse)
	}
	if counts != t.counts || lags != t.lags || live != t.live || dirty != t.dirty || room != t.rooms || window != len(t.window.seq) {
		fail("counters: categories %v, live %d, dirty %d, rooms %v, window %d; counted %v, %d, %d, %v, %d",
			t.counts, t.live, t.dirty, t.rooms, len(t.window.seq), counts, live, dirty, room, window)
	}
	return errors.Join(errs...)
}
