package writeback

import (
	"testing"
	"time"
)

// A loop is a volume in a cache of 1 GiB, alone on its set: clients make data dirty, and a drain of one write at a time
// takes it away at the rate of a controller. Its time is its own.
type loop struct {
	settings   Settings
	controller *Controller
	limiter    Limiter
	idle       int // updates without a request

	now, update time.Duration
	dirty       int64 // sectors
	load        int64 // sectors per second that clients write, while less than 70 % is dirty
	arriving    int64 // of those what is less than a sector, in sectors * nanoseconds per second
	quiet       bool  // there are no requests at all
	write       int64 // sectors of one write to the backing device
	speed       int64 // of the backing device, sectors per second
	terms       Terms // of the last update
}

const (
	cacheSectors = 1 << 30 / 512
	percent      = cacheSectors / 100 // about
	onTarget     = cacheSectors / 10
)

func newLoop(dirty int64) *loop {
	return &loop{settings: Defaults(), controller: NewController(), dirty: dirty, write: 8, speed: 400_000}
}

// run goes on for d, and calls see after each update.
func (l *loop) run(d time.Duration, see func()) {
	for end := l.now + d; l.now < end; {
		if l.now >= l.update {
			l.update = l.now + l.settings.UpdateEvery
			l.control()
			see()
		}
		l.step(min(l.update, end))
	}
}

// control is what happens every few seconds.
func (l *loop) control() {
	if l.idle++; !l.quiet {
		l.idle = 0
	}
	if l.idle >= IdleUpdates(1) {
		l.controller.EnterMax()
	} else {
		l.controller.LeaveMax()
	}
	if l.dirty > 0 {
		l.terms = l.controller.Update(&l.settings, Input{
			CacheSectors: cacheSectors, Dirty: l.dirty, Backing: 1 << 30, AllBacking: 1 << 30,
			InUse: int(l.dirty / percent), UsedBuckets: l.dirty / 1024, BucketSectors: 1024,
			KeptUp: l.limiter.KeptUp(l.now),
		})
	}
}

// step makes one write, or lets time go by until one is due, at most until end.
func (l *loop) step(end time.Duration) {
	n, delay := min(l.write, l.dirty), l.limiter.Delay(l.now)
	switch {
	case n == 0:
		l.pass(min(100*time.Millisecond, end-l.now))
		l.limiter.Reset(l.now)
	case delay > 0 && l.controller.Rate() != MaxRate:
		l.pass(min(delay, end-l.now))
	default:
		l.pass(time.Duration(n) * time.Second / time.Duration(l.speed))
		l.dirty -= n
		l.limiter.Done(l.now, n, l.controller.Rate())
	}
}

// pass lets time go by, in which data gets dirty.
func (l *loop) pass(d time.Duration) {
	l.now += d
	l.arriving += l.load * int64(d)
	l.dirty = max(l.dirty, min(l.dirty+l.arriving/int64(time.Second), 70*percent))
	l.arriving %= int64(time.Second)
}

func nothing() {}

// Case 14 (a): twice the target, nothing is written, only read.
func TestDirtyFallsToTheTarget(t *testing.T) {
	for _, write := range []int64{8, 128} {
		l := newLoop(2 * onTarget)
		l.write = write
		dirty := l.dirty
		first := true
		l.run(5*time.Minute, func() {
			if l.dirty > dirty || !first && l.terms.Change > 0 {
				t.Errorf("writes of %d, %v: %d dirty after %d, the rate changed by %d",
					write, l.now, l.dirty, dirty, l.terms.Change)
			}
			dirty, first = l.dirty, false
		})
		if l.dirty > onTarget || l.dirty < onTarget*3/4 || l.controller.Rate() != 8 {
			t.Errorf("writes of %d: %d dirty, a rate of %d; want a little less than %d, and 8",
				write, l.dirty, l.controller.Rate(), onTarget)
		}

		l.quiet = true
		l.run(25*time.Second, nothing)
		if l.dirty < onTarget*3/4 {
			t.Errorf("writes of %d: %d dirty, though the set is not idle yet", write, l.dirty)
		}
		l.run(15*time.Second, nothing)
		if l.dirty != 0 {
			t.Errorf("writes of %d: %d dirty, though the set is idle", write, l.dirty)
		}
	}
}

