package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/writeback"
)

const (
	drainDepth   = 64                    // I/Os of writeback at a time on each device
	besideDepth  = 4                     // the same while requests use the set
	besideFor    = 20 * time.Millisecond // how long they count after they came
	sliceMost    = 128                   // I/Os that a batch sends together
	flights      = 4                     // batches under way: some are read or written while others are flushed
	flightLeast  = 16                    // extents of a batch at first, and where the backing device is slow
	flightMost   = 1024                  // extents of a batch
	flightMax    = 16384                 // sectors of a batch
	runMax       = 2048                  // sectors of a write of the backing device
	cleanGrace   = time.Second           // without dirty data, until the superblock says so
	cleanPause   = 30 * time.Second      // before that is tried again
	barrenPasses = 2                     // passes without progress, after which a WriteBack gives up
	failedMost   = 64                    // ranges that are told of
)

// A drainer brings a volume's dirty data to its backing device. Its policy is in package writeback; this is how.
//
//	loop        passes over the volume in key order: takes a batch of dirty extents, at the rate that there is, and
//	   |        gives it to a flight
//	flight.run  reads it from the cache, writes it in order, flushes the backing device, and marks it clean (flight.go)
//	rateLoop    computes the rate anew every some seconds
//
// What a flight has taken is registered until it is marked clean: requests that would write to the backing device there
// wait, requests that write to the cache do not, and no other flight takes it. Nobody waits for the search for dirty
// data: it holds the set's lock for some hundred extents at a time. While requests use the set, flights have few I/Os under
// way at a time.
type drainer struct {
	v       *Volume
	full    [2]below // backing device, cache device; their queues take drainDepth I/Os
	beside  [2]below // the same with besideDepth
	running rt.WaitGroup

	// Guarded by the set's lock.
	settings writeback.Settings
	control  *writeback.Controller
	limiter  writeback.Limiter
	terms    writeback.Terms
	kick     rt.Cond // for the loop
	done     rt.Cond // a flight, or a pass, is over
	cursor   uint64
	rest     time.Duration // until when the loop pauses, unless somebody waits
	flying   []*flight
	idle     []*flight
	most     uint64        // sectors of a write that the backing device takes
	smooth   int           // batches without an error since most has changed
	batch    int           // extents that it takes in a fraction of a second
	seen     uint64        // requests to the set
	stepBack time.Duration // until when the devices belong to requests first
	callers  int           // of WriteBack
	resting  bool          // nothing is dirty
	cleanErr error         // why the superblock cannot say so
	pass     pass
	passes   uint64 // that are over
	barren   int    // of these, the last ones that did not get on, though there was something
	last     pass   // of these
	stats    WritebackStats
}

// A pass is one way through the volume.
type pass struct {
	taken, cleaned uint64 // sectors
	skipped        uint64 // sectors, since the backing device was just being written there
	failed         []failure
}

// A failure is a range that could not be written back, and why.
type failure struct {
	span
	err error
}

// WritebackStatus says how writeback stands.
type WritebackStatus struct {
	WritebackStats
	Terms     writeback.Terms
	NextIO    time.Duration // until the next batch
	AtMax     bool          // the set is idle: as fast as it goes
	Draining  bool          // somebody waits for all to be written back
	Detaching bool
	Attached  bool
	Running   bool
	Errors    uint64 // of reads and writes

	StripeSectors uint64 // of the backing device, 0: none
	PartialStripe bool   // partial stripes are expensive
}

// WritebackStats are totals since the volume was opened.
type WritebackStats struct {
	KeysDone, KeysFailed uint64 // marked clean; changed meanwhile
	Sectors              uint64 // written to the backing device
	ReadErrors           uint64
	WriteErrors          uint64
	Flights              uint64
}

