package writeback

import (
	"testing"
	"time"
)

// Source: B 5.3.
func TestLimiter(t *testing.T) {
	const ms = time.Millisecond
	type write struct {
		at            time.Duration // after the limiter was reset
		sectors, rate int64
		want          time.Duration // delay after it
		keptUp        bool
	}
	for name, writes := range map[string][]write{
		"at its rate":       {{0, 8, 8000, ms, true}, {ms, 8, 8000, ms, true}, {2 * ms, 16, 8000, 2 * ms, true}},
		"another rate":      {{0, 8, 8000, ms, true}, {ms, 8, 4000, 2 * ms, true}},
		"late by 1 ms":      {{2 * ms, 8, 8000, -ms, true}},
		"late by more":      {{2*ms + 1, 8, 8000, -ms - 1, false}},
		"late, caught up":   {{10 * ms, 8, 8000, -9 * ms, false}, {11 * ms, 80, 8000, 0, true}},
		"2 s late":          {{2001 * ms, 8, 8000, -2000 * ms, false}},
		"later":             {{time.Hour, 8, 8000, -2000 * ms, false}, {time.Hour, 8, 8000, -1999 * ms, false}},
		"2.5 s to wait":     {{0, 20, 8, 2500 * ms, true}},
		"more to wait":      {{0, 2048, 8, 2500 * ms, true}, {ms, 2048, 8, 2500 * ms, true}},
		"the largest write": {{0, 1 << 32, 1, 2500 * ms, true}},
		"no limit":          {{0, 2048, 8, 2500 * ms, true}, {ms, 2048, MaxRate, 0, true}, {time.Hour, 1, MaxRate, 0, true}},
	} {
		t.Run(name, func(t *testing.T) {
			const start = 100 * time.Hour
			var l Limiter
			if l.Reset(start); l.Delay(start) != 0 || !l.KeptUp(start) {
				t.Errorf("after a reset: %v to wait, kept up %v", l.Delay(start), l.KeptUp(start))
			}
			for i, w := range writes {
				now := start + w.at
				l.Done(now, w.sectors, w.rate)
				if got := l.Delay(now); got != w.want || l.KeptUp(now) != w.keptUp {
					t.Errorf("write %d: %v to wait, kept up %v, want %v, %v", i, got, l.KeptUp(now), w.want, w.keptUp)
				}
			}
		})
	}
}