// Under a steady load the target is held, whatever was dirty at first. Loads close to the device's speed take longest.
func TestTargetIsHeld(t *testing.T) {
	for _, load := range []int64{2000, 20_000, 350_000} {
		for _, start := range []int64{0, 20 * percent, 70 * percent} {
			l := newLoop(start)
			l.write, l.load = 128, load
			l.run(2*time.Hour, nothing)
			l.run(10*time.Minute, func() {
				if l.dirty < onTarget*99/100 || l.dirty > onTarget*101/100 {
					t.Fatalf("%d sectors/s from %d dirty: %v: %d dirty, want %d", load, start, l.now, l.dirty, onTarget)
				}
			})
		}
	}
}

// Case 14 (b): less than the target is dirty, data is read.
func TestDrainGoesOnBelowTheTarget(t *testing.T) {
	for write, most := range map[int64]int64{
		8:   8 * 600,         // sectors in ten minutes, at the least rate
		128: 128 * 600 / 2.5, // no write waits for more than 2.5 s
	} {
		l := newLoop(5 * percent)
		l.write = write
		was, before := l.dirty, l.dirty
		for range 10 {
			l.run(time.Minute, nothing)
			if l.dirty >= before {
				t.Errorf("writes of %d: nothing was written in a minute", write)
			}
			before = l.dirty
		}
		if written := was - l.dirty; written > most*101/100+4*write || written < 8*600 {
			t.Errorf("writes of %d: %d sectors written, want about %d", write, written, most)
		}
	}
}

// Case 14 (c): an hour below the target, after whatever there was; then a burst.
func TestRateFollowsABurst(t *testing.T) {
	for name, history := range map[string]func(l *loop){
		"attached": func(*loop) {},
		"a load": func(l *loop) {
			l.load = 20_000
			l.run(time.Hour, nothing)
		},
		"more than the device takes": func(l *loop) {
			l.load = 600_000
			l.run(time.Hour, nothing)
			if l.terms.Rate < l.speed {
				t.Errorf("a rate of %d in an overload, the device makes %d", l.terms.Rate, l.speed)
			}
		},
		"more than a slow device takes": func(l *loop) {
			l.load, l.speed = 60_000, 2000
			l.run(time.Hour, nothing)
			l.speed = 400_000
		},
	} {
		l := newLoop(5 * percent)
		l.write = 128
		history(l)

		l.load = 8
		l.dirty = 5 * percent
		updates := 0
		l.run(time.Hour, func() {
			if updates++; updates > 3 && l.terms.Rate != 8 {
				t.Fatalf("%s: %v: a rate of %d with %d dirty, below the target", name, l.now, l.terms.Rate, l.dirty)
			}
		})

		l.dirty = 30 * percent
		updates = 0
		l.run(5*time.Minute, func() {
			updates++
			share := (l.terms.Dirty - onTarget) / 40 // what the error asks for
			if updates <= 3 && (l.terms.Rate < share || l.terms.Rate > share*5/4) {
				t.Errorf("%s: update %d of a burst: a rate of %d with %d dirty", name, updates, l.terms.Rate, l.dirty)
			}
		})
		if l.dirty > onTarget || l.dirty < onTarget*3/4 {
			t.Errorf("%s: %d dirty five minutes after a burst, want %d", name, l.dirty, onTarget)
		}
	}
}

// Case 14 (d): the device is the only limit.
func TestTargetZeroDrainsAll(t *testing.T) {
	l := newLoop(20 * percent)
	l.settings.Percent = 0
	l.run(time.Duration(l.dirty)*time.Second/time.Duration(l.speed)+time.Millisecond, nothing)
	if l.dirty != 0 {
		t.Errorf("%d dirty", l.dirty)
	}
}
