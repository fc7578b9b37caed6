package cacheset

import (
	"errors"
	"fmt"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// ErrNoDiscard: the cache device cannot be told what it need not keep.
var ErrNoDiscard = errors.New("the cache device does not support discards")

const (
	discardBytes = 8 << 20               // of one discard, at most, but a bucket
	discardPart  = 256                   // at most such a part of all buckets is being discarded
	discardMost  = 256                   // and so many, in one hold of the lock
	discardPause = 10 * time.Millisecond // between two of them, and at least as long as the last one took
	discardRetry = 10 * time.Second      // after one that failed
)

// SetDiscard changes whether empty buckets are discarded, and writes it to the superblock. A device that cannot do that is
// refused: ErrNoDiscard.
func (s *Set) SetDiscard(on bool) error {
	if on && !s.info.CanDiscard {
		return fmt.Errorf("%s: %w", s.info.Name, ErrNoDiscard)
	}
	s.attaching.Lock()
	defer s.attaching.Unlock()
	super := s.super
	super.Flags &^= ondisk.FlagDiscard
	if on {
		super.Flags |= ondisk.FlagDiscard
	}
	if err := WriteSuperblock(s.io, &super, s.io.Flush); err != nil {
		return err
	}
	s.mu.Lock()
	s.super = super
	s.discardFailed = false
	s.discards.Broadcast()
	s.mu.Unlock()
	return nil
}

// Discard reports whether empty buckets are to be discarded, as the superblock says.
func (s *Set) Discard() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.super.Discard()
}

// openDiscards begins what discards need, where the device can do them.
func (s *Set) openDiscards() (err error) {
	if !s.info.CanDiscard {
		if s.super.Discard() {
			s.log.Warn("discard is set, but the cache device does not support it; nothing is discarded", "set", s.UUID().String(), "dev", s.info.Name)
		}
		return nil
	}
	if s.dio, err = blockdev.NewIO(s.dev, 1); err == nil {
		s.running.Go("discarder", s.discardLoop)
	}
	return err
}

// discardLoop is the goroutine that discards empty buckets, one run of them at a time. Nobody waits for it: the buckets are
// nobody's, it has a queue of its own, and it rests as long as it works. Where buckets are scarce it leaves them alone. For
// what may be discarded, and the order, see bucket.Table.DiscardBegin.
//
// At a start it is not known what was discarded before, so all that is empty is discarded once more.
func (s *Set) discardLoop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	most := int(max(min(discardBytes/s.geo.BucketBytes(), int64(s.geo.NBuckets/discardPart), discardMost), 1))
	for s.errLocked() == nil {
		if !s.serving || !s.super.Discard() {
			s.discards.Wait()
			continue
		}
		s.noticeLocked()
		first, n := s.table.DiscardBegin(most)
		s.mu.Unlock()
		pause := tickEvery
		if n > 0 {
			pause = s.discardRun(first, n)
		}
		err := s.rest(pause)
		s.mu.Lock()
		if err != nil {
			return
		}
	}
}

// discardRun discards buckets that lie next to each other, and returns how long to rest. An error is counted, and told once:
// the device keeps what it need not, and no more.
func (s *Set) discardRun(first uint32, n int) (pause time.Duration) {
	begin := s.rt.Now()
	bytes := int64(n) * s.geo.BucketBytes()
	err := s.dio.Discard(int64(s.geo.BucketStart(uint64(first)))*ondisk.SectorSize, bytes)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.DiscardEnd(first, n)
	if err != nil {
		s.stats.DiscardErrors++
		if !s.discardFailed && s.errLocked() == nil {
			s.log.Warn("a discard failed; others are tried, and no more is said about it", "set", s.UUID().String(), "err", err)
		}
		s.discardFailed = true
		return discardRetry
	}
	s.stats.DiscardedBuckets += uint64(n)
	s.stats.DiscardedBytes += uint64(bytes)
	return max(discardPause, s.rt.Now()-begin)
}
