package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A large write comes to its turn where small ones hit its range without pause.
func TestLargeWriteBesideSmallOnes(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := b.attribute("cache_mode", "writearound"); err != nil {
			return err
		}
		var group rt.WaitGroup
		group.Init(b.rt)
		const writers, most = 16, 2000
		var failed error
		small, done := 0, false
		for w := range int64(writers) {
			group.Go("small", func() {
				for !done && failed == nil && small < most {
					if err := v.WriteAt(ctx, page('s'), w*4096, 0); err != nil {
						failed = err
					}
					small++
					b.rt.Sleep(time.Duration(b.rt.Uint64N(20000)))
				}
			})
		}
		b.rt.Sleep(time.Millisecond)
		before, after := small, 0
		group.Go("large", func() {
			if err := v.WriteAt(ctx, make([]byte, writers*4096), 0, 0); err != nil {
				failed = err
			}
			after, done = small, true
		})
		group.Wait()
		if failed == nil && after-before > 2*writers {
			failed = fmt.Errorf("%d small writes by %d clients went before a large one", after-before, writers)
		}
		return failed
	})
}

// Close ends soon after its context does, also where the cache device hangs.
func TestCloseWhereTheCacheHangs(t *testing.T) {
	for _, purpose := range []blockdev.Purpose{blockdev.ForPrio, blockdev.ForJournal} {
		t.Run(purpose.String(), func(t *testing.T) { closeWhereTheCacheHangs(t, purpose) })
	}
}

func closeWhereTheCacheHangs(t *testing.T, purpose blockdev.Purpose) {
	t.Helper()
	simulate(t, 1, 2*time.Hour, breakable(t), func(b *bench) error {
		if err := b.cacheOnDisk(); err != nil {
			return err
		}
		b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{purpose}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 40 * time.Minute})
		ctx, cancel := b.rt.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		begin := b.rt.Now()
		err := b.set.Close(ctx)
		b.set = nil
		if !errors.Is(err, cacheset.ErrHangs) {
			return fmt.Errorf("Close: %v; want ErrHangs", err)
		}
		if took := b.rt.Now() - begin; took > time.Minute {
			return fmt.Errorf("Close had 5 s and took %v", took)
		}
		return nil
	})
}

// A volume that is being opened while the set is closed is not left open.
func TestOpenVolumeBesideClose(t *testing.T) {
	for _, pause := range []time.Duration{0, 3 * time.Millisecond, 12 * time.Millisecond} {
		t.Run(pause.String(), func(t *testing.T) {
			simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
				ctx := context.Background()
				late, err := b.twin(func(sb *ondisk.Superblock) { sb.UUID = ondisk.UUID{9} })
				if err != nil {
					return err
				}
				slow := blockdev.NewDelaying(late, blockdev.Latency{Flush: 5 * time.Millisecond})
				var group rt.WaitGroup
				group.Init(b.rt)
				var v *Volume
				group.Go("open", func() { v, err = b.set.OpenVolume(ctx, VolumeOptions{Name: "late", BackingDevice: slow}) })
				b.rt.Sleep(pause)
				cerr := b.set.Close(ctx)
				b.set = nil
				group.Wait()
				switch {
				case cerr != nil:
					return cerr
				case v != nil && v.WriteAt(ctx, page('q'), 0, 0) == nil:
					return errors.New("a volume of a closed set takes writes")
				case v == nil && !errors.Is(err, ErrClosed):
					return fmt.Errorf("OpenVolume: %v; want ErrClosed", err)
				}
				return nil // the simulation says if anything of the volume still runs
			})
		})
	}
}

