package writeback

import "time"

const (
	limiterBehind = 2 * time.Second         // how far what is due may lie in the past: so much is caught up on
	limiterAhead  = 2500 * time.Millisecond // and in the future: nothing waits for longer
	keptUpWithin  = time.Millisecond
)

// A Limiter tells a drain how long to wait, so that it goes at a rate. It waits for limiterAhead at most, so a rate at
// which the last write would take longer is exceeded: small writes hold a low rate better. Source: B 5.3.
type Limiter struct {
	next time.Duration // when the next write is due
}

// Done notes that so many sectors were written, at a rate in sectors per second.
func (l *Limiter) Done(now time.Duration, sectors, rate int64) {
	if rate >= MaxRate {
		l.next = now
		return
	}
	l.next += time.Duration(sectors) * time.Second / time.Duration(rate)
	l.next = min(max(l.next, now-limiterBehind), now+limiterAhead)
}

// Delay returns how long to wait before the next write, zero or less if it is due.
func (l *Limiter) Delay(now time.Duration) time.Duration { return l.next - now }

// Reset forgets what was written: the next write is due now.
func (l *Limiter) Reset(now time.Duration) { l.next = now }

// KeptUp reports whether the drain is where its rate wants it. A device that cannot follow, and a drain that rests,
// leave the next write due in the past.
func (l *Limiter) KeptUp(now time.Duration) bool { return now-l.next <= keptUpWithin }
