package ubcache

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/writeback"
)

// guard ends the test program when it takes ever more memory, in a loop that no simulated clock sees.
func guard(t *testing.T) {
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	go func() {
		var m runtime.MemStats
		for {
			select {
			case <-done:
				return
			case <-time.After(50 * time.Millisecond):
			}
			if runtime.ReadMemStats(&m); m.HeapAlloc > 1<<30 {
				panic(fmt.Sprintf("%s: the heap has %d MiB: the drainer takes extents for ever", t.Name(), m.HeapAlloc>>20))
			}
		}
	}()
}

// A batch ends, whatever the rate is, where blocks are larger than a sector.
func TestRateThatIsNoMultipleOfTheBlock(t *testing.T) {
	guard(t)
	o := breakable(t)
	o.block = 4096
	simulate(t, 1, 10*time.Minute, o, func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), b.attribute("sequential_cutoff", "0"), hold(v, true)); err != nil {
			return err
		}
		for off := int64(0); off < 1<<20; off += 4096 {
			if err := v.WriteAt(ctx, page('A'), off, 0); err != nil {
				return err
			}
		}
		if err := errors.Join(v.v.SetWritebackRate(1027), hold(v, false)); err != nil {
			return err
		}
		b.rt.Sleep(time.Minute)
		if n := v.Stats().DirtyBytes; n == 1<<20 {
			return fmt.Errorf("%d bytes are dirty still", n)
		}
		return nil
	})
}

// stuckFor ends the test program when the simulation has not come to its end after so long on a real clock: a goroutine
// that loops keeps the simulated one from going on.
func stuckFor(t *testing.T, d time.Duration) {
	timer := time.AfterFunc(d, func() { panic(t.Name() + ": some goroutine loops without waiting for anything") })
	t.Cleanup(func() { timer.Stop() })
}

// With writeback_delay 0, which is allowed, the drainer waits for something, where what is dirty cannot be taken because
// it is being written over.
func TestNoDelay(t *testing.T) {
	stuckFor(t, 30*time.Second)
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true)); err != nil {
			return err
		}
		if err := v.WriteAt(ctx, page('A'), 0, FUA); err != nil {
			return err
		}
		b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWriteZeroes}, Hang: 2 * time.Second})
		var group rt.WaitGroup
		group.Init(b.rt)
		var failed error
		group.Go("zeroes", func() { failed = v.WriteZeroes(ctx, 0, 4096, 0) })
		b.rt.Sleep(100 * time.Millisecond)
		err := v.v.ChangeWriteback(func(s *writeback.Settings) error {
			s.Running, s.Delay = true, 0
			return nil
		})
		if err != nil {
			return err
		}
		b.rt.Sleep(time.Second)
		group.Wait()
		return errors.Join(failed, b.expect(0, 0))
	})
}

// WriteBack comes to its end beside a write that is on its way to the cache: nothing is dirty then, and something is
// about to be.
func TestWriteBackBesideASlowWrite(t *testing.T) {
	stuckFor(t, 30*time.Second)
	for seed := range uint64(20) {
		writeBackBesideASlowWrite(t, seed)
	}
}

func writeBackBesideASlowWrite(t *testing.T, seed uint64) {
	simulate(t, seed, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true), v.WriteAt(ctx, page('A'), 0, FUA)); err != nil {
			return err
		}
		b.faults[0].Add(blockdev.Fault{
			Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 2 * time.Second, Count: 1,
		})
		var group rt.WaitGroup
		group.Init(b.rt)
		var failed error
		group.Go("write", func() { failed = v.WriteAt(ctx, page('B'), 1<<20, 0) })
		b.rt.Sleep(100 * time.Millisecond)
		err := v.WriteBack(ctx)
		group.Wait()
		return errors.Join(err, failed, b.alone(0, 'A'), b.expect(1<<20, 'B'))
	})
}
