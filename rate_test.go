package ubcache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/volume"
)

// Case 14 in small: a cache of 128 MiB, of which 10 percent may be dirty. All rates, and what time they take, are in
// proportion.
const rateCache = 128 << 20

// A rated is such a set, with volumes of 128 MiB in writeback mode, of which no write goes round the cache.
type rated struct {
	*bench
	rng *rand.Rand
	buf []byte
}

func simulateRate(t *testing.T, volumes int, limit time.Duration, fn func(r *rated) error) {
	t.Helper()
	ssd, err := blockdev.LatencyPreset("ssd")
	if err != nil {
		t.Fatal(err)
	}
	nvme, err := blockdev.LatencyPreset("nvme")
	if err != nil {
		t.Fatal(err)
	}
	o := benchOptions{
		cache: rateCache, bucket: 64 << 10, block: 4096, mode: "writeback", dir: t.TempDir(), cacheLatency: nvme, backingLatency: ssd,
		backing: slices.Repeat([]int64{rateCache + crashOffset}, volumes),
	}
	simulate(t, 1, limit, o, func(b *bench) error {
		r := &rated{b, rand.New(rand.NewPCG(1, 14)), make([]byte, 64<<10)}
		for _, v := range b.volumes {
			if err := b.set.SetAttribute(context.Background(), v.Name(), "sequential_cutoff", "0"); err != nil {
				return err
			}
		}
		return fn(r)
	})
}

// fill makes so many percent of the cache dirty, of a volume whose writeback is held meanwhile.
func (r *rated) fill(v *Volume, percent int64) error {
	if err := hold(v, true); err != nil {
		return err
	}
	for off := int64(0); v.Stats().DirtyBytes < rateCache/100*percent; off += int64(len(r.buf)) {
		if err := v.WriteAt(context.Background(), r.buf, off, 0); err != nil {
			return err
		}
	}
	return hold(v, false)
}

// eachUpdate calls fn after each update of the rate for so long, until fn returns false; meanwhile busy is called twice a
// second.
func (r *rated) eachUpdate(v *Volume, long time.Duration, busy func() error, fn func(s volume.WritebackStatus) bool) error {
	for end := r.rt.Now() + long; r.rt.Now() < end; {
		for range 10 {
			if busy != nil {
				if err := busy(); err != nil {
					return err
				}
			}
			r.rt.Sleep(500 * time.Millisecond)
		}
		if !fn(v.v.WritebackStatus()) {
			return nil
		}
	}
	return nil
}

// read reads 4 KiB somewhere.
func (r *rated) read(v *Volume) func() error {
	return func() error { return v.ReadAt(context.Background(), r.buf[:4096], r.rng.Int64N(rateCache/4096)*4096) }
}

func sectors(percent int64) int64 { return rateCache / 512 * percent / 100 }

// (a) Dirty data falls steadily to the target, and once the set is idle, to nothing.
func TestRateFallsToTheTarget(t *testing.T) {
	simulateRate(t, 1, 2*time.Hour, func(r *rated) error {
		v := r.volumes[0]
		if err := errors.Join(r.set.SetAttribute(context.Background(), "set", "idle_max_writeback_rate", "0"), r.fill(v, 20)); err != nil {
			return err
		}
		var failed error
		last, rate := sectors(20)+200, int64(1<<40)
		err := r.eachUpdate(v, 15*time.Minute, nil, func(s volume.WritebackStatus) bool {
			t := s.Terms
			switch target := sectors(10); {
			case t.Target < target*98/100 || t.Target > target:
				failed = fmt.Errorf("the target is %d sectors, want about %d", t.Target, target)
			case t.Dirty > last:
				failed = fmt.Errorf("dirty data has grown from %d to %d sectors: %+v", last, t.Dirty, t)
			case t.Dirty < target-15*60*10: // 8 sectors a second go on
				failed = fmt.Errorf("dirty data went below the target: %+v", t)
			case t.Rate > rate*11/10+8 && t.Dirty < target*12/10:
				failed = fmt.Errorf("the rate goes up again, from %d: %+v", rate, t)
			}
			last, rate = t.Dirty, t.Rate
			return failed == nil
		})
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		if last > sectors(10)*102/100 {
			return fmt.Errorf("after fifteen minutes %d sectors are dirty", last)
		}
		if err := r.set.SetAttribute(context.Background(), "set", "idle_max_writeback_rate", "1"); err != nil {
			return err
		}
		r.rt.Sleep(time.Minute)
		if s := v.v.WritebackStatus(); s.Terms.Dirty > 0 {
			return fmt.Errorf("the set is idle, and not written back: %+v", s)
		}
		return r.state(ondisk.StateClean)
	})
}

