package journal

import "time"

// reclaimRetry is how long the reclaimer lets others work when the owner could not let go of anything: nodes are
// being read, or replay is not over.
const reclaimRetry = 10 * time.Millisecond

// reclaim is the goroutine that has the oldest entries let go, from half of the journal's room on.
func (j *Journal) reclaim() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for {
		var upTo, ahead uint64
		for j.errLocked() == nil {
			if upTo, ahead = j.needsReclaimLocked(); upTo != 0 {
				break
			}
			j.tight.Wait()
		}
		if j.errLocked() != nil {
			return
		}
		before := j.OldestPinLocked()
		j.stats.Reclaims++
		j.mu.Unlock()
		err := j.owner.WriteOldest(j.stopped, upTo, ahead)
		j.mu.Lock()
		if err != nil {
			j.failLocked(0, err)
			return
		}
		if j.OldestPinLocked() == before {
			j.mu.Unlock()
			_ = j.rt.SleepContext(j.stopped, reclaimRetry)
			j.mu.Lock()
		} else if j.blocked {
			j.work.Signal() // an entry that says so frees buckets
		}
	}
}

// needsReclaimLocked returns up to which entry pins should be let go of, 0 if there is no need: so that less than
// half of the ring, of what a kernel can replay, and of the table of pins, is taken, but a bucket at a time. What counts is what is pinned: that a
// bucket is not pinned becomes true on disk with the next entry, whatever brings it about.
//
// During start only who cannot go on is a reason: leaves are about to be filled by the replay.
//
// The nearer the ring is to full, the more buckets ahead the owner is to begin with: they are what brings it back to half. So
// a device that is slow to flush has much to do at once, and what goes out together shares flushes.
func (j *Journal) needsReclaimLocked() (upTo, ahead uint64) {
	if j.start && !j.blocked {
		return 0, 0
	}
	r := &j.ring
	tail := j.OldestPinLocked()
	p := j.pos
	p.oldest = r.oldestNeeded(p, tail)
	if r.last[p.oldest] < tail {
		return 0, 0 // nothing on disk is pinned
	}
	if used := r.used(p); 2*used >= r.capacity() || int64(used)*int64(r.blockSize) >= j.geo.ReplayBytes() || j.blocked && p.oldest == j.pos.oldest {
		upTo = r.last[p.oldest]
		ahead = r.last[(p.oldest+max(0, 2*used-r.capacity())/2/r.blocks)%len(r.buckets)]
	}
	if j.seq-tail >= maxSpan/2 {
		upTo = max(upTo, j.seq-maxSpan/2)
	}
	return upTo, ahead
}