// simulateFlash runs fn on a set with one flash-only volume.
func simulateFlash(t *testing.T, buckets, bucket, size int64, fn func(b *bench) error) {
	t.Helper()
	o := benchOptions{
		cache: buckets * bucket, bucket: bucket, block: 512, dir: t.TempDir(),
		cacheLatency: blockdev.Latency{Read: 80 * time.Microsecond, Write: 200 * time.Microsecond, Flush: 1500 * time.Microsecond, Parallel: 32},
	}
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		if _, err := b.set.CreateFlash(context.Background(), "flash", size); err != nil {
			return err
		}
		v, err := b.set.OpenVolume(context.Background(), VolumeOptions{Name: "flash", Flash: "flash"})
		if err != nil {
			return err
		}
		b.volumes = append(b.volumes, v)
		return fn(b)
	})
}

// Writes of a flash-only volume may need more buckets than are ready at a time.
func TestFlashOnlyLargeWrites(t *testing.T) {
	for _, bucket := range []int64{8 << 10, 64 << 10} {
		t.Run(fmt.Sprint(bucket), func(t *testing.T) {
			simulateFlash(t, 2000, bucket, 500*bucket, func(b *bench) error {
				ctx, v := context.Background(), b.volumes[0]
				var group rt.WaitGroup
				group.Init(b.rt)
				const large = 1 << 20
				next, failed := int64(0), error(nil)
				for range 16 {
					group.Go("writer", func() {
						for failed == nil && next+large <= v.Size() {
							off := next
							next += large
							if err := v.WriteAt(ctx, bytes.Repeat([]byte{byte('A' + off/large)}, large), off, 0); err != nil {
								failed = fmt.Errorf("offset %d of %d: %w; %+v", off, v.Size(), err, b.set.Stats())
							}
						}
					})
				}
				group.Wait()
				for off := int64(0); off < next && failed == nil; off += large / 4 {
					failed = b.expect(off, byte('A'+off/large))
				}
				return failed
			})
		})
	}
}

// A flash-only volume larger than the cache runs out of space, which is no failure of the set: what was acknowledged
// is there, and what is discarded makes room.
func TestFlashOnlyFullCache(t *testing.T) {
	const size, part = 8 << 20, 64 << 10
	simulateFlash(t, 600, 8<<10, size, func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		fill := func(c byte) (written int64, err error) {
			for off := int64(0); off+part <= size; off += part {
				if err := v.WriteAt(ctx, bytes.Repeat([]byte{c}, part), off, 0); err != nil {
					return off, err
				}
			}
			return size, nil
		}
		written, err := fill('A')
		if !errors.Is(err, ErrNoSpace) || !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("after %d bytes: %v; want ErrNoSpace", written, err)
		}
		if st := v.Stats(); st.NoRoom != 1 || st.DeclinedNoRoom != 0 {
			return fmt.Errorf("a write found no room, and is not counted once: %+v", st)
		}
		if written < 2<<20 {
			return fmt.Errorf("no space after %d bytes: %+v", written, b.set.Stats())
		}
		if err := b.set.Err(); err != nil {
			return err
		}
		for off := int64(0); off < written; off += part {
			if err := b.expect(off, 'A'); err != nil {
				return err
			}
		}
		if err := v.Discard(ctx, 0, size); err != nil {
			return err
		}
		if again, err := fill('B'); !errors.Is(err, ErrNoSpace) || again < written/2 {
			return fmt.Errorf("after a discard of all there is room for %d bytes, before it was %d: %v", again, written, err)
		}
		return b.expect(0, 'B')
	})
}

