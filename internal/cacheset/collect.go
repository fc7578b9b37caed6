package cacheset

import (
	"time"

	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/pace"
	"github.com/ubcache/ubcache/internal/rt"
)

// The policies of mark and sweep, as the kernel has had them, on this engine: to measure them beside the default, which
// does not collect. While one of them is in force
//
//	victims        are chosen by marks (bucket.Marks), by a look at all buckets with the allocator held up (B7)
//	a collection   holds it up at its beginning and its end (B9), walks the whole index in slices, each behind a shut gate
//	               (B3), and, with some policies, keeps it from picking until it is over (B1, B2)
//	a leaf         without room for another append waits to be rewritten, and so do its writers, as for a split (B2)
//	sweeps         of generations come only where the format's limit is near; coalescing is the collection's
//
// What the exact counts say is kept up beside, and nothing is picked against it. Of the kernel's other waits (B 4.6) there
// is none here. Source: B 3.1 to 3.5.
type collector struct {
	name   string     // attribute gc_policy
	pacer  pace.Pacer // nil: exact
	tuning GCTuning
	wake   rt.Cond // a collection is due, or the policy has changed
	over   rt.Cond // one has ended

	held bool    // the buckets are: nobody allocates, or reads nodes
	free rt.Cond // they are not any more

	asked   bool // for a sweep, with exact
	after   bool // see SetGCAfterWriteback
	armed   bool
	under   bool // a collection is under way
	begun   time.Duration
	slept   time.Duration
	seen    int    // nodes
	serial  uint64 // collections that have ended, well or not
	unread  bool   // the last one met a node that cannot be read
	run     []counted
	written []*btree.Node
	err     error // of the read of a node that the slice met last

	stats GCStats
}

// A Reclaim says whether what was reclaimable when a collection began may be allocated meanwhile.
type Reclaim uint8

// Values of Reclaim.
const (
	ReclaimPolicy Reclaim = iota // as the policy has it
	ReclaimOn
	ReclaimOff
)

// walked is what a walk has found.
type walked struct {
	Keys, Words uint64 // in leaves: good keys; words of all keys, in all nodes
	Data        uint64 // sectors of these keys
	Room        uint64 // words that these nodes have room for
}

// Exact is the policy that does not collect.
const Exact = "exact"

// GCStats are totals since the start. Averages are moving ones, of eight. Source: B 7.4.
type GCStats struct {
	Policy      string
	Running     bool
	Collections uint64
	Last        time.Duration // how long the last one took
	Average     time.Duration
	Longest     time.Duration
	Total       time.Duration
	Ended       time.Duration // when the last one did, by the set's clock
	Interval    time.Duration // from the end of one to that of the next; 0: there were no two
	Since       time.Duration // the last one
	Nodes       uint64        // that the last one saw; path nodes once for each slice
	Found       walked        // in these
	walked      walked        // by the one under way
	Holds       uint64        // of the gate
	LongestHold time.Duration
	TotalHold   time.Duration
	Looked      uint64 // at buckets, to choose victims
	Differences uint64 // see bucket.MarkStats
}

const (
	collectPause = 10 * time.Millisecond // between two collections for want of buckets

	// What work takes in a simulation, where it takes none by itself: the kernel's look at a bucket (B 2.5: 58 ms for 1.5
	// million), and ours at an extent.
	lookTime = 38 * time.Nanosecond
	markTime = 10 * time.Nanosecond
)

// charge lets others go first, after so much work. No lock is held.
func (s *Set) charge(work time.Duration) {
	if s.rt.Simulated() {
		s.rt.Sleep(work)
		return
	}
	s.rt.Yield()
}

// GCPolicy returns the name of the policy.
func (s *Set) GCPolicy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gc.name
}

// SetGCPolicy changes the policy: Exact, or one of pace.Names. A collection under way goes on by the new one, and is given up
// if that is exact. It returns when the new one is in force.
func (s *Set) SetGCPolicy(name string) error {
	s.gcChange.Lock()
	defer s.gcChange.Unlock()
	p := pace.New(name)
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.gc
	if err := s.errLocked(); err != nil {
		return err
	}
	if p == nil {
		c.pacer, c.name = nil, Exact
		c.wake.Broadcast()
		for c.under {
			c.over.Wait() // also where the set has failed: then the collection ends by itself
		}
		s.table.DropMarks()
		if s.marks != nil {
			m := s.marks.Stats()
			c.stats.Looked += m.Looked
			c.stats.Differences += m.Differences
			s.marks = nil
		}
		s.tree.SetTight(false)
		s.refill.Signal()
		s.ready.Broadcast()
		return nil
	}
	if s.marks == nil {
		s.mu.Unlock()
		m := s.table.NewMarks()
		s.mu.Lock()
		if err := s.errLocked(); err != nil {
			return err // Close has dropped marks for good
		}
		s.table.UseMarks(m)
		for m.Seed() {
			s.mu.Unlock()
			s.rt.Yield()
			s.mu.Lock()
		}
		s.marks = m
		s.tree.SetTight(true)
	}
	c.pacer, c.name = p, name
	s.setReclaimLocked()
	c.wake.Broadcast()
	s.refill.Signal()
	return nil
}