// startDrainer begins writeback.
func (v *Volume) startDrainer() error {
	w := &drainer{v: v, settings: writeback.Defaults(), control: writeback.NewController()}
	w.running.Init(v.rt)
	v.set.BindCond(&w.kick)
	v.set.BindCond(&w.done)
	w.most, w.batch = w.largest(), flightLeast
	v.drainer = w
	for _, l := range []struct {
		to    *[2]below
		depth int
	}{{&w.full, drainDepth}, {&w.beside, besideDepth}} {
		*l.to = [2]below{v.back, v.cache}
		for i := range l.to {
			l.to[i].queue = nil
		}
		for i := range l.to {
			q, err := l.to[i].dev.NewQueue(l.depth, groupDone)
			if err != nil {
				return err
			}
			l.to[i].queue = q
		}
	}
	for range flights {
		w.idle = append(w.idle, newFlight(w))
	}
	v.set.Lock()
	v.set.BackLocked(v.inode, uint64(v.back.info.Size)/ondisk.SectorSize)
	v.set.Unlock()
	v.running.Go("writeback", w.loop)
	v.running.Go("writeback rate", w.rateLoop)
	return nil
}

// release ends what startDrainer made, when nothing runs any more.
func (w *drainer) release() {
	w.v.set.Lock()
	if !w.v.left {
		w.v.set.UnbackLocked(w.v.inode)
	}
	w.v.set.Unlock()
	for _, to := range []*[2]below{&w.full, &w.beside} {
		for i := range to {
			if q := to[i].queue; q != nil {
				_ = q.Close()
			}
		}
	}
}

// queues returns where I/Os of writeback go now: while requests use the set, there are few of them at a time, so that
// requests find the devices free, and the drain goes on.
func (w *drainer) queues() (to [2]*below) {
	s := w.v.set
	s.Lock()
	defer s.Unlock()
	now := w.v.rt.Now()
	if n := s.RequestsLocked(); n != w.seen {
		w.seen, w.stepBack = n, now+besideFor
	}
	if now < w.stepBack {
		return [2]*below{&w.beside[0], &w.beside[1]}
	}
	return [2]*below{&w.full[0], &w.full[1]}
}

// wake lets the loop look again.
func (v *Volume) wake() {
	if w := v.drainer; w != nil {
		v.set.Lock()
		w.kick.Broadcast()
		w.done.Broadcast()
		v.set.Unlock()
	}
}

// loop is the goroutine that writes back.
func (w *drainer) loop() {
	v := w.v
	defer w.running.Wait()
	v.set.Lock()
	defer v.set.Unlock()
	for v.stop.Err() == nil && v.set.Err() == nil {
		is, _ := v.Detached()
		switch {
		case is:
			w.kick.Wait()
		case v.dirtyLocked() == 0:
			w.restLocked()
		case !w.activeLocked():
			w.kick.Wait()
		case len(w.idle) == 0:
			w.done.Wait()
		case w.callers == 0 && v.rt.Now() < w.rest:
			w.waitLocked(w.rest - v.rt.Now())
		default:
			w.stepLocked()
		}
	}
	w.done.Broadcast()
}

// kickLocked lets the loop look at new dirty data, if it rests for want of it.
func (w *drainer) kickLocked() {
	if w.resting {
		w.kick.Signal()
	}
}

// activeLocked reports whether dirty data is to be written back now.
func (w *drainer) activeLocked() bool { return w.settings.Running || w.callers > 0 }

// restLocked waits while nothing is dirty. Soon the superblock says so.
func (w *drainer) restLocked() {
	v := w.v
	w.done.Broadcast() // also where it was not written back, but discarded
	w.resting = true
	defer func() { w.resting = false }()
	switch {
	case v.dirty.writes > 0 || v.dirty.clean:
		w.kick.Wait()
		return
	case w.callers == 0 && w.waitLocked(cleanGrace):
		return // there is something new, perhaps
	}
	v.set.Unlock()
	_, err := v.makeClean()
	if err != nil && v.stop.Err() == nil {
		v.log.Warn("the volume has no dirty data, but its superblock cannot say so", "volume", v.name, "err", err)
	}
	v.set.Lock()
	w.cleanErr = err
	w.done.Broadcast()
	if err != nil {
		w.waitLocked(cleanPause)
	}
}