// A request to a set that is idle, and written back as fast as it goes, slows that at once.
func TestRateOfAnIdleSetThatIsUsed(t *testing.T) {
	simulateRate(t, 1, time.Hour, func(r *rated) error {
		v := r.volumes[0]
		if err := r.fill(v, 30); err != nil {
			return err
		}
		for !v.v.WritebackStatus().AtMax {
			r.rt.Sleep(10 * time.Millisecond)
		}
		if err := r.read(v)(); err != nil {
			return err
		}
		r.rt.Sleep(200 * time.Millisecond) // what was begun
		first := v.Stats().DirtyBytes
		r.rt.Sleep(2 * time.Second)
		if s := v.v.WritebackStatus(); s.AtMax || s.Terms.Dirty < first/512-64 || first < 4<<20 {
			return fmt.Errorf("two seconds before %d sectors were dirty: %+v", first/512, s)
		}
		return nil
	})
}

// Writes without pause at a steady rate: what is dirty settles, and the rate with it.
func TestRateSettles(t *testing.T) {
	simulateRate(t, 1, 2*time.Hour, func(r *rated) error {
		v := r.volumes[0]
		next := int64(0)
		write := func() error { // 128 KiB/s, each block once
			next += 64 << 10
			return v.WriteAt(context.Background(), r.buf, next%rateCache, 0)
		}
		var dirty, rates []int64
		err := r.eachUpdate(v, 40*time.Minute, write, func(s volume.WritebackStatus) bool {
			dirty, rates = append(dirty, s.Terms.Dirty), append(rates, s.Terms.Rate)
			return true
		})
		if err != nil {
			return err
		}
		n := len(dirty) / 2
		if low, high := slices.Min(dirty[n:]), slices.Max(dirty[n:]); low < sectors(7) || high > sectors(13) {
			return fmt.Errorf("after twenty minutes between %d and %d sectors are dirty, the target is %d", low, high, sectors(10))
		}
		if low, high := slices.Min(rates[n:]), slices.Max(rates[n:]); low < 128 || high > 512 {
			return fmt.Errorf("after twenty minutes the rate is between %d and %d sectors a second, and 256 are written", low, high)
		}
		return nil
	})
}

// (b) Below the target it goes on, slowly.
func TestRateBelowTheTarget(t *testing.T) {
	simulateRate(t, 1, time.Hour, func(r *rated) error {
		v := r.volumes[0]
		if err := r.fill(v, 5); err != nil {
			return err
		}
		begin := v.Stats().DirtyBytes / 512
		var failed error
		err := r.eachUpdate(v, 10*time.Minute, r.read(v), func(s volume.WritebackStatus) bool {
			if s.AtMax || s.Terms.Rate < 1 || s.Terms.Rate > 16 {
				failed = fmt.Errorf("%+v", s)
			}
			return failed == nil
		})
		if err = errors.Join(err, failed); err == nil {
			if n := begin - v.Stats().DirtyBytes/512; n < 1200 || n > 9600 {
				err = fmt.Errorf("%d sectors were written back in ten minutes", n)
			}
		}
		return err
	})
}

// (c) The rate follows within a few updates, whatever was before: an hour below the target, then a burst; and an hour of
// more than the backing device takes.
func TestRateFollows(t *testing.T) {
	simulateRate(t, 1, 4*time.Hour, func(r *rated) error {
		v := r.volumes[0]
		if err := r.fill(v, 2); err != nil {
			return err
		}
		nothing := func(volume.WritebackStatus) bool { return true }
		if err := errors.Join(r.eachUpdate(v, time.Hour, r.read(v), nothing), r.fill(v, 30)); err != nil {
			return err
		}
		updates := 0
		err := r.eachUpdate(v, 15*time.Second, r.read(v), func(s volume.WritebackStatus) bool {
			updates++
			return s.Terms.Rate < (s.Terms.Dirty-s.Terms.Target)/40
		})
		if err != nil {
			return err
		}
		if s := v.v.WritebackStatus(); updates > 3 || s.Terms.Rate < sectors(15)/40 {
			return fmt.Errorf("%d updates after a burst: %+v", updates, s)
		}
		// And down again: an hour far above the target leaves no sum behind.
		if err := r.attribute("writeback_percent", "1"); err != nil {
			return err
		}
		for range 60 {
			if err := errors.Join(r.fill(v, 8), r.eachUpdate(v, time.Minute, r.read(v), nothing)); err != nil {
				return err
			}
		}
		if s := v.v.WritebackStatus(); s.Terms.Integral < 10*8 {
			return fmt.Errorf("no sum after an hour above the target: %+v", s)
		}
		if err := errors.Join(r.attribute("writeback_percent", "10"), v.WriteBack(context.Background()), r.fill(v, 4)); err != nil {
			return err
		}
		updates = 0
		err = r.eachUpdate(v, 15*time.Second, r.read(v), func(s volume.WritebackStatus) bool {
			updates++
			return s.Terms.Rate > 8
		})
		if s := v.v.WritebackStatus(); err == nil && (s.Terms.Rate > 8 || s.Terms.Dirty == 0) {
			err = fmt.Errorf("%d updates below the target: %+v", updates, s)
		}
		return err
	})
}