func (s *Set) setReclaimLocked() {
	if c := &s.gc; s.marks != nil && c.pacer != nil {
		s.marks.SetAllocates(c.tuning.Reclaim == ReclaimOn || c.tuning.Reclaim == ReclaimPolicy && c.pacer.Allocates())
	}
}

// A GCTuning changes what the policies of mark and sweep do. The zero value is as they have it.
type GCTuning struct {
	MinNodes int           // seen in a slice
	Sleep    time.Duration // between two
	Reclaim  Reclaim
	Waiters  bool // who waits for a bucket for a node counts as one who waits, too
}

// GCTuning returns what was set.
func (s *Set) GCTuning() GCTuning {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gc.tuning
}

// TuneGC changes it.
func (s *Set) TuneGC(change func(t *GCTuning)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.gc.tuning)
	s.setReclaimLocked()
}

// TriggerGC asks for a collection. With exact it is a sweep of the index with all that it finds to do, and moving.
func (s *Set) TriggerGC() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.triggerGCLocked()
}

func (s *Set) triggerGCLocked() {
	if s.marks != nil {
		s.marks.Ask()
	} else {
		s.gc.asked = true
		s.lagging.Signal()
	}
	s.gc.wake.Broadcast()
	s.move.Signal()
}

// SetGCAfterWriteback says whether there is a collection when a volume's data has become clean after half of the cache, or
// more, was in use. GCAfterWriteback tells, and whether it has come so far. Source: B 3.1.
func (s *Set) SetGCAfterWriteback(yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gc.after, s.gc.armed = yes, false
}

// GCAfterWriteback returns what was set, and whether a volume that becomes clean would have a collection begin.
func (s *Set) GCAfterWriteback() (yes, armed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gc.after, s.gc.armed
}

// armedFrom is how many percent of the buckets are in use at least.
const armedFrom = 50

// ArmGCLocked is told, now and then, while data is written back.
func (s *Set) ArmGCLocked() {
	if s.gc.after && s.table.InUse() >= armedFrom {
		s.gc.armed = true
	}
}

// CleanLocked is told when a volume has become clean.
func (s *Set) CleanLocked() {
	if s.gc.armed {
		s.gc.armed = false
		s.triggerGCLocked()
	}
}

// FullLocked is told when a request goes round the cache since so much is in use; clean says that its volume has no dirty
// data. The kernel has a collection find out what is in use then; the exact counts know it. Source: B 1.2 rule 2.
func (s *Set) FullLocked(clean bool) {
	if s.marks != nil && clean {
		s.wantCollectionLocked()
	}
}

// wantCollectionLocked has a collection begin soon, if none is under way.
func (s *Set) wantCollectionLocked() {
	if !s.gc.under && !s.marks.Due() {
		s.marks.Ask()
		s.gc.wake.Broadcast()
	}
}

// CollectingLocked reports whether a collection is under way.
func (s *Set) CollectingLocked() bool { return s.gc.under }

// Arrived and Answered count requests of volumes: a collection goes by how many are alive.
func (s *Set) Arrived(n int) { s.inflight.Add(int64(n)) }

// Answered is the end of Arrived.
func (s *Set) Answered(n int) { s.inflight.Add(-int64(n)) }

// collectLoop is the goroutine that collects.
func (s *Set) collectLoop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.gc
	for s.stop.Err() == nil && s.Err() == nil {
		if s.closed || !s.serving || c.pacer == nil || s.marks == nil || !s.marks.Due() {
			c.wake.Wait()
			continue
		}
		s.collectLocked()
		if s.marks != nil && s.marks.Due() {
			s.mu.Unlock()
			_ = s.rest(collectPause)
			s.mu.Lock()
		}
	}
}

// collectLocked makes a collection. It lets go of the lock.
func (s *Set) collectLocked() {
	c := &s.gc
	m := s.marks
	c.under, c.begun, c.slept, c.seen = true, s.rt.Now(), 0, 0
	c.stats.walked = walked{}
	s.log.Debug("a collection begins", "set", s.UUID().String(), "policy", c.name)
	s.holdBucketsLocked(inSlices(m.Begin))
	whole, err := s.collectNodesLocked()
	switch {
	case whole:
		s.holdBucketsLocked(inSlices(m.Finish))
		if c.pacer != nil {
			c.pacer.Finished()
		}
		s.collectedLocked()
		c.unread = false
	case err != nil:
		s.holdBucketsLocked(inSlices(m.GiveUp))
		if !c.unread {
			s.log.Warn("a collection was given up", "set", s.UUID().String(), "policy", c.name, "err", err)
		}
		c.unread = true
	default:
		m.Abort()
	}
	c.under = false
	c.serial++
	c.over.Broadcast()
	s.ready.Broadcast() // for those who wait for buckets that there are not
	s.refill.Signal()
	s.move.Signal()
}

