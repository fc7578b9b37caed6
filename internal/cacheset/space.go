package cacheset

import (
	"time"

	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// uses is how many kinds of data have buckets of their own: no dirty key may point into a bucket for clean data, and what
// is moved together stays together.
const uses = 3

// An openList has the buckets of one kind that take data.
type openList struct {
	list  []openBucket
	clock uint64
}

// An openBucket is a write point.
type openBucket struct {
	bucket uint32
	gen    uint8
	held   bool   // there is a bucket
	used   uint32 // sectors
	point  uint32 // who wrote last
	inode  uint32
	next   uint64 // sector behind what was written last
	stamp  uint64
}

// openBuckets is how many write points a kind has in a set of n buckets.
func openBuckets(n uint64) int { return int(min(max(n/64, 2), 32)) }

// SpaceLocked gives room for up to want sectors of data of an inode, from sector start on, and says how much that is: a
// multiple of unit sectors, itself one of the block, if want is one, and 0 if no bucket is ready for that kind of data,
// which is bucket.ForDirty, ForClean or ForMoving. The room comes with a pin of its bucket, for the key. point tells writers apart, so that what one writes
// lies together. Source: B 1.7.
func (s *Set) SpaceLocked(kind bucket.Use, inode uint32, start uint64, want, unit, point uint32) (ondisk.Ptr, uint32) {
	if s.gc.held {
		return 0, 0
	}
	l := &s.open[kind]
	l.clock++
	o := l.find(inode, start, point)
	if o.held && s.geo.BucketSectors-o.used < unit {
		s.table.Unpin(o.bucket)
		o.held = false
	}
	if !o.held {
		s.table.SetReplay(s.journal.NeededLocked())
		b, gen, ok := s.table.Allocate(kind)
		if s.table.NeedBatch() {
			s.refill.Signal()
		}
		if !ok {
			s.stats.NoBucket++
			s.refill.Signal()
			return 0, 0
		}
		*o = openBucket{bucket: b, gen: gen, held: true}
	}
	n := min(want, (s.geo.BucketSectors-o.used)/unit*unit, ondisk.MaxKeySize/unit*unit)
	p := ondisk.MakePtr(o.gen, s.geo.BucketStart(uint64(o.bucket))+uint64(o.used), s.super.NrThisDev)
	s.table.Pin(o.bucket)
	if s.marks != nil {
		if s.marks.Spend(n); s.marks.Due() {
			s.gc.wake.Broadcast()
		}
	}
	o.used += n
	o.point, o.inode, o.next, o.stamp = point, inode, start+uint64(n), l.clock
	if s.geo.BucketSectors-o.used < s.geo.BlockSectors {
		s.table.Unpin(o.bucket)
		o.held = false
	}
	return p, n
}

// spaceWait is how long data that must go to the cache waits for a batch of buckets, beside two collections at most that may
// find some.
const spaceWait = 10 * time.Second

// WantSpaceLocked says that a writer found no room for data that must go to the cache and begins to wait, or with false, that
// it does so no more, whichever way that ended. Between the two it calls WaitSpace, and tries again, as often as it likes.
// Meanwhile work in the background hurries.
func (s *Set) WantSpaceLocked(yes bool) {
	if yes {
		s.needSpace++
	} else {
		s.needSpace--
	}
}

// SpaceWantedLocked reports whether somebody waits. Who comes then should wait too, and not be quicker.
func (s *Set) SpaceWantedLocked() bool { return s.needSpace > 0 }

// WaitSpace waits until there is a bucket for dirty data of a request. It returns ErrNoSpace if none can be had, or none
// comes.
func (s *Set) WaitSpace() error {
	s.LockRequest()
	defer s.mu.Unlock()
	if err := s.errLocked(); err != nil {
		return err
	}
	if s.gc.held {
		s.AwaitBucketsLocked(true)
		return nil
	}
	until := s.rt.Now() + spaceWait
	serial := s.gc.serial
	var waited [StallGens + 1]time.Duration
	defer func() {
		s.stalls.add(StallAllocation, waited[StallAllocation])
		s.stalls.add(StallGens, waited[StallGens])
	}()
	for !s.table.Available(bucket.ForDirty) {
		if _, due := s.planMoveLocked(); due {
			s.move.Signal()
		} else if s.table.Resting() > 0 {
			s.lagging.Signal() // a sweep ends their rest, or the time is over
		} else if !s.moving && !s.batching && s.table.Pickable() == 0 && s.table.Counts()[bucket.Inc] == 0 {
			if !s.helpsLocked(serial) {
				return ErrNoSpace
			}
			s.wantCollectionLocked()
		}
		s.refill.Signal()
		cause := StallAllocation
		if s.batching {
			cause = StallGens
		}
		begin := s.rt.Now()
		if s.gc.under && s.helpsLocked(serial) { // as long as that takes
			until = begin + spaceWait
		}
		ctx, cancel := s.rt.WithTimeout(s.stop, until-begin)
		err := s.ready.WaitContext(ctx)
		cancel()
		waited[cause] += s.rt.Now() - begin
		if serr := s.errLocked(); serr != nil {
			return serr
		}
		if err != nil && (s.stop.Err() != nil || !s.gc.under || !s.helpsLocked(serial)) {
			return ErrNoSpace
		}
	}
	return nil
}

// helpsLocked reports whether a collection may find buckets for who has waited since the one of that number: one that has
// begun later comes to its end.
func (s *Set) helpsLocked(serial uint64) bool {
	return s.marks != nil && s.gc.pacer != nil && s.gc.serial < serial+2
}

// find chooses the write point: the one that start continues, else the newest of the same writer, else the oldest.
func (l *openList) find(inode uint32, start uint64, point uint32) *openBucket {
	var same *openBucket
	last := &l.list[0]
	for i := range l.list {
		o := &l.list[i]
		if o.held && o.inode == inode && o.next == start {
			return o
		}
		if o.held && o.point == point && (same == nil || o.stamp > same.stamp) {
			same = o
		}
		if o.stamp < last.stamp {
			last = o
		}
	}
	if same != nil {
		return same
	}
	return last
}
