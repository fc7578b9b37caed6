package ubcache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// Case 18 (b): an orderly stop under load, with dirty data and writeback at work. It ends soon; what was acknowledged is
// there, and as much is dirty at the start as was at the end.
func TestStopUnderLoad(t *testing.T) {
	for seed := range uint64(4) {
		simulate(t, seed, time.Hour, breakable(t), func(b *bench) error {
			ctx, v := context.Background(), b.volumes[0]
			if err := errors.Join(b.attribute("cache_mode", "writeback"), b.attribute("writeback_percent", "0")); err != nil {
				return err
			}
			const clients, pages = 8, 48
			var group rt.WaitGroup
			group.Init(b.rt)
			var acked, sent [clients * pages]uint64
			var failed error
			for c := range clients {
				group.Go("client", func() {
					rng := rand.New(rand.NewPCG(seed, uint64(c)))
					for n := uint64(1); failed == nil; n++ {
						i := c*pages + rng.IntN(pages)
						sent[i] = n
						err := v.WriteAt(ctx, pattern(int64(i)*4096, 4096, n), int64(i)*4096, 0)
						if errors.Is(err, blockdev.ErrClosed) {
							return
						}
						if failed = err; err == nil {
							acked[i] = n
						}
						b.rt.Sleep(time.Duration(rng.Int64N(int64(2 * time.Millisecond))))
					}
				})
			}
			b.rt.Sleep(2*time.Second + time.Duration(b.rt.Uint64N(1e9)))
			begin := b.rt.Now()
			err := b.set.Close(ctx)
			took := b.rt.Now() - begin
			group.Wait()
			if err := errors.Join(err, failed); err != nil {
				return err
			}
			left := v.v.DirtySectors()
			if took > 2*time.Second || left == 0 {
				return fmt.Errorf("the stop took %v, and left %d sectors dirty", took, left)
			}
			if err := b.state(ondisk.StateDirty); err != nil {
				return err
			}
			if b.set, err = Open(ctx, Options{CacheDevice: b.cache, RuntimeDir: b.dir}); err != nil {
				return err
			}
			b.set.set.Lock()
			dirty := b.set.set.DirtyLocked(v.v.Inode())
			b.set.set.Unlock()
			if n := b.set.Stats().ReplayedKeys; dirty != left || n != 0 {
				return fmt.Errorf("%d sectors are dirty, %d were; %d keys were replayed", dirty, left, n)
			}
			if err := b.reopen(""); err != nil {
				return err
			}
			got := make([]byte, 4096)
			for i := range acked {
				off := int64(i) * 4096
				if err := b.volumes[0].ReadAt(ctx, got, off); err != nil {
					return err
				}
				n := binary.LittleEndian.Uint64(got[8:])
				if n < acked[i] || n > sent[i] || n > 0 && !bytes.Equal(got, pattern(off, 4096, n)) {
					return fmt.Errorf("offset %d reads as version %d; %d was acknowledged, %d sent", off, n, acked[i], sent[i])
				}
			}
			return nil
		})
	}
}

// Case 18 (d): what is clean is not written again, by WriteBack, Flush or a detach.
func TestCleanSetWritesNothing(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		counts, err := b.count("writeback")
		if err != nil {
			return err
		}
		v := b.volumes[0]
		if err := errors.Join(v.WriteAt(ctx, page('A'), 0, 0), v.WriteBack(ctx), v.Flush(ctx), b.state(ondisk.StateClean)); err != nil {
			return err
		}
		before, begin := counts[1].Total(blockdev.OpWrite), b.rt.Now()
		for range 3 {
			if err := errors.Join(v.WriteBack(ctx), v.Flush(ctx)); err != nil {
				return err
			}
		}
		if after, took := counts[1].Total(blockdev.OpWrite), b.rt.Now()-begin; after != before || took > 100*time.Millisecond {
			return fmt.Errorf("%d writes in %v", after.Ops-before.Ops, took)
		}
		data := counts[1].Counts(blockdev.ForWriteback, blockdev.OpWrite)
		if err := v.Detach(ctx); err != nil {
			return err
		}
		if after := counts[1].Counts(blockdev.ForWriteback, blockdev.OpWrite); after != data {
			return fmt.Errorf("a detach wrote %d bytes back", after.Bytes-data.Bytes)
		}
		return nil
	})
}

