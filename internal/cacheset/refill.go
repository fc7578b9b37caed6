package cacheset

import (
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

const (
	prioWrites = 4  // prio sets written at a time
	prioHeader = 40 // bytes of a prio set before its entries
)

// refillLoop is the goroutine that makes buckets ready ahead of need.
func (s *Set) refillLoop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.stop.Err() == nil && s.Err() == nil {
		s.noticeLocked()
		if !s.table.NeedBatch() && !(s.needMeta > 0 && s.table.Wanted() > 0 && s.table.Pickable() > 0) {
			s.refill.Wait()
			continue
		}
		s.mu.Unlock()
		err := s.batch()
		if err != nil && s.stop.Err() == nil {
			s.fail(err)
		}
		s.mu.Lock()
		s.ready.Broadcast()
	}
}

// batch makes one batch of buckets ready. One at a time is under way.
//
// Order: generations are raised in memory; all prio sets are written to the buckets that the last durable journal
// entry does not name; an entry that names them is written, behind a flush; then the buckets may be written to (V1,
// V4). The entry is younger than whatever emptied them.
func (s *Set) batch() error {
	s.mu.Lock()
	if !s.table.BeginBatch() {
		s.mu.Unlock()
		return nil
	}
	if s.table.Looking() {
		s.holdBucketsLocked(func() (uint64, bool) {
			before := s.table.Examined()
			more := s.table.FillBatch(s.journal.OpenLocked())
			return s.table.Examined() - before, more
		})
		if s.marks != nil && s.marks.Starved() {
			s.gc.wake.Broadcast()
		}
		if !s.closed && s.table.DropEmptyBatch() {
			s.mu.Unlock()
			return nil
		}
	} else {
		for s.table.FillBatch(s.journal.OpenLocked()) {
			s.mu.Unlock()
			s.rt.Yield()
			s.mu.Lock()
		}
	}
	s.prioNo++
	no := s.prioNo
	s.batching = true
	if s.needSpace > 0 {
		s.ready.Broadcast() // from here on they wait for something else: see WaitSpace
	}
	s.mu.Unlock()

	var err error
	for try := range writeTries {
		if try > 0 {
			s.log.Warn("a write of the prio sets failed and is repeated", "set", s.UUID().String(), "err", err)
			s.rt.Sleep(retryPause)
		}
		if err = s.writePrios(no); err == nil {
			break
		}
	}
	if err != nil {
		return err
	}

	s.mu.Lock()
	s.prio = uint64(s.table.PrioBuckets()[0])
	seq := s.journal.RequestEntryLocked(s.needMeta > 0)
	s.batchEntry = seq // see takeMetaLocked
	s.mu.Unlock()
	if err := s.journal.WaitDurable(s.stop, seq); err != nil {
		return err
	}
	s.mu.Lock()
	for s.table.BatchDurable(seq) {
		s.mu.Unlock()
		s.rt.Yield()
		s.mu.Lock()
	}
	if s.table.SweepDue() {
		s.lagging.Signal()
	}
	s.batching = false // after an error it stays: the set has failed then
	s.ready.Broadcast()
	s.mu.Unlock()
	return nil
}

// writePrios writes all prio sets, several at a time.
func (s *Set) writePrios(no uint64) error {
	sets := s.table.PrioSets()
	var slots rt.Semaphore
	slots.Init(s.rt, prioWrites)
	var group rt.WaitGroup
	group.Init(s.rt)
	var mu rt.Mutex
	mu.Init(s.rt)
	var failed error
	for i := range sets {
		if err := slots.Acquire(s.stop, 1); err != nil {
			mu.Lock()
			failed = err
			mu.Unlock()
			break
		}
		buf := s.pool.Get(s.geo.MetaBytes())
		clear(buf.Data)
		p := &ondisk.PrioSet{Data: buf.Data[prioHeader:]}
		s.mu.Lock()
		for from, done := 0, false; !done; {
			if from, done = s.table.SnapshotGens(p, i, from); !done {
				s.mu.Unlock()
				s.rt.Yield()
				s.mu.Lock()
			}
		}
		at := s.geo.BucketStart(uint64(s.table.PrioBuckets()[i]))
		s.mu.Unlock()
		p.Seq = no
		group.Go("prio set", func() {
			p.Encode(buf.Data)
			err := s.io.WithPurpose(blockdev.ForPrio).WriteAt(buf.Data, int64(at)*ondisk.SectorSize, 0)
			buf.Release()
			if err != nil {
				mu.Lock()
				failed = err
				mu.Unlock()
			}
			slots.Release(1)
		})
	}
	group.Wait()
	return failed
}
