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
		upTo := uint64(0)
		for j.errLocked() == nil {
			if upTo = j.needsReclaimLocked(); upTo != 0 {
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
		err := j.owner.WriteOldest(j.stopped, upTo)
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
func (j *Journal) needsReclaimLocked() (upTo uint64) {
	if j.start && !j.blocked {
		return 0
	}
	r := &j.ring
	tail := j.OldestPinLocked()
	p := j.pos
	p.oldest = r.oldestNeeded(p, tail)
	if r.last[p.oldest] < tail {
		return 0 // nothing on disk is pinned
	}
	if used := r.used(p); 2*used >= r.capacity() || int64(used)*int64(r.blockSize) >= j.geo.ReplayBytes() || j.blocked && p.oldest == j.pos.oldest {
		upTo = r.last[p.oldest]
	}
	if j.seq-tail >= maxSpan/2 {
		upTo = max(upTo, j.seq-maxSpan/2)
	}
	return upTo
}
