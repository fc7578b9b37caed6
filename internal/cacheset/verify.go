package cacheset

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

const (
	verifyEvery  = 7 * 24 * time.Hour
	verifyRetry  = time.Hour // after a pass that could not be finished
	verifyKeys   = 512       // extents counted in one hold of the lock: each may cost two misses of the processor's cache
	verifyHold   = 20 * time.Microsecond
	verifyRate   = 16 << 20 // bytes of nodes that are read in a second
	verifyMemory = 64 << 20 // bytes
	verifyNamed  = 16       // mismatches that an error names
)

// A MismatchError says that counts were not what the index has, which is an error of ours. No data is lost: the greater
// count stays, and a bucket with data rests, for it may have been counted too low.
type MismatchError struct {
	Count uint64   // buckets, and regions and sums of volumes' dirty data
	First []string // of these
}

func (e *MismatchError) Error() string {
	s := fmt.Sprintf("%d counts are not what the index has: %s", e.Count, strings.Join(e.First, "; "))
	if e.Count > uint64(len(e.First)) {
		s += "; ..."
	}
	return s
}

func (e *MismatchError) add(format string, args ...any) {
	e.Count++
	if len(e.First) < verifyNamed {
		e.First = append(e.First, fmt.Sprintf(format, args...))
	}
}

// A verifier is what passes over the index leave behind. It is guarded by the set's lock.
type verifier struct {
	walk   *count  // the one under way, nil: none
	wake   rt.Cond // for the loop, and for who waits for a pass
	wanted uint64  // the last pass that somebody waits for
	begun  uint64  // passes
	waits  []*verifyWait
}

// A verifyWait is somebody who waits for the end of a pass.
type verifyWait struct {
	pass uint64
	over bool
	err  error
}

// Verify counts the whole index again, once, from its beginning, and compares: the live and dirty sectors of every
// bucket, and the dirty sectors of every volume (I1, I7). It waits for that, or for the end of ctx, which does not end
// the pass. A *MismatchError says what was different; another error, why the pass had no end.
func (s *Set) Verify(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := &s.verify
	w := &verifyWait{pass: v.begun + 1}
	v.wanted = w.pass
	v.waits = append(v.waits, w)
	v.wake.Broadcast()
	for !w.over {
		if err := s.errLocked(); err != nil {
			return err
		}
		if err := v.wake.WaitContext(ctx); err != nil && !w.over {
			return err
		}
	}
	return w.err
}

// verifyLoop is the goroutine that holds the counts against the index: when somebody asks for it, and a week after the
// start or the last pass. Source: B 9.8.
func (s *Set) verifyLoop() {
	for pause := s.opt.VerifyEvery; s.verifyDue(pause); {
		pause = s.opt.VerifyEvery
		missed, err := s.verifyPass()
		if missed.Count > 0 {
			s.log.Error("counts are not what the index has: the greater ones stay, and buckets with data rest", "set", s.UUID().String(), "err", missed)
		}
		if err != nil && s.stop.Err() == nil && s.Err() == nil {
			s.log.Warn("a verification of the counts ended early", "set", s.UUID().String(), "err", err)
			pause = min(pause, verifyRetry)
		}
	}
}

// verifyDue waits until the next pass is due. It reports whether there is to be one: false is the end of the set.
func (s *Set) verifyDue(pause time.Duration) bool {
	if s.opt.Restless {
		pause = min(pause, restless)
	}
	ctx, cancel := s.rt.WithTimeout(s.stop, pause)
	defer cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.stop.Err() == nil && s.Err() == nil {
		if s.verify.wanted > s.verify.begun || ctx.Err() != nil {
			return true
		}
		_ = s.verify.wake.WaitContext(ctx)
	}
	return false
}