// Case 24: a flush by one client covers what another was told, whatever is lost in a power cut; so does a write with FUA
// for itself. In all modes.
func TestFlushOfOtherQueues(t *testing.T) {
	for mode := range modes {
		for _, strength := range []blockdev.Strength{blockdev.Reordered, blockdev.Torn} {
			for seed := range uint64(4) {
				simulate(t, seed, time.Hour, breakable(t), func(b *bench) error {
					v := b.volumes[0]
					if err := errors.Join(b.attribute("cache_mode", modes[mode]), hold(v, seed%2 == 0)); err != nil {
						return err
					}
					var ios [3]*blockdev.IO
					for i := range ios {
						io, err := blockdev.NewIO(v.v, 4)
						if err != nil {
							return err
						}
						defer io.Close()
						ios[i] = io
					}
					for off := int64(0); off < 512<<10; off += 16 << 10 {
						if err := ios[off>>14&1].WriteAt(pattern(off, 8192, 1), off, 0); err != nil {
							return err
						}
					}
					if err := ios[2].Flush(); err != nil {
						return err
					}
					for off := int64(8192); off < 512<<10; off += 16 << 10 {
						if err := ios[off>>14&1].WriteAt(pattern(off, 4096, 2), off, blockdev.FUA); err != nil {
							return err
						}
						if err := ios[2].WriteAt(pattern(off-8192, 512, 2), off-8192, 0); err != nil { // not flushed
							return err
						}
					}
					if err := b.cut(strength); err != nil {
						return err
					}
					got := make([]byte, 12<<10)
					for off := int64(0); off < 512<<10; off += 16 << 10 {
						if err := b.volumes[0].ReadAt(context.Background(), got, off); err != nil {
							return err
						}
						old, late := pattern(off, 8192, 1), pattern(off+8192, 4096, 2)
						if !bytes.Equal(got[512:8192], old[512:]) || !bytes.Equal(got[8192:], late) ||
							!bytes.Equal(got[:512], old[:512]) && !bytes.Equal(got[:512], pattern(off, 512, 2)) {
							return fmt.Errorf("%s, %v: offset %d is not what was flushed, nor what came later", modes[mode], strength, off)
						}
					}
					return nil
				})
			}
		}
	}
}

// Case 24: a flush while a thousand writes are queued covers those that were acknowledged, waits for no later one, and does
// not touch the backing device, since nothing was written there.
func TestFlushBesideQueuedWrites(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		counts, err := b.count("writeback")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(hold(v, true), v.WriteAt(ctx, page('A'), 4<<20, FUA)); err != nil {
			return err
		}
		before := counts[1].Total(blockdev.OpFlush).Ops
		const writes = 1000
		var mu rt.Mutex
		mu.Init(b.rt)
		acked := map[int64]bool{}
		flushed := false
		q, err := v.v.NewQueue(writes, func(done []*blockdev.Request) {
			mu.Lock()
			defer mu.Unlock()
			for _, r := range done {
				switch {
				case r.Err != nil:
					err = r.Err
				case !flushed:
					acked[r.Off] = true
				}
			}
		})
		if err != nil {
			return err
		}
		pool := blockdev.NewPool(blockdev.PoolOptions{})
		reqs := make([]*blockdev.Request, writes)
		for i := range reqs {
			off := int64(i) * 1024
			reqs[i] = &blockdev.Request{Op: blockdev.OpWrite, Off: off, Buf: pool.Get(512).Data}
			copy(reqs[i].Buf, pattern(off, 512, 1))
		}
		// What comes to the cache device behind the first six hundred takes very long.
		b.faults[0].Add(blockdev.Fault{
			Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}, Skip: 600, Hang: 20 * time.Minute,
		})
		for len(reqs) > 0 {
			n := min(len(reqs), 50)
			q.Submit(reqs[:n])
			reqs = reqs[n:]
		}
		b.rt.Sleep(100 * time.Microsecond)
		mu.Lock()
		covered := len(acked)
		flushed = true
		mu.Unlock()
		begin := b.rt.Now()
		if err := v.Flush(ctx); err != nil {
			return err
		}
		if took := b.rt.Now() - begin; took > time.Second {
			return fmt.Errorf("the flush took %v", took)
		}
		if covered == 0 || covered > 600 {
			return fmt.Errorf("%d of the writes were acknowledged before the flush", covered)
		}
		if n := counts[1].Total(blockdev.OpFlush).Ops - before; n > 0 {
			return fmt.Errorf("the backing device was flushed %d times, and nothing was written there", n)
		}
		left, err := b.left(blockdev.Reordered)
		if err != nil {
			return err
		}
		for _, f := range b.faults {
			f.Clear()
		}
		b.rt.Sleep(20 * time.Minute)
		if cerr := q.Close(); cerr != nil {
			return cerr
		}
		_ = b.set.Close(ctx)
		b.set, b.dir, b.cache, b.backing = nil, "", left[0], left[1:]
		if err := b.open(""); err != nil {
			return err
		}
		got := make([]byte, 512)
		for off := range acked {
			if err := b.volumes[0].ReadAt(ctx, got, off); err != nil {
				return err
			}
			if !bytes.Equal(got, pattern(off, 512, 1)) {
				return fmt.Errorf("offset %d was acknowledged, then flushed, and reads as %x", off, got[:16])
			}
		}
		return nil
	})
}

