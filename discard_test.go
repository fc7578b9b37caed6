package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/sim"
)

// discardLoop is case 17: a loop with discard on, whose cache device zeroes what is discarded at once. Sweeps of generations
// and discards never rest.
func discardLoop(seed uint64, broken cacheset.Broken) sim.Loop {
	l := writebackLoop(seed, opening{})
	l.Disks[0].Size = 1024 * crashBucket // so that there are empty buckets
	o := opening{mode: "writeback", flash: true, drain: fastDrain, broken: broken, restless: true}
	open := func(ctx context.Context, e *sim.Env) (*sim.System, error) {
		s, err := o.open(ctx, e)
		if err != nil {
			return nil, err
		}
		if err := s.Own.(crashSet).set.SetAttribute(ctx, "cache", "discard", "1"); err != nil {
			return nil, errors.Join(err, s.Close(ctx))
		}
		return s, nil
	}
	l.Build, l.Reopen = open, open
	l.Workload.Blocks, l.Workload.Think = 32, 3*time.Millisecond
	l.Workload.Weights = sim.Weights{Read: 20, Write: 40, FUA: 5, Flush: 5, Discard: 10, Zeroes: 5}
	l.Between = func(ctx context.Context, _ *sim.Env, s *sim.System, n int) error {
		set := s.Own.(crashSet).set
		if got := set.Stats().DiscardedBuckets; n == l.Workload.Requests-1 && got < 100 {
			return fmt.Errorf("%d buckets were discarded", got)
		}
		return nil
	}
	return l
}

// TestDiscardPowerCuts cuts the power at the writes and discards of a set.
func TestDiscardPowerCuts(t *testing.T) {
	for _, seed := range sim.Seeds(1) {
		l := discardLoop(seed, 0)
		l.Step = crashStep(60)
		l.Run(t)
		l.Lives, l.Step = 3, crashStep(300)
		l.Run(t)
		l.Kill, l.Lives = true, 2
		l.Run(t)
	}
}

// The setting is off unless asked for, shown, can be changed while the set runs, and is kept; also one that Format made.
func TestDiscardAttribute(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		discarded := func(since uint64, some bool) error {
			b.rt.Sleep(time.Minute)
			if n := b.set.Stats().DiscardedBuckets; n > since != some {
				return fmt.Errorf("%d buckets were discarded, before it %d; discard is set: %v", n, since, some)
			}
			return nil
		}
		steps := func(set, want string) error { return attributeSteps{{"cache", "discard", set, want}}.run(b) }
		if err := errors.Join(steps("", "0"), discarded(0, false), steps("2", "0 to 1"), steps("1", "1"), discarded(0, true)); err != nil {
			return err
		}
		s := b.set.Stats()
		if s.DiscardedBytes != int64(s.DiscardedBuckets)*crashBucket || s.DiscardedBuckets < s.Empty {
			return fmt.Errorf("%d buckets were discarded, %d bytes; %d are empty", s.DiscardedBuckets, s.DiscardedBytes, s.Empty)
		}
		if err := discarded(s.DiscardedBuckets, false); err != nil { // once is enough
			return err
		}
		if err := errors.Join(b.reopen(""), steps("", "1"), discarded(0, true), steps("0", "0")); err != nil {
			return err
		}
		return errors.Join(discarded(b.set.Stats().DiscardedBuckets, false), b.reopen(""), steps("", "0"), discarded(0, false))
	})
	for _, want := range []bool{true, false} {
		dev, err := blockdev.Memory(600*crashBucket, blockdev.MemoryOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := offline.Format(context.Background(), offline.FormatOptions{Cache: dev, Bucket: crashBucket, Discard: want}); err != nil {
			t.Fatal(err)
		}
		set, err := Open(context.Background(), Options{CacheDevice: dev})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := set.Attribute("cache", "discard"); err != nil || (got == "1") != want {
			t.Errorf("formatted with %v, discard is %q, %v", want, got, err)
		}
		if err := errors.Join(set.Close(context.Background()), dev.Close()); err != nil {
			t.Error(err)
		}
	}
}

// unable is a device that cannot discard.
type unable struct{ blockdev.Device }

func (u unable) Info() blockdev.Info {
	i := u.Device.Info()
	i.CanDiscard, i.DiscardZeroes = false, false
	return i
}

func (u unable) Runtime() *rt.Runtime { return blockdev.RuntimeOf(u.Device) }

// A device that cannot discard is refused the setting; where it is set already, the set runs, and says so.
func TestDiscardUnsupported(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		able := b.cache
		b.cache = unable{able}
		if err := b.reopen(""); err != nil {
			return err
		}
		err := b.set.SetAttribute(context.Background(), "cache", "discard", "1")
		if !errors.Is(err, ErrNoDiscard) || !strings.Contains(err.Error(), able.Info().Name) {
			return fmt.Errorf("setting discard: %w", err)
		}
		if err := (attributeSteps{{"cache", "discard", "", "0"}, {"cache", "discard", "0", "0"}}).run(b); err != nil {
			return err
		}
		b.cache = able
		if err := errors.Join(b.reopen(""), b.set.SetAttribute(context.Background(), "cache", "discard", "1"), b.set.Close(context.Background())); err != nil {
			return err
		}
		var log bytes.Buffer
		b.set, err = Open(context.Background(), Options{CacheDevice: unable{able}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			return err
		}
		b.rt.Sleep(time.Minute)
		if s := b.set.Stats(); s.DiscardedBuckets+s.DiscardErrors != 0 || strings.Count(log.String(), "does not support it") != 1 {
			return fmt.Errorf("%d discards, %d errors, log: %s", s.DiscardedBuckets, s.DiscardErrors, log.String())
		}
		return nil
	})
}