// waitLocked waits for so long, or until somebody wakes the loop, which it reports.
func (w *drainer) waitLocked(d time.Duration) (woken bool) {
	if d <= 0 {
		return false
	}
	ctx, cancel := w.v.rt.WithTimeout(w.v.stop, d)
	defer cancel()
	return w.kick.WaitContext(ctx) == nil
}

// stepLocked takes one batch and sends it off, and waits as the rate wants it.
func (w *drainer) stepLocked() {
	v := w.v
	if v.set.Noted() {
		w.control.LeaveMax()
	}
	rate := w.control.Rate()
	if w.callers > 0 {
		rate = writeback.MaxRate
	}
	if rate < writeback.MaxRate {
		if d := w.limiter.Delay(v.rt.Now()); d > 0 {
			w.waitLocked(d)
			return
		}
	}
	f := w.idle[len(w.idle)-1]
	w.idle = w.idle[:len(w.idle)-1]
	f.list = f.list[:0]
	w.flying = append(w.flying, f)
	// A second's worth at a time, so that there is one flush a second at most.
	over := w.takeLocked(f, uint64(min(max(rate, int64(v.block)), int64(w.batch)*flightMax/flightMost)))
	f.seq = v.set.DirtyEntryLocked(v.inode)
	w.pass.taken += f.sectors
	if f.sectors > 0 {
		w.limiter.Done(v.rt.Now(), int64(f.sectors), rate)
		w.stats.Flights++
		w.running.Go("writeback batch", f.run)
	} else {
		w.landLocked(f)
	}
	if over {
		w.passOverLocked()
	}
}

// takeLocked fills a batch with dirty extents of up to so many sectors in all, from the cursor on, which it moves; over
// says that the volume's end was reached. It lets the lock go now and then, and to read nodes; what one says that cannot
// be read is not known, and is left out.
func (w *drainer) takeLocked(f *flight, budget uint64) (over bool) {
	v := w.v
	const end = ondisk.MaxOffset // what lies behind the volume's end, none of ours, is told of
	for at := max(w.cursor, v.first); ; {
		var cut uint64 // where a large extent was left
		next, miss := v.set.ScanDirtyLocked(v.inode, at, end, func(start, end uint64, p ondisk.Ptr) bool {
			for start < end {
				if f.fullFor(budget) {
					cut = start
					return false
				}
				s := span{start, w.cut(start, end, budget-min(f.sectors, budget))}
				if part, ok := v.ranges.belowLocked(s); ok && part.start == start {
					s.end = part.end
					w.pass.skipped += s.end - start
				} else {
					if ok {
						s.end = part.start
					}
					if v.set.HoldLocked(p) {
						f.list = append(f.list, extent{s.start, s.end, p})
						f.sectors += s.end - start
					}
				}
				start, p = s.end, p.Advance(s.end-start)
			}
			return !f.fullFor(budget)
		})
		if at = next; cut > 0 {
			at = cut
		}
		w.cursor = at
		switch {
		case at >= end:
			w.cursor = 0
			return true
		case f.fullFor(budget) || v.stop.Err() != nil:
			return false
		}
		v.set.Unlock()
		var err error
		if miss.IsZero() {
			v.rt.Yield()
		} else {
			err = v.set.ReadNode(miss)
		}
		v.set.Lock()
		if err != nil {
			v.log.Warn("part of the index cannot be searched for dirty data", "volume", v.name, "err", err)
			behind := uint64(end)
			if high := miss.High; high.Inode == v.inode {
				behind = min(behind, high.Sector)
			}
			w.noteLocked(span{at, behind}, err)
			at = behind
		}
	}
}

// cut returns where to end the part of a dirty extent that begins at start: about room sectors on, and no more than the
// backing device takes, but at the end of one of its blocks where the extent has that.
func (w *drainer) cut(start, end, room uint64) uint64 {
	at := w.v.down(start + min(room, w.most))
	if at <= start {
		at = w.v.up(start + 1)
	}
	return min(at, end)
}

// flyingLocked reports whether a batch that is under way overlaps s.
func (w *drainer) flyingLocked(s span) bool {
	for _, f := range w.flying {
		i, _ := slices.BinarySearchFunc(f.list, s.start, func(x extent, at uint64) int {
			if x.end <= at {
				return -1
			}
			return 1
		})
		if i < len(f.list) && f.list[i].start < s.end {
			return true
		}
	}
	return false
}