// (d) With a target of zero all is written back, and what comes is, too.
func TestRateWithoutATarget(t *testing.T) {
	simulateRate(t, 1, time.Hour, func(r *rated) error {
		ctx, v := context.Background(), r.volumes[0]
		if err := errors.Join(r.fill(v, 20), r.attribute("writeback_percent", "0"), r.attribute("writeback_delay", "1")); err != nil {
			return err
		}
		if err := r.eachUpdate(v, 5*time.Second, r.read(v), func(volume.WritebackStatus) bool { return true }); err != nil {
			return err
		}
		if n := v.Stats().DirtyBytes; n > 0 {
			return fmt.Errorf("%d bytes are dirty: %+v", n, v.v.WritebackStatus())
		}
		if err := errors.Join(r.state(ondisk.StateClean), v.WriteAt(ctx, r.buf, 0, 0), r.state(ondisk.StateDirty)); err != nil {
			return err
		}
		r.rt.Sleep(10 * time.Second)
		return r.state(ondisk.StateClean)
	})
}

// (e) A volume with much to write back does not slow another one of the set.
func TestRateBesideABusyVolume(t *testing.T) {
	simulateRate(t, 2, time.Hour, func(r *rated) error {
		ctx, a, b := context.Background(), r.volumes[0], r.volumes[1]
		if err := errors.Join(r.set.SetAttribute(ctx, "v1", "writeback_percent", "40"), r.fill(a, 30), hold(a, true)); err != nil {
			return err
		}
		measure := func() (latencies []time.Duration, err error) {
			var group rt.WaitGroup
			group.Init(r.rt)
			end := r.rt.Now() + 20*time.Second
			for w := range 4 {
				group.Go("client", func() {
					rng, p := rand.New(rand.NewPCG(3, uint64(w))), make([]byte, 4096)
					for r.rt.Now() < end && err == nil {
						off, begin := rng.Int64N(8<<20/4096)*4096, r.rt.Now()
						e := error(nil)
						if rng.IntN(2) == 0 {
							e = b.ReadAt(ctx, p, off)
						} else {
							e = b.WriteAt(ctx, p, off, 0)
						}
						if e != nil {
							err = e
						}
						latencies = append(latencies, r.rt.Now()-begin)
						r.rt.Sleep(time.Duration(rng.Int64N(int64(4 * time.Millisecond))))
					}
				})
			}
			group.Wait()
			slices.Sort(latencies)
			return latencies, err
		}
		if _, err := measure(); err != nil { // until all of it is in the cache
			return err
		}
		alone, err := measure()
		if err == nil {
			err = hold(a, false)
		}
		before := a.Stats().DirtyBytes
		beside, err2 := measure()
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		if done := before - a.Stats().DirtyBytes; done < 4<<20 {
			return fmt.Errorf("only %d bytes were written back: %+v", done, a.v.WritebackStatus())
		}
		for _, c := range []struct {
			name     string
			permille int
			most     float64
		}{{"median", 500, 1.05}, {"p99", 990, 1.5}, {"p99.9", 999, 2}} {
			x, y := alone[len(alone)*c.permille/1000], beside[len(beside)*c.permille/1000]
			t.Logf("%s: %v alone, %v beside the other's drain", c.name, x, y)
			if float64(y) > c.most*float64(x) {
				return fmt.Errorf("%s: %v alone, %v beside the other's drain", c.name, x, y)
			}
		}
		return nil
	})
}