// What covers thousands of extents lets others have the set's lock in between.
func TestLookupsBesideLargeRequests(t *testing.T) {
	const pieces = 3000
	ctx := context.Background()
	requests := map[string]struct {
		do    func(v *Volume) error
		count func(s VolumeStats) uint64 // of requests whose extents have been looked up
	}{
		"discard": {func(v *Volume) error { return v.Discard(ctx, 0, pieces*1024) }, func(s VolumeStats) uint64 { return s.Discards }},
		"zeroes":  {func(v *Volume) error { return v.WriteZeroes(ctx, 0, pieces*1024, 0) }, func(s VolumeStats) uint64 { return s.Zeroes }},
		"read": {
			func(v *Volume) error { return v.ReadAt(ctx, make([]byte, pieces*1024), 0) },
			func(s VolumeStats) uint64 { return s.Reads },
		},
	}
	for name, r := range requests {
		t.Run(name, func(t *testing.T) {
			o := breakable(t)
			o.cache, o.bucket = 600*64<<10, 64<<10
			simulate(t, 1, time.Hour, o, func(b *bench) error {
				v := b.volumes[0]
				if err := b.attribute("sequential_cutoff", "0"); err != nil {
					return err
				}
				for i := range int64(pieces) { // no two are neighbours
					if err := v.WriteAt(ctx, page('p')[:512], i*1024, 0); err != nil {
						return err
					}
				}
				var group rt.WaitGroup
				group.Init(b.rt)
				done, failed := false, error(nil)
				group.Go("request", func() { failed, done = r.do(v), true })
				turns := 0
				for !done && r.count(v.Stats()) == 0 {
					turns++
					b.rt.Yield()
				}
				group.Wait()
				if failed == nil && turns < 5 { // two of them before and after
					failed = fmt.Errorf("%d turns for others while %d extents were looked up", turns, 2*pieces)
				}
				return failed
			})
		})
	}
}

// scarce is a device that gives so many queues, and no more.
type scarce struct {
	blockdev.Device
	left int
}

func (s *scarce) Runtime() *rt.Runtime { return blockdev.RuntimeOf(s.Device) }

func (s *scarce) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	if s.left--; s.left < 0 {
		return nil, errors.New("no more queues")
	}
	return s.Device.NewQueue(depth, complete)
}

// A volume that cannot be opened for want of a queue leaves nothing that runs.
func TestOpenWithoutQueues(t *testing.T) {
	for queues := range 8 {
		simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
			ctx := context.Background()
			if err := b.set.CloseVolume(ctx, "v0"); err != nil {
				return err
			}
			s := &scarce{b.backing[0], queues}
			_, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "v0", BackingDevice: s})
			if err == nil {
				return b.set.CloseVolume(ctx, "v0")
			}
			return nil
		})
		if t.Failed() {
			t.Logf("with %d queues", queues)
			return
		}
	}
}

// A discard of all of a large flash-only volume takes little memory, and no time.
func TestDiscardOfALargeFlashVolume(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		const size = 1 << 48 // 256 TiB
		if _, err := b.set.CreateFlash(ctx, "f", size); err != nil {
			return err
		}
		v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "f", Flash: "f"})
		if err != nil {
			return err
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		begin := time.Now()
		if err := v.Discard(ctx, 0, 1<<44); err != nil { // 16 TiB of it
			return err
		}
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
			return fmt.Errorf("%d bytes of memory, %v for a discard of 16 TiB of nothing", n, time.Since(begin))
		}
		return nil
	})
}

// Detach beside Close ends in one of the two.
func TestDetachBesideClose(t *testing.T) {
	for seed := range uint64(40) {
		simulate(t, seed, 10*time.Minute, breakable(t), func(b *bench) error {
			ctx, v := context.Background(), b.volumes[0]
			if err := errors.Join(b.attribute("cache_mode", "writeback"), v.WriteAt(ctx, page('A'), 0, 0)); err != nil {
				return err
			}
			var group rt.WaitGroup
			group.Init(b.rt)
			var err error
			group.Go("detach", func() { err = v.Detach(ctx) })
			b.rt.Sleep(time.Duration(seed) * 100 * time.Microsecond)
			cerr := b.set.Close(ctx)
			group.Wait()
			b.set = nil
			if cerr != nil {
				return fmt.Errorf("close: %w (detach: %v)", cerr, err)
			}
			return errors.Join(b.open(""), b.expect(0, 'A'))
		})
		if t.Failed() {
			t.Logf("seed %d", seed)
			return
		}
	}
}