// awaitLocked waits until no batch under way overlaps s: what it has would come down over what the caller writes to the
// backing device. s is registered as being written, so that no batch begins there. The caller is a request.
func (v *Volume) awaitLocked(s span) (waited bool) {
	w := v.drainer
	if w == nil || !w.flyingLocked(s) {
		return false
	}
	begin := v.rt.Now()
	for w.flyingLocked(s) {
		w.done.Wait()
	}
	v.stalled(cacheset.StallWriteback, begin)
	return true
}

// largest returns how many sectors a write of the backing device may have.
func (w *drainer) largest() uint64 {
	most := uint64(runMax)
	if n := uint64(w.v.back.info.MaxTransfer) / ondisk.SectorSize; n > 0 {
		most = max(min(most, n), w.v.unit())
	}
	return most
}

// takenLocked notes that the device took all writes of a batch: it may have refused larger ones for another reason.
func (w *drainer) takenLocked() {
	if w.smooth++; w.smooth >= smoothEnough {
		w.smooth, w.most = 0, min(2*w.most, w.largest())
	}
}

// smoothEnough is after how many batches larger writes are tried again.
const smoothEnough = 64

// measuredLocked notes how long a full batch has taken. Requests may have to wait for one: on a slow device it is small.
func (w *drainer) measuredLocked(took time.Duration) {
	switch {
	case took < flightTime/4:
		w.batch = min(2*w.batch, flightMost)
	case took > flightTime:
		w.batch = max(w.batch/2, flightLeast)
	}
}

// flightTime is what a batch should take at most.
const flightTime = 400 * time.Millisecond

// landLocked ends a flight.
func (w *drainer) landLocked(f *flight) {
	i := slices.Index(w.flying, f)
	w.flying = slices.Delete(w.flying, i, i+1)
	for i := range f.list {
		w.v.set.LetGoLocked(f.list[i].ptr)
	}
	f.list, f.sectors = f.list[:0], 0
	w.idle = append(w.idle, f)
	w.done.Broadcast()
}

// noteLocked notes that a range cannot be written back.
func (w *drainer) noteLocked(s span, err error) {
	list := &w.pass.failed
	if n := len(*list); n > 0 && (*list)[n-1].end == s.start {
		(*list)[n-1].end = s.end
		return
	}
	if len(*list) < failedMost {
		*list = append(*list, failure{s, err})
	}
}

// passOverLocked ends a pass when its flights have landed. The next one begins after a pause, unless there is much to
// do still and it gets done.
func (w *drainer) passOverLocked() {
	for len(w.flying) > 0 {
		w.done.Wait()
	}
	v := w.v
	now, dirty := v.rt.Now(), v.dirtyLocked()
	p := w.pass
	p.failed = inOrder(p.failed)
	if w.barren++; len(p.failed) == 0 || p.cleaned+p.skipped > 0 && !again(w.last.failed, p.failed) {
		w.barren = 0
	}
	w.last, w.pass = p, pass{}
	w.passes++
	w.limiter.Reset(now)
	w.done.Broadcast()
	switch {
	case w.callers > 0:
		if p.cleaned == 0 && dirty > 0 {
			w.waitLocked(retryPause)
		}
	case p.cleaned == 0 || dirty <= max(w.terms.Target, flightMax):
		w.rest = now + max(w.settings.Delay, retryPause)
	}
}

// inOrder sorts failures, and joins those that are neighbours.
func inOrder(list []failure) []failure {
	slices.SortFunc(list, func(a, b failure) int { return cmp.Compare(a.start, b.start) })
	joined := list[:0]
	for _, f := range list {
		if n := len(joined); n > 0 && f.start <= joined[n-1].end {
			joined[n-1].end = max(joined[n-1].end, f.end)
			continue
		}
		joined = append(joined, f)
	}
	return joined
}

