package pace

import "time"

// dynamic goes by the load: short slices at its peak, the whole index in one hold without any, or when somebody waits for a
// bucket; sleeps are such that a collection takes a tenth of the time, if that is no more than a second. B 3.5 (c).
type dynamic struct {
	peak, before int // of requests, in this collection; of those before it, averaged
}

const (
	dynamicNodes    = 10
	dynamicLeast    = 100
	dynamicMost     = 1000
	dynamicWaited   = 10 * time.Millisecond
	dynamicShortest = 10 * time.Millisecond
	dynamicLongest  = time.Second
	dynamicShare    = 10 // percent of the time
)

func (d *dynamic) Slice(s State) int {
	if s.Inflight <= 0 || s.Waiters > 0 {
		return max(s.Nodes, s.Seen) + 1
	}
	d.peak = max(d.peak, s.Inflight)
	if s.Inflight >= d.peak || s.Inflight >= d.before {
		return dynamicNodes
	}
	return min(max(s.Nodes/100, dynamicLeast), dynamicMost)
}

func (d *dynamic) Yield(s State) bool { return s.Inflight > 0 && s.Waiters == 0 }

func (d *dynamic) Sleep(s State) time.Duration {
	if s.Waiters > 0 {
		return dynamicWaited
	}
	cost := s.Elapsed - s.Slept
	return min(max(cost*(100-dynamicShare)/dynamicShare-s.Slept, dynamicShortest), dynamicLongest)
}

func (*dynamic) Allocates() bool { return false }

func (d *dynamic) Finished() {
	d.before = (d.before*40 + d.peak*60) / 100
	d.peak = 0
}