// verifyPass makes one pass, as many walks of the index as its memory asks for, and tells those who wait for it.
func (s *Set) verifyPass() (*MismatchError, error) {
	missed := new(MismatchError)
	s.mu.Lock()
	s.verify.begun++
	pass := s.verify.begun
	s.mu.Unlock()

	var err error
	n, window := uint64(s.table.NBuckets()), uint64(s.opt.verifyWindow)
	for first := uint64(0); first < n && err == nil; first += window {
		err = s.verifyWindow(s.table.NewRecount(uint32(first), uint32(min(window, n))), missed)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	v := &s.verify
	s.stats.VerifyMismatches += missed.Count
	if err == nil {
		s.stats.VerifyPasses++
	}
	left := v.waits[:0]
	for _, w := range v.waits {
		switch {
		case w.pass > pass:
			left = append(left, w)
			continue
		case missed.Count > 0:
			w.err = missed
		default:
			w.err = err
		}
		w.over = true
	}
	clear(v.waits[len(left):])
	v.waits = left
	v.wake.Broadcast()
	return missed, err
}

// verifyWindow makes one walk, and compares the buckets of counts.
func (s *Set) verifyWindow(counts *bucket.Recount, missed *MismatchError) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &count{s: s, counts: counts, missed: missed, doubts: s.table.Stats().Anomalies}
	s.verify.walk = w
	s.table.Watch(counts)
	defer func() {
		s.table.Unwatch()
		s.verify.walk = nil
	}()
	for {
		if err := s.errLocked(); err != nil {
			return err
		}
		miss := w.stepLocked()
		if w.at == btree.MaxPos {
			break
		}
		s.mu.Unlock() // for whoever waits
		err := s.verifyRest(w, miss)
		s.mu.Lock()
		if err != nil {
			return err
		}
	}
	// All keys are before the cursor now: whatever changes, both counts change, and they can be compared slice by slice.
	for from, done := uint32(0), false; !done; {
		if from, done = counts.Compare(from, w.differLocked, w.soundLocked); !done {
			s.mu.Unlock()
			err := s.verifyYield()
			s.mu.Lock()
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// verifyRest lets others go first, and gets the node that is missing, if one is. Only that costs a pause. What can be
// counted of a node is counted in the same hold of the lock in which it comes, so that the walk gets on however soon
// the node has to go again.
func (s *Set) verifyRest(w *count, miss btree.Ref) error {
	if miss.IsZero() {
		return s.verifyYield()
	}
	if err := s.readNode(miss, never, func() { w.stepLocked() }); err != nil {
		return err
	}
	return s.rest(time.Duration(miss.Sectors) * ondisk.SectorSize * time.Second / verifyRate)
}

// verifyYield lets others go first. In a simulation, where work takes no time, it takes what a hold of the lock would
// have: else nothing would ever come between two of them.
func (s *Set) verifyYield() error {
	if s.rt.Simulated() {
		return s.rt.SleepContext(s.stop, verifyHold)
	}
	s.rt.Yield()
	return s.stop.Err()
}

// A count walks over all keys in their order, and has a cursor: the sectors before it are counted. Keys are added, and the
// cursor moved behind them, in one hold of the set's lock, and what an insertion changes before the cursor goes into
// the counts of the walk too, in the critical section of the insertion. Where an extent reaches over the cursor, its
// part before it counts; so nothing depends on where one entry ends and the next begins. Nodes may be split, rewritten,
// read and let go as they like: that moves no key, and stale keys, which a rewrite drops, count nothing.
//
// Buckets are compared when the walk is at its end. A volume's dirty data is compared on the way: when the cursor leaves
// a region, or the volume, the walk has counted all of it, as of that moment.
type count struct {
	s      *Set
	counts *bucket.Recount
	missed *MismatchError
	doubts uint64        // anomalies when the walk began
	deltas bucket.Deltas // of the insertion under way, before the cursor

	at     btree.Pos // the cursor
	region uint64    // that it is in
	dirty  struct {  // sectors counted before it
		region, page, inode int64
	}
}

// stepLocked counts some extents. It returns the node that it needs to go on, if it is missing.
func (w *count) stepLocked() btree.Ref {
	next, miss := w.s.tree.Scan(w.at, btree.MaxPos, w.s.opt.verifyKeys, func(x btree.Extent) bool {
		w.addLocked(&x)
		return true
	})
	if w.at.Less(next) {
		w.passLocked(next)
	}
	return miss
}

// addLocked counts what of an extent lies behind the cursor, and moves the cursor to its end.
func (w *count) addLocked(x *btree.Extent) {
	start, end := x.Start, x.End()
	if x.Inode == w.at.Inode {
		start = max(start, w.at.Sector)
	}
	w.passLocked(btree.Pos{Inode: x.Inode, Sector: start})
	if x.HasPtr() {
		w.counts.Add(x.Ptr, uint32(end-start), x.Dirty())
		dirty := x.Dirty() && w.s.GoodLocked(x.Ptr) && int(x.Inode) < len(w.s.dirty)
		for dirty && start < end {
			part := min(end, regionEnd(w.region)) - start
			w.dirty.inode += int64(part)
			w.dirty.page += int64(part)
			w.dirty.region += int64(part)
			start += part
			w.passLocked(btree.Pos{Inode: x.Inode, Sector: start})
		}
	}
	w.passLocked(btree.Pos{Inode: x.Inode, Sector: end})
}

// followLocked makes the change of an insertion, as far as the walk has been there.
func (w *count) followLocked(c *btree.Change) {
	if !c.Stored.Pos().Less(w.at) { // what it takes the place of lies within
		return
	}
	for i := range c.Removed {
		w.changeLocked(&c.Removed[i], -1)
	}
	w.changeLocked(&c.Stored, 1)
	w.counts.Apply(&w.deltas)
	w.deltas.Reset()
}

func (w *count) changeLocked(x *btree.Extent, sign int64) {
	if !x.HasPtr() || !x.Pos().Less(w.at) {
		return
	}
	end := x.End()
	if x.Inode == w.at.Inode {
		end = min(end, w.at.Sector)
	}
	if n := uint32(end - x.Start); sign > 0 {
		w.deltas.Put(w.s.table, x.Ptr, n, x.Dirty())
	} else {
		w.deltas.Drop(w.s.table, x.Ptr, n, x.Dirty())
	}
	if x.Inode != w.at.Inode || !x.Dirty() || !w.s.GoodLocked(x.Ptr) {
		return
	}
	from := func(start uint64) int64 { return sign * int64(end-min(end, max(start, x.Start))) }
	w.dirty.inode += from(0)
	w.dirty.page += from(w.region / pageRegions * pageSectors)
	w.dirty.region += from(w.region * regionSectors)
}

// regionOf returns the region of the dirty map that a sector is in, and regionEnd where one ends.
func regionOf(sector uint64) uint64 { return min(sector/regionSectors, lastRegion) }

func regionEnd(r uint64) uint64 {
	if r == lastRegion {
		return ondisk.MaxOffset
	}
	return (r + 1) * regionSectors
}

// passLocked moves the cursor, and compares what of the dirty maps it leaves behind.
func (w *count) passLocked(to btree.Pos) {
	for w.at.Inode < to.Inode && int(w.at.Inode) < len(w.s.dirty) {
		w.passRegionsLocked(lastRegion + 1)
		m := &w.s.dirty[w.at.Inode]
		if m.total != w.dirty.inode {
			w.missed.add("slot %d has %d dirty sectors, counted %d", w.at.Inode, w.dirty.inode, m.total)
			m.total = max(m.total, w.dirty.inode)
		}
		w.at = btree.Pos{Inode: w.at.Inode + 1}
		w.region, w.dirty.inode = 0, 0
	}
	if int(to.Inode) < len(w.s.dirty) {
		if r := regionOf(to.Sector); r != w.region {
			w.passRegionsLocked(r)
		}
	}
	w.at = to
}

// passRegionsLocked compares the regions of the cursor's volume up to region end. Where a count is too low, writeback would
// find nothing there, and a detach leave it behind; too high, it only looks in vain.
func (w *count) passRegionsLocked(end uint64) {
	m := &w.s.dirty[w.at.Inode]
	for w.region < end {
		i := w.region / pageRegions
		last := (i + 1) * pageRegions
		var p *dirtyPage
		if i < uint64(len(m.pages)) {
			p = m.pages[i]
		}
		switch {
		case (p != nil && p.total != 0) || w.dirty.page != 0:
		case i < uint64(len(m.pages)):
			w.region = min(end, last)
			continue
		default:
			w.region = end
			continue
		}
		if p == nil {
			p = m.page(i)
		}
		if n := &p.regions[w.region%pageRegions]; *n != uint32(w.dirty.region) {
			w.missed.add("slot %d has %d dirty sectors in the 4 MiB from sector %d on, counted %d", w.at.Inode, w.dirty.region, w.region*regionSectors, *n)
			*n = max(*n, uint32(w.dirty.region))
		}
		w.region++
		w.dirty.region = 0
		if w.region == last {
			if p.total != w.dirty.page {
				w.missed.add("slot %d has %d dirty sectors in the 4 GiB from sector %d on, counted %d", w.at.Inode, w.dirty.page, i*pageSectors, p.total)
				p.total = max(p.total, w.dirty.page)
			}
			w.dirty.page = 0
		}
	}
}

// differLocked sees a bucket of which the walk has counted something else than the table.
func (w *count) differLocked(b, live, dirty uint32) {
	t := w.s.table
	w.missed.add("%v: the index has %d live and %d dirty sectors", t.Info(b), live, dirty)
	t.Doubt(b, live, dirty, "the index has other counts")
}

// soundLocked sees a SUSPECT bucket whose counts are those of the index. It is trusted again, unless doubts have come up
// while the walk was on: then the next one says. If it was counted too high, the counts stay so, and the bucket rests
// until the next start: rather that than to believe a low count once too often.
func (w *count) soundLocked(b, live, dirty uint32) {
	s := w.s
	if s.table.Stats().Anomalies == w.doubts && s.table.Trust(b, live, dirty, s.journal.OpenLocked()) {
		s.stats.VerifyTrusted++
	}
}
