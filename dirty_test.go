package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/sim"
)

// dirtyLoop is a loop over volumes so many ranges of which are dirty at first: the cache has what they read as, the
// backing device rubbish.
func dirtyLoop(seed uint64, mode string, ranges int) sim.Loop {
	l := crashLoop(seed, mode)
	prepare := l.Prepare
	l.Prepare = func(ctx context.Context, e *sim.Env) error {
		if err := prepare(ctx, e); err != nil {
			return err
		}
		s, err := openCrash(ctx, e, "writethrough")
		if err != nil {
			return err
		}
		set := s.Own.(crashSet).set
		for i, v := range set.Volumes() {
			if err := makeDirty(set, v, e.Devices[1+i], rand.New(rand.NewPCG(e.Seed, uint64(77+i))), ranges); err != nil {
				return errors.Join(err, s.Close(ctx))
			}
		}
		if err := s.Close(ctx); err != nil {
			return err
		}
		if s, err = openCrash(ctx, e, "writethrough"); err != nil { // the superblocks say DIRTY now
			return err
		}
		return s.Close(ctx)
	}
	return l
}

// makeDirty makes ranges of a volume dirty, of up to 8 KiB each.
func makeDirty(set *CacheSet, v *Volume, dev blockdev.Device, rng *rand.Rand, ranges int) error {
	io, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return err
	}
	defer io.Close()
	for range ranges {
		buf := make([]byte, 512*(1+rng.IntN(16)))
		off := rng.Int64N(v.Size()-int64(len(buf))) &^ 511
		if err := v.ReadAt(context.Background(), buf, off); err != nil {
			return err
		}
		set.set.Runtime().Sleep(time.Millisecond) // the fill is over, or it would cover what follows
		if err := storeDirty(set, v, off, buf); err != nil {
			return err
		}
		if err := io.WriteAt(bytes.Repeat([]byte{0xee}, len(buf)), crashOffset+off, 0); err != nil {
			return err
		}
	}
	return nil
}

// TestDirtyPowerCuts cuts the power of volumes with dirty data, in each mode.
func TestDirtyPowerCuts(t *testing.T) {
	for _, mode := range crashModes("writethrough", "writearound", "none", "changing") {
		t.Run(mode, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := dirtyLoop(seed, mode, 60)
				l.Step = crashStep(75)
				l.Run(t)
			}
		})
	}
}

// TestDirtyPowerCutsWithFUA is the same with hardly a flush: what is durable is so by FUA, also round dirty data.
func TestDirtyPowerCutsWithFUA(t *testing.T) {
	if testing.Short() {
		t.Skip("TestDirtyPowerCuts is done")
	}
	for _, seed := range sim.Seeds(1) {
		l := dirtyLoop(seed, "none", 300)
		l.Workload.Weights = sim.Weights{Read: 10, Write: 20, FUA: 30, Flush: 1, Discard: 10, Zeroes: 20}
		l.Step = crashStep(50)
		l.Run(t)
	}
}

// TestKillsOfDirtySets kills the process, twice in a row, where there is dirty data.
func TestKillsOfDirtySets(t *testing.T) {
	if testing.Short() {
		t.Skip("TestKillsWithoutRuntimeDir is done")
	}
	for _, seed := range sim.Seeds(1) {
		l := dirtyLoop(seed, "changing", 150)
		l.Kill, l.Lives, l.Step = true, 2, crashStep(50)
		l.Run(t)
	}
}

// Case 08, with a power cut at each operation of the attach: an old cache comes back to a device that has been used
// without it. Neither clean nor dirty data of it is seen again, nor at the start after that.
func TestStaleAttachPowerCuts(t *testing.T) {
	for cut, done := 0, false; !done; cut++ {
		simulate(t, 1, time.Hour, breakable(t), func(b *bench) (err error) {
			if err := b.leaveStale(); err != nil {
				return err
			}
			b.power.CutAfter(cut)
			if err = b.open(""); err == nil {
				b.rt.Sleep(time.Second)
			}
			done = err == nil && !b.power.IsCut()
			for _, strength := range []blockdev.Strength{blockdev.Prefix, blockdev.Reordered, blockdev.Torn} {
				left, err := b.left(strength)
				if err != nil {
					return err
				}
				if b.set != nil {
					_ = b.set.Close(context.Background())
					b.set = nil
				}
				b.dir, b.cache, b.backing = "", left[0], left[1:]
				for _, when := range []string{"cut", "stop"} {
					if err = b.open(""); err == nil {
						err = errors.Join(b.expect(0, 'B'), b.expect(8192, 'B'), b.oneSlot(), b.set.Close(context.Background()))
					}
					if b.set = nil; err != nil {
						return fmt.Errorf("cut %d, %v, after the %s: %w", cut, strength, when, err)
					}
				}
			}
			return nil
		})
		if t.Failed() || cut > 200 {
			t.Fatalf("cut %d", cut)
		}
	}
}

// leaveStale leaves a set with clean and dirty data of a device that says that it was used without it, and has 'B'
// where that is.
func (b *bench) leaveStale() error {
	if err := b.cacheOnDisk(); err != nil {
		return err
	}
	if err := storeDirty(b.set, b.volumes[0], 0, page('D')); err != nil {
		return err
	}
	if err := b.volumes[0].WriteAt(context.Background(), page('F'), 8192, FUA); err != nil {
		return err
	}
	err := b.set.Close(context.Background())
	if b.set = nil; err != nil {
		return err
	}
	io, err := blockdev.NewIO(b.backing[0], 1)
	if err != nil {
		return err
	}
	defer io.Close()
	sb, err := cacheset.ReadSuperblock(io)
	if err != nil {
		return err
	}
	sb.SetState(ondisk.StateStale)
	return errors.Join(cacheset.WriteSuperblock(io, sb, io.Flush),
		io.WriteAt(page('B'), crashOffset, blockdev.FUA), io.WriteAt(page('B'), crashOffset+8192, blockdev.FUA))
}

// oneSlot reports whether slots of earlier lives are retired.
func (b *bench) oneSlot() error {
	live := 0
	for _, e := range b.set.set.Slots() {
		if !e.Unused() && !e.Retired() {
			live++
		}
	}
	if live != 1 {
		return fmt.Errorf("%d slots for one device", live)
	}
	return nil
}
