package cacheset

import "time"

// restless is how long work in the background rests with Options.Restless: so long that a simulation comes to an end.
const restless = 100 * time.Microsecond

// rest is a pause of work in the background. The error says that the set is being closed.
func (s *Set) rest(d time.Duration) error {
	if s.opt.Restless {
		d = min(d, restless)
	}
	return s.rt.SleepContext(s.stop, d)
}

// tickLoop is the goroutine that does what only time brings about.
func (s *Set) tickLoop() {
	told := false
	for s.rt.SleepContext(s.stop, tickEvery) == nil {
		if err := s.Err(); err != nil && s.failed.Load() == nil && !told {
			told = true
			s.log.Error("the cache set has stopped", "set", s.UUID().String(), "err", err)
		}
		s.mu.Lock()
		var stuck error
		if s.Err() == nil {
			s.tickLocked()
			stuck = s.stuckLocked()
		} else {
			s.wakeAllLocked() // the journal has failed: it does not know who waits
		}
		s.mu.Unlock()
		if stuck != nil {
			_ = s.fail(stuck)
		}
		s.pool.TrimIdle()
	}
}

func (s *Set) tickLocked() {
	s.noticeLocked()
	s.table.Tick()
	s.refill.Signal()
	s.move.Signal()
	s.chore.Broadcast() // the lag may have grown
	s.gc.wake.Broadcast()
	s.lagging.Broadcast()
	now := s.rt.Now()
	for len(s.aging) > 0 {
		n := s.aging[0].node
		if !n.Gone() && n.Dirty() && now-s.aging[0].since < dirtyAge {
			break
		}
		s.aging[0] = aged{}
		s.aging = s.aging[1:]
		n.Mark &^= markAging
		if !n.Gone() && n.Dirty() {
			s.queueLocked(n, false) // if there is nothing to write yet, the writer puts it back here
		}
	}
	for _, a := range s.table.Anomalies() {
		s.log.Error("the counts of a bucket do not fit: it will not be reused", "set", s.UUID().String(), "anomaly", a.String())
	}
	s.evictLocked()
}
