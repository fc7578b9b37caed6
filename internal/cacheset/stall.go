package cacheset

import (
	"sync/atomic"
	"time"
)

// A Stall is what a request waits for. What is counted are waits of more than StallLeast, each moment of a request under
// one cause: whoever waits for something counts all of it as that, whatever it took in turn. A leaf that is split because
// the journal, the cache device and a bucket were waited for is a split.
//
// Only waits of requests count, and who asks says so: the methods whose names end in Request, Acknowledge, WaitSpace, and
// an Insertion with Request set. Writeback, the mover, sweeps, and fills, which come after the answer, use the others.
// What several requests of a batch wait for together counts for each of them. A device is done when its queue says so: where
// it does that late, since whom it told before waits for the lock, that is the device's.
//
// No cause is there for requests that are held back on purpose: nothing here does that. What writeback does to leave the
// devices to requests slows itself down, and what the memory for requests is limited by is the front end's.
type Stall uint8

// The causes.
const (
	StallAllocation   Stall = iota // data that must go to the cache: no bucket could be made ready, for none may be reused
	StallGens                      // the same, while generations were on their way to the disk, to make buckets ready
	StallJournalSpace              // room for keys in the journal
	StallJournalWrite              // a journal entry to be durable
	StallLock                      // the set's lock
	StallNode                      // a node of the index to be read, by oneself or another
	StallSplit                     // a leaf without room to be rewritten or split
	StallGate                      // the gate of a collection
	StallBacking                   // the backing device, to do what the request asked of it
	StallCache                     // the cache device, with data
	StallOverlap                   // another write to the same place to be over
	StallWriteback                 // a batch of writeback that has some of the same place
	StallSuperblock                // the backing device's superblock to say that there is dirty data

	StallCauses // how many there are
)

// StallLeast is the wait from which on one counts: all that is longer.
const StallLeast = 100 * time.Microsecond

var stallNames = [StallCauses]string{
	"allocation", "gens_write", "journal_space", "journal_write", "set_lock", "node_read", "split", "collection_gate",
	"backing_device", "cache_device", "overlap", "writeback", "superblock",
}

// String returns the cause's name.
func (c Stall) String() string { return stallNames[c] }

// StallTotals are the waits for one cause, or those of a batch of requests that are counted together.
type StallTotals struct {
	Count      uint64
	Total, Max time.Duration
}

// Add adds a wait, if it is one that counts.
func (t *StallTotals) Add(d time.Duration) {
	if d > StallLeast {
		t.Count++
		t.Total += d
		t.Max = max(t.Max, d)
	}
}

// stalls are counted without the lock: some are waits for it.
type stalls [StallCauses]struct {
	count      atomic.Uint64
	total, max atomic.Int64 // nanoseconds
}

// add counts a wait of one request, if it is long enough.
func (s *stalls) add(c Stall, d time.Duration) {
	if d > StallLeast {
		s.merge(c, StallTotals{1, d, d})
	}
}

func (s *stalls) merge(c Stall, t StallTotals) {
	to := &s[c]
	to.count.Add(t.Count)
	to.total.Add(int64(t.Total))
	for {
		longest := to.max.Load()
		if int64(t.Max) <= longest || to.max.CompareAndSwap(longest, int64(t.Max)) {
			return
		}
	}
}

// Stalled counts a wait of one request.
func (s *Set) Stalled(c Stall, d time.Duration) { s.stalls.add(c, d) }

// StalledEach counts a wait that n requests had together.
func (s *Set) StalledEach(c Stall, d time.Duration, n int) {
	if d > StallLeast && n > 0 {
		s.stalls.merge(c, StallTotals{uint64(n), time.Duration(n) * d, d})
	}
}

// StalledTotals counts waits that were added up before.
func (s *Set) StalledTotals(c Stall, t StallTotals) {
	if t.Count > 0 {
		s.stalls.merge(c, t)
	}
}

// Stalls returns the totals since the set was opened, by cause.
func (s *Set) Stalls() (list [StallCauses]StallTotals) {
	for c := range list {
		of := &s.stalls[c]
		list[c] = StallTotals{of.count.Load(), time.Duration(of.total.Load()), time.Duration(of.max.Load())}
	}
	return list
}

// LockTimed is Lock that says how long it took; no clock is read where the lock is free.
func (s *Set) LockTimed() (waited time.Duration) { return s.mu.LockTimed() }

// LockRequest is Lock on behalf of a request.
func (s *Set) LockRequest() {
	if d := s.LockTimed(); d > 0 {
		s.stalls.add(StallLock, d)
	}
}

func (s *Set) lockFor(request bool) {
	if request {
		s.LockRequest()
	} else {
		s.mu.Lock()
	}
}