// Where something was written to the backing device, a flush reaches it also in writeback mode.
func TestFlushOfTheBackingDevice(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		counts, err := b.count("writeback")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(hold(v, true), v.Flush(ctx)); err != nil {
			return err
		}
		before := counts[1].Total(blockdev.OpFlush).Ops
		if err := errors.Join(v.WriteZeroes(ctx, 0, 4096, 0), v.Flush(ctx)); err != nil {
			return err
		}
		if n := counts[1].Total(blockdev.OpFlush).Ops - before; n != 1 {
			return fmt.Errorf("the backing device was flushed %d times after zeroes that went there", n)
		}
		return nil
	})
}

// full is a small cache before a volume of 64 MiB, in writeback mode.
func full(t *testing.T, backing blockdev.Latency) benchOptions {
	return benchOptions{
		cache: 600 * 64 << 10, bucket: 64 << 10, block: 4096, backing: []int64{64<<20 + crashOffset}, mode: "writeback", dir: t.TempDir(),
		cacheLatency: fast, backingLatency: backing,
	}
}

// fillUp writes until what is written is not dirty any more: the cache is full of dirty data.
func (b *bench) fillUp() error {
	ctx, v := context.Background(), b.volumes[0]
	if err := errors.Join(b.attribute("sequential_cutoff", "0"), hold(v, true)); err != nil {
		return err
	}
	for off := int64(0); off < v.Size(); off += 64 << 10 {
		before := v.Stats().DirtyBytes
		if err := v.WriteAt(ctx, pattern(off, 64<<10, 1), off, 0); err != nil {
			return err
		}
		if v.Stats().DirtyBytes == before {
			if n := b.set.Stats().InUse; n <= 70 || n > 72 {
				return fmt.Errorf("%d percent are in use when nothing becomes dirty any more", n)
			}
			return nil
		}
	}
	return errors.New("the cache never fills up")
}

// enters reports whether what is written now stays in the cache.
func (b *bench) enters() error {
	ctx, v := context.Background(), b.volumes[0]
	rng := rand.New(rand.NewPCG(1, 15))
	begin := b.rt.Now()
	for range 100 {
		off := 48<<20 + rng.Int64N(4096)*4096
		if err := v.WriteAt(ctx, pattern(off, 4096, 2), off, 0); err != nil {
			return err
		}
		in := false
		if err := v.EachState(ctx, off, 4096, func(s BlockState, _, _ int64) bool { in = s == Dirty; return in }); err != nil {
			return err
		}
		if in {
			return nil
		}
		b.rt.Sleep(200 * time.Millisecond)
	}
	return fmt.Errorf("in %v no write has stayed in the cache: %+v", b.rt.Now()-begin, b.set.Stats())
}

// Case 15, first and third run: a cache full of dirty data takes new data again when that was written back, and when the
// mode was switched meanwhile.
func TestFullCacheRecovers(t *testing.T) {
	for _, name := range []string{"written back", "mode switched", "detached"} {
		t.Run(name, func(t *testing.T) {
			simulate(t, 1, time.Hour, full(t, fast), func(b *bench) error {
				ctx, v := context.Background(), b.volumes[0]
				if err := b.fillUp(); err != nil {
					return err
				}
				switch name {
				case "mode switched":
					for _, m := range []string{"none", "writeback"} {
						if err := b.attribute("cache_mode", m); err != nil {
							return err
						}
						for _, off := range []int64{0, 60 << 20} { // over dirty data, and beside it
							if err := errors.Join(v.WriteAt(ctx, pattern(off, 4096, 1), off, 0), v.ReadAt(ctx, make([]byte, 4096), off)); err != nil {
								return err
							}
						}
					}
				case "detached":
					if err := errors.Join(v.Detach(ctx), b.reopen("writeback"), b.attribute("sequential_cutoff", "0")); err != nil {
						return err
					}
					v = b.volumes[0]
				}
				if err := v.WriteBack(ctx); err != nil {
					return err
				}
				begin := b.rt.Now()
				if err := b.enters(); err != nil {
					return err
				}
				if took := b.rt.Now() - begin; took > 10*time.Second {
					return fmt.Errorf("it took %v until a write stayed in the cache", took)
				}
				got := make([]byte, 64<<10)
				for off := int64(0); off < 16<<20; off += int64(len(got)) {
					if err := v.ReadAt(ctx, got, off); err != nil {
						return err
					}
					if !bytes.Equal(got, pattern(off, len(got), 1)) {
						return fmt.Errorf("offset %d reads as %x", off, got[:16])
					}
				}
				return nil
			})
		})
	}
}