// again reports whether some of what has failed did so before. Both are in order.
func again(before, now []failure) bool {
	for len(before) > 0 && len(now) > 0 {
		switch {
		case before[0].overlaps(now[0].span):
			return true
		case before[0].end <= now[0].start:
			before = before[1:]
		default:
			now = now[1:]
		}
	}
	return false
}

// retryPause is how long what could not be written back rests, when somebody waits for it.
const retryPause = 200 * time.Millisecond

// A WriteBackError says what could not be written back. It matches its cause.
type WriteBackError struct {
	Ranges []Range // in bytes of the volume; the first ones, if there are many
	Dirty  int64   // bytes that are dirty still
	Err    error
}

// A Range is Len bytes at Off.
type Range struct{ Off, Len int64 }

func (e *WriteBackError) Error() string {
	s := fmt.Sprintf("%d bytes are still dirty", e.Dirty)
	for i, r := range e.Ranges {
		if i == 4 {
			s += fmt.Sprintf(", and %d more ranges", len(e.Ranges)-i)
			break
		}
		s += fmt.Sprintf("; offset %d, length %d", r.Off, r.Len)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *WriteBackError) Unwrap() error { return e.Err }

// WriteBack returns when all that was dirty when it was called is on the backing device; if nothing became dirty
// meanwhile, the superblock says that the volume is clean. It returns a *WriteBackError if ranges cannot be written back,
// after trying again, or when ctx ends.
func (v *Volume) WriteBack(ctx context.Context) error {
	w := v.drainer
	if w == nil {
		return ErrNoBacking
	}
	return w.drain(ctx)
}

func (w *drainer) drain(ctx context.Context) error {
	v := w.v
	v.set.Lock()
	defer v.set.Unlock()
	w.callers++
	defer func() { w.callers-- }()
	w.barren, w.cleanErr = 0, nil
	w.kick.Broadcast()
	// Of two passes that end, the second has begun after the call.
	for begin := w.passes; ; {
		dirty := v.dirtyLocked() > 0
		detached, detaching := v.Detached() // then the superblock says NONE, also if another change of it has failed
		if !dirty && (detached || v.dirty.clean || v.dirty.writes > 0) {
			return nil
		}
		err := v.set.Err()
		switch {
		case err != nil:
		case v.stop.Err() != nil:
			err = blockdev.ErrClosed
		case !dirty && w.cleanErr != nil:
			return w.cleanErr
		case dirty && w.passes >= begin+2 && w.barren >= barrenPasses:
			err = errStuck
			if len(w.last.failed) > 0 {
				err = w.last.failed[0].err
			}
		case dirty && w.passes >= begin+2 && len(w.last.failed) == 0 && w.last.skipped == 0 && !detaching:
			return nil // what is dirty now came later
		default:
			err = w.done.WaitContext(ctx)
		}
		if err != nil {
			return w.errorLocked(err)
		}
	}
}

var errStuck = errors.New("it cannot be written back")

func (w *drainer) errorLocked(err error) error {
	v := w.v
	e := &WriteBackError{Dirty: v.dirtyLocked() * ondisk.SectorSize, Err: err}
	for _, f := range w.last.failed {
		e.Ranges = append(e.Ranges, Range{int64(f.start-v.first) * ondisk.SectorSize, int64(f.end-f.start) * ondisk.SectorSize})
	}
	return e
}

// rateLoop is the goroutine that sets the rate.
func (w *drainer) rateLoop() {
	v := w.v
	for {
		v.set.Lock()
		every := w.settings.UpdateEvery
		v.set.Unlock()
		if v.rt.SleepContext(v.stop, every) != nil {
			return
		}
		v.set.Lock()
		w.updateLocked()
		v.set.Unlock()
	}
}

// updateLocked computes the rate anew.
func (w *drainer) updateLocked() {
	v := w.v
	volumes, all := v.set.BackedLocked()
	v.set.ArmGCLocked()
	idle := v.set.IdleLocked() >= writeback.IdleUpdates(volumes) && v.set.IdleMaxRate() && !v.set.CollectingLocked()
	switch {
	case volumes == 0: // detached
		return
	case idle:
		w.control.EnterMax()
	default:
		w.control.LeaveMax()
	}
	if v.dirtyLocked() == 0 {
		return
	}
	g := v.set.Geometry()
	w.terms = w.control.Update(&w.settings, writeback.Input{
		CacheSectors: int64(g.NBuckets)*int64(g.BucketSectors) - v.set.FlashDirtyLocked(), Dirty: v.dirtyLocked(),
		Backing: uint64(v.back.info.Size) / ondisk.SectorSize, AllBacking: all, InUse: v.set.InUseLocked(),
		UsedBuckets: int64(v.set.UsedLocked()), BucketSectors: int64(g.BucketSectors), KeptUp: w.callers == 0 && w.limiter.KeptUp(v.rt.Now()),
	})
	w.kick.Broadcast()
}

// WritebackSettings returns the settings.
func (v *Volume) WritebackSettings() writeback.Settings {
	if v.drainer == nil {
		return writeback.Settings{}
	}
	v.set.Lock()
	defer v.set.Unlock()
	return v.drainer.settings
}

// ChangeWriteback changes the settings: change gets a copy, which it may refuse.
func (v *Volume) ChangeWriteback(change func(s *writeback.Settings) error) error {
	w := v.drainer
	if w == nil {
		return ErrNoBacking
	}
	v.set.Lock()
	defer v.set.Unlock()
	s := w.settings
	if err := change(&s); err != nil {
		return err
	}
	w.settings, w.rest = s, 0
	if v.dirtyLocked() > 0 {
		w.updateLocked()
	}
	w.kick.Broadcast()
	return nil
}

// SetWritebackRate sets the rate, in sectors per second, until the next update.
func (v *Volume) SetWritebackRate(sectors int64) error {
	w := v.drainer
	switch {
	case w == nil:
		return ErrNoBacking
	case sectors < 1 || sectors > writeback.MaxRate:
		return fmt.Errorf("a rate of %d sectors per second", sectors)
	}
	v.set.Lock()
	defer v.set.Unlock()
	w.control.SetRate(sectors)
	w.kick.Broadcast()
	return nil
}

// WritebackStatus tells how writeback stands.
func (v *Volume) WritebackStatus() WritebackStatus {
	w := v.drainer
	if w == nil {
		return WritebackStatus{}
	}
	is, becoming := v.Detached()
	v.set.Lock()
	defer v.set.Unlock()
	s := WritebackStatus{
		WritebackStats: w.stats, Terms: w.terms, AtMax: w.control.AtMax(), Draining: w.callers > 0, Detaching: becoming, Attached: !is,
		Running: w.settings.Running, Errors: w.stats.ReadErrors + w.stats.WriteErrors,
	}
	s.Terms.Dirty = v.dirtyLocked()
	s.Terms.Rate = w.control.Rate()
	if s.Terms.Rate < writeback.MaxRate {
		s.NextIO = max(0, w.limiter.Delay(v.rt.Now()))
	}
	if is { // what was worked out before is of a cache that the volume has no more
		s.Terms, s.NextIO = writeback.Terms{}, 0
	}
	s.StripeSectors, s.PartialStripe = stripeSectors(&v.back.info), v.back.info.PartialStripe
	return s
}

// stripeLeast is the least size of a stripe, in sectors: several small ones count as one.
const stripeLeast = 4 << 20 / ondisk.SectorSize

// stripeSectors returns the unit in which dirty data counts as being together, 0: none. Source: B 5.1.
func stripeSectors(info *blockdev.Info) uint64 {
	n := uint64(info.OptimalIO) / ondisk.SectorSize
	if n == 0 || n >= stripeLeast {
		return n
	}
	return (stripeLeast + n - 1) / n * n
}

// stripeDirtyLocked reports whether part of the stripes that s touches is dirty, on a device where it is better then to
// write all of it from the cache, later.
func (v *Volume) stripeDirtyLocked(s span) bool {
	n := stripeSectors(&v.back.info)
	if !v.back.info.PartialStripe || n == 0 {
		return false
	}
	return v.set.AnyDirtyLocked(v.inode, s.start/n*n, (s.end+n-1)/n*n)
}