// Discards that fail are counted and told once, and the set goes on.
func TestDiscardFails(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		f := blockdev.NewFaulty(b.cache, 1)
		var log bytes.Buffer
		err := b.set.Close(context.Background())
		if err == nil {
			b.cache = f
			b.set, err = Open(context.Background(), Options{CacheDevice: f, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		}
		if err != nil {
			return err
		}
		remove := f.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpDiscard}})
		if err := b.set.SetAttribute(context.Background(), "cache", "discard", "1"); err != nil {
			return err
		}
		b.rt.Sleep(5 * time.Minute)
		s := b.set.Stats()
		if n := remove(); s.DiscardErrors < 5 || s.DiscardErrors > uint64(n) || s.DiscardErrors+1 < uint64(n) || s.DiscardedBuckets != 0 || strings.Count(log.String(), "discard failed") != 1 {
			return fmt.Errorf("%d errors counted, %d made, %d buckets discarded; log: %s", s.DiscardErrors, n, s.DiscardedBuckets, log.String())
		}
		b.rt.Sleep(time.Minute)
		if s := b.set.Stats(); s.DiscardedBuckets == 0 {
			return errors.New("no discards when they work again")
		}
		return b.set.Err()
	})
}

// Requests never wait for a discard: with discards that take a second each, the slowest request takes as long as without.
func TestDiscardsHoldNobodyUp(t *testing.T) {
	slowest := func(discard string) (most time.Duration, s SetStats) {
		o := breakable(t)
		o.cache, o.mode = 700*crashBucket, "writeback"
		simulate(t, 1, time.Hour, o, func(b *bench) error {
			b.faults[0].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpDiscard}, Hang: time.Second})
			if err := b.set.SetAttribute(context.Background(), "cache", "discard", discard); err != nil {
				return err
			}
			for n := range 12000 {
				off := int64(n*37%500) * 4096
				flags := WriteFlags(0)
				if n%16 == 0 {
					flags = FUA
				}
				begin := b.rt.Now()
				if err := b.volumes[0].WriteAt(context.Background(), page(byte(n)), off, flags); err != nil {
					return err
				}
				most = max(most, b.rt.Now()-begin)
				b.rt.Sleep(2 * time.Millisecond)
			}
			s = b.set.Stats()
			return nil
		})
		return most, s
	}
	without, _ := slowest("0")
	with, s := slowest("1")
	t.Logf("slowest write: %v without, %v with %d discarded buckets; %d batches", without, with, s.DiscardedBuckets, s.Batches)
	if s.DiscardedBuckets < 10 || s.Batches < 20 {
		t.Errorf("%d buckets were discarded, %d batches made", s.DiscardedBuckets, s.Batches)
	}
	if with > 2*without+time.Millisecond || with > 100*time.Millisecond {
		t.Errorf("a write took %v, without discards the slowest took %v", with, without)
	}
}

// What a deleted volume had is discarded, all of it.
func TestDiscardOfDeletedVolume(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		if err := b.set.SetAttribute(ctx, "cache", "discard", "1"); err != nil {
			return err
		}
		mark := bytes.Repeat([]byte("a deleted volume"), 4096)
		_, err := b.set.CreateFlash(ctx, "flash", 1<<20)
		if err != nil {
			return err
		}
		v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "flash", Flash: "flash"})
		for off := int64(0); off < 1<<20 && err == nil; off += int64(len(mark)) {
			err = v.WriteAt(ctx, mark, off, FUA)
		}
		if err != nil {
			return err
		}
		has := func() int {
			io, err := blockdev.NewIO(b.cache, 1)
			if err != nil {
				return -1
			}
			defer io.Close()
			p := make([]byte, b.cache.Info().Size)
			for at := 0; at < len(p); at += 64 << 10 {
				if err := io.ReadAt(p[at:min(at+64<<10, len(p))], int64(at)); err != nil {
					return -1
				}
			}
			return bytes.Count(p, mark[:16])
		}
		if n := has(); n < 1<<16 {
			return fmt.Errorf("%d marks on the disk", n)
		}
		if err := errors.Join(b.set.CloseVolume(ctx, "flash"), b.set.DeleteFlash(ctx, "flash")); err != nil {
			return err
		}
		b.rt.Sleep(5 * time.Minute)
		if n := has(); n != 0 {
			return fmt.Errorf("%d marks are left on the disk; %+v", n, b.set.Stats())
		}
		return nil
	})
}