// Case 15, first run past 95 percent: a flash-only volume takes what dirty data of the other may not, and nothing enters the
// cache. When it is trimmed, and nothing else is dirty, new writes do.
func TestCacheFullOfFlashRecovers(t *testing.T) {
	simulate(t, 1, time.Hour, full(t, fast), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := b.fillUp(); err != nil {
			return err
		}
		const size = 32 << 20
		if _, err := b.set.CreateFlash(ctx, "flash", size); err != nil {
			return err
		}
		flash, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "flash", Flash: "flash"})
		if err != nil {
			return err
		}
		off := int64(0)
		for ; off < size; off += 64 << 10 {
			if err := flash.WriteAt(ctx, pattern(off, 64<<10, 3), off, 0); errors.Is(err, ErrNoSpace) {
				break
			} else if err != nil {
				return err
			}
		}
		if n := b.set.Stats().InUse; n < 85 || off == size {
			return fmt.Errorf("%d percent are in use", n)
		}
		before := v.Stats().DirtyBytes
		if err := v.WriteAt(ctx, pattern(60<<20, 4096, 2), 60<<20, 0); err != nil {
			return err
		}
		if v.Stats().DirtyBytes != before {
			return errors.New("a write has entered the full cache")
		}
		if err := errors.Join(v.WriteBack(ctx), flash.Discard(ctx, 0, size)); err != nil {
			return err
		}
		begin := b.rt.Now()
		if err := b.enters(); err != nil {
			return err
		}
		if took := b.rt.Now() - begin; took > 10*time.Second {
			return fmt.Errorf("it took %v until a write stayed in the cache", took)
		}
		return nil
	})
}

// Case 15, second run: writes without pause, for a minute, faster than the backing device. They become as fast as that,
// and none fails; nothing stands still for a second.
func TestSustainedOverload(t *testing.T) {
	slow := blockdev.Latency{Read: 2 * time.Millisecond, Write: 2 * time.Millisecond, Flush: 5 * time.Millisecond, Jitter: 0.3, Parallel: 2}
	simulate(t, 1, time.Hour, full(t, slow), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		var group rt.WaitGroup
		group.Init(b.rt)
		begin := b.rt.Now()
		end := begin + time.Minute
		last, longest := begin, time.Duration(0)
		var failed error
		var latencies []time.Duration
		perSecond := map[int]int{}
		for c := range 16 {
			group.Go("writer", func() {
				rng := rand.New(rand.NewPCG(15, uint64(c)))
				for b.rt.Now() < end && failed == nil {
					off, sent := rng.Int64N(v.Size()/4096)*4096, b.rt.Now()
					if err := v.WriteAt(ctx, pattern(off, 4096, 1), off, 0); err != nil {
						failed = err
					}
					now := b.rt.Now()
					longest, last = max(longest, now-last), now
					latencies = append(latencies, now-sent)
					perSecond[int((now-begin)/time.Second)]++
				}
			})
		}
		group.Wait()
		if failed != nil {
			return failed
		}
		slices.Sort(latencies)
		most := latencies[len(latencies)-1]
		t.Logf("%d writes, %d in the first second, %d in the last; latencies %v to %v; the longest pause %v; %+v", len(latencies),
			perSecond[0], perSecond[59], latencies[0], most, longest, v.v.WritebackStatus())
		if longest > time.Second || most > time.Second {
			return fmt.Errorf("a pause of %v, a write of %v", longest, most)
		}
		// The backing device makes a thousand writes a second at most.
		if perSecond[0] < 5000 || perSecond[59] < 200 || perSecond[59] > 1500 {
			return fmt.Errorf("%d writes in the first second, %d in the last", perSecond[0], perSecond[59])
		}
		return nil
	})
}