// A flash-only volume may be closed while it grows: with the race detector this says nothing.
func TestGrowBesideCloseVolume(t *testing.T) {
	ctx := context.Background()
	m, err := blockdev.Memory(600*crashBucket, blockdev.MemoryOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := offline.Format(ctx, offline.FormatOptions{Cache: m, Bucket: crashBucket}); err != nil {
		t.Fatal(err)
	}
	set, err := Open(ctx, Options{CacheDevice: m, RuntimeDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := set.CreateFlash(ctx, "f", 1<<20); err != nil {
		t.Fatal(err)
	}
	size := int64(1 << 20)
	for i := range 60 {
		v, err := set.OpenVolume(ctx, VolumeOptions{Name: "f", Flash: "f"})
		if err != nil {
			t.Fatal(err)
		}
		grown := make(chan error)
		go func() {
			size += 4096
			grown <- set.GrowFlash(ctx, "f", size)
		}()
		time.Sleep(time.Duration(i) * 20 * time.Microsecond)
		if err := errors.Join(v.WriteAt(ctx, make([]byte, 4096), 0, 0), set.CloseVolume(ctx, "f")); err != nil {
			t.Fatal(err)
		}
		t.Log(<-grown)
	}
	if err := set.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// Slots of volumes that are no more can be used again (B 9.4, "dead inodes"), at the latest after a start.
func TestManyFlashVolumesInTurn(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		for i := range 200 {
			name := fmt.Sprint("f", i)
			if _, err := b.set.CreateFlash(ctx, name, 1<<20); err != nil {
				return fmt.Errorf("volume %d, although there is no other: %w", i, err)
			}
			if err := b.set.DeleteFlash(ctx, name); err != nil {
				return err
			}
			if i%20 == 19 {
				if err := b.reopen(""); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// The data of a deleted flash-only volume goes, although that of another cannot.
func TestDeleteFlashBesideABadLeaf(t *testing.T) {
	simulate(t, 1, 30*time.Minute, breakable(t), func(b *bench) error {
		ctx := context.Background()
		for i, name := range []string{"f", "g"} {
			if _, err := b.set.CreateFlash(ctx, name, 8<<20); err != nil {
				return err
			}
			v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: name, Flash: name})
			if err != nil {
				return err
			}
			n := int64(6000)
			if i == 1 {
				n = 100
			}
			for i := range n {
				if err := v.WriteAt(ctx, page('A')[:512], i*1024, 0); err != nil {
					return err
				}
			}
		}
		err := b.set.Close(ctx)
		b.set = nil
		if err != nil {
			return err
		}
		if b.set, err = Open(ctx, Options{CacheDevice: b.cache, RuntimeDir: b.dir, NodeCache: 64 << 10}); err != nil {
			return err
		}
		list := b.set.FlashVolumes()
		s := b.set.set
		s.Lock()
		at := uint64(3000 * 2)
		_, miss := s.LookupLocked(uint32(list[0].Slot), at, at+8)
		for i := uint64(0); miss.IsZero() && i < 2500; i++ {
			at += 2
			_, miss = s.LookupLocked(uint32(list[0].Slot), at, at+8)
		}
		s.Unlock()
		if miss.IsZero() || miss.Level > 0 {
			return fmt.Errorf("no leaf is missing: %v", miss)
		}
		b.faults[0].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(miss.Ptr.Sector()) * 512, Len: int64(miss.Sectors) * 512})
		if err := b.set.DeleteFlash(ctx, "f"); err != nil {
			return err
		}
		b.rt.Sleep(time.Minute)
		if err := b.set.DeleteFlash(ctx, "g"); err != nil {
			return err
		}
		b.rt.Sleep(time.Minute)
		s.Lock()
		defer s.Unlock()
		if n := s.DirtyLocked(uint32(list[1].Slot)); n > 0 {
			return fmt.Errorf("%d sectors of the second volume are still there (%d of the first, whose leaf is bad)", n, s.DirtyLocked(uint32(list[0].Slot)))
		}
		return nil
	})
}