// collectedLocked counts a collection that has come to its end.
func (s *Set) collectedLocked() {
	c, now := &s.gc, s.rt.Now()
	st := &c.stats
	took := now - c.begun
	average := func(d *time.Duration, sample time.Duration) {
		if *d == 0 {
			*d = sample
		}
		*d = (7**d + sample) / 8
	}
	average(&st.Average, took)
	if st.Collections > 0 {
		average(&st.Interval, now-st.Ended)
	}
	st.Collections++
	st.Last, st.Longest, st.Total, st.Ended = took, max(st.Longest, took), st.Total+took, now
	st.Nodes, st.Found = uint64(c.seen), st.walked
	s.log.Debug("a collection is over", "set", s.UUID().String(), "policy", c.name, "took", took, "nodes", c.seen)
}

// GC returns what collections do and have done.
func (s *Set) GC() GCStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.gc.stats
	st.Policy, st.Running = s.gc.name, s.gc.under
	if st.Collections > 0 {
		st.Since = s.rt.Now() - st.Ended
	}
	if s.marks != nil {
		m := s.marks.Stats()
		st.Looked += m.Looked
		st.Differences += m.Differences
	}
	return st
}

// Sets returns counts of the sets of the nodes in memory.
func (s *Set) Sets() (st btree.SetStats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for from := s.tree.AddSets(&st, 0); from > 0; from = s.tree.AddSets(&st, from) {
		s.mu.Unlock() // for whoever waits
		s.rt.Yield()
		s.mu.Lock()
	}
	return st
}

// holdBucketsLocked calls step until it is through, which says how many buckets it has looked at. Meanwhile nobody allocates,
// or reads a node. It lets go of the set's lock between two steps.
func (s *Set) holdBucketsLocked(step func() (looked uint64, more bool)) {
	c := &s.gc
	s.awaitBucketsLocked()
	c.held = true
	for more := true; more; {
		var looked uint64
		looked, more = step()
		s.mu.Unlock()
		s.charge(time.Duration(looked) * lookTime)
		s.mu.Lock()
	}
	c.held = false
	c.free.Broadcast()
}

// inSlices makes a step of holdBucketsLocked of what looks at bucket.MarkSlice buckets in a call.
func inSlices(call func() (more bool)) func() (looked uint64, more bool) {
	return func() (uint64, bool) { return bucket.MarkSlice, call() }
}

// awaitBucketsLocked waits while nobody may allocate.
func (s *Set) awaitBucketsLocked() {
	for s.gc.held {
		s.gc.free.Wait()
	}
}

// AwaitBucketsLocked waits while a policy of mark and sweep looks at all buckets, on behalf of a request or not. It lets go
// of the lock meanwhile.
func (s *Set) AwaitBucketsLocked(request bool) {
	if !s.gc.held {
		return
	}
	begin := s.rt.Now()
	s.awaitBucketsLocked()
	if request {
		s.stalls.add(StallAllocation, s.rt.Now()-begin)
	}
}

// stateLocked returns what the policy goes by.
func (s *Set) stateLocked() pace.State {
	c := &s.gc
	st := pace.State{
		Nodes: int(c.stats.Nodes), Seen: c.seen, Inflight: int(s.inflight.Load()), Waiters: s.needSpace,
		Interval: c.stats.Interval, Elapsed: s.rt.Now() - c.begun, Slept: c.slept,
	}
	if st.Nodes == 0 {
		st.Nodes = s.nodesLocked()
	}
	if c.tuning.Waiters {
		st.Waiters += s.needMeta
	}
	return st
}

// yieldLocked reports whether the collection is to let go of the index, after so many nodes in one hold.
func (s *Set) yieldLocked(nodes int) bool {
	c := &s.gc
	if c.pacer == nil {
		return true
	}
	st := s.stateLocked()
	slice := c.tuning.MinNodes
	if slice == 0 {
		slice = c.pacer.Slice(st)
	}
	return nodes >= slice && c.pacer.Yield(st)
}

// sleepLocked is the pause between two holds.
func (s *Set) sleepLocked() {
	c := &s.gc
	if c.pacer == nil {
		return
	}
	d := c.tuning.Sleep
	if d == 0 {
		d = c.pacer.Sleep(s.stateLocked())
	}
	from := s.rt.Now()
	ctx, cancel := s.rt.WithTimeout(s.stop, d)
	defer cancel()
	for c.pacer != nil && !s.closed && ctx.Err() == nil {
		_ = c.wake.WaitContext(ctx)
	}
	c.slept += s.rt.Now() - from
}
