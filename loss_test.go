package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// cacheOnDisk writes 4 KiB of 'A' at offset 0, and lets time pass until its key is in a leaf on the disk.
func (b *bench) cacheOnDisk() error {
	ctx, v := context.Background(), b.volumes[0]
	if err := v.WriteAt(ctx, page('A'), 0, 0); err != nil {
		return err
	}
	if err := v.Flush(ctx); err != nil {
		return err
	}
	for i := range int64(3) {
		b.rt.Sleep(70 * time.Second)
		if err := v.WriteAt(ctx, page('E'), 1<<20+i<<16, FUA); err != nil {
			return err
		}
	}
	return v.Flush(ctx)
}

const evictPieces = 700 // that evictSome has read, of 4 KiB each, from offset 0 on

// evictSome reads so many small pieces that some are evicted, and returns the offsets of those whose eviction is not
// durable, nor will be for half a minute. The volume holds 'o' all over, and its mode is writearound then.
func (b *bench) evictSome() (evicting []int64, err error) {
	ctx, v, s := context.Background(), b.volumes[0], b.set.set
	if err := errors.Join(b.attribute("sequential_cutoff", "0"), b.attribute("cache_mode", "writearound")); err != nil {
		return nil, err
	}
	if err := v.WriteAt(ctx, bytes.Repeat([]byte{'o'}, int(v.Size())), 0, 0); err != nil {
		return nil, err
	}
	if err := v.Flush(ctx); err != nil {
		return nil, err
	}
	buf := make([]byte, 4096)
	read := func(from, i, n int64) error { // piece i of n, none a neighbour of the one before
		return v.ReadAt(ctx, buf, from+i*389%n*4096)
	}
	for i := range int64(evictPieces) {
		if err := read(0, i, evictPieces); err != nil {
			return nil, err
		}
		if i%50 == 0 {
			b.rt.Sleep(100 * time.Millisecond)
		}
	}
	for i := range int64(3) { // until all is on the disk
		b.rt.Sleep(40 * time.Second)
		if err := v.WriteAt(ctx, page('E'), 7<<20+i<<16, FUA); err != nil {
			return nil, err
		}
	}
	for i := int64(0); i < 400 && b.set.Stats().Empty >= 10; i++ {
		if err := read(3<<20, i, 600); err != nil {
			return nil, err
		}
		if i%20 == 0 {
			b.rt.Sleep(1500 * time.Millisecond)
		}
	}
	b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForPrio}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 30 * time.Second})
	for i := int64(0); i < 600 && len(evicting) == 0; i++ {
		if err := read(3<<20, i, 600); err != nil {
			return nil, err
		}
		s.Lock()
		for off := int64(0); off < evictPieces*4096; off += 4096 {
			if cached, evicts := b.pieceLocked(off); cached && evicts {
				evicting = append(evicting, off)
			}
		}
		s.Unlock()
	}
	if len(evicting) == 0 {
		return nil, errors.New("nothing is being evicted")
	}
	return evicting, nil
}

// pieceLocked reports whether the index has a pointer for 4 KiB of the first volume, and whether a crash would make it
// good again.
func (b *bench) pieceLocked(off int64) (cached, evicts bool) {
	s := b.set.set
	at := uint64(crashOffset+off) / 512
	p, miss := s.LookupLocked(b.volumes[0].v.Inode(), at, at+8)
	cached = miss.IsZero() && p.Cached
	return cached, cached && s.EvictingLocked(p.Ptr)
}

// A leaf is rewritten while generations are not durable: a flushed write over what they evict outlives a power cut
// that comes before the parent names the new leaf.
func TestRewriteBesideEviction(t *testing.T) {
	simulate(t, 1, 2*time.Hour, breakable(t), func(b *bench) error {
		ctx, v, s := context.Background(), b.volumes[0], b.set.set
		evicting, err := b.evictSome()
		if err != nil {
			return err
		}
		victim, isVictim := evicting[0], map[int64]bool{}
		for _, off := range evicting {
			isVictim[off] = true
		}
		root := s.Info().Root // where appends take long
		b.faults[0].Add(blockdev.Fault{
			Ops: []blockdev.Op{blockdev.OpWrite}, Off: int64(root.Ptr.Sector()) * 512, Len: int64(root.Sectors) * 512, Hang: 20 * time.Second,
		})
		begin, rewrites, dropped := b.rt.Now(), b.set.Stats().NodeRewrites, false
		for off := int64(0); off < evictPieces*4096 && !dropped && b.rt.Now()-begin < 20*time.Second; off += 1024 {
			if isVictim[off&^4095] {
				continue
			}
			if err := v.WriteAt(ctx, page('x')[:512], off, 0); err != nil {
				return err
			}
			s.Lock()
			for _, off := range evicting {
				if cached, _ := b.pieceLocked(off); !cached {
					victim, dropped = off, true
				}
			}
			s.Unlock()
		}
		s.Lock()
		_, evicts := b.pieceLocked(victim)
		s.Unlock()
		if !dropped && !evicts || b.set.Stats().NodeRewrites == rewrites {
			return errors.New("no leaf was rewritten while pieces were being evicted")
		}
		if err := v.WriteAt(ctx, page('N'), victim, 0); err != nil {
			return err
		}
		if err := v.Flush(ctx); err != nil {
			return err
		}
		if err := b.cut(blockdev.Prefix); err != nil {
			return err
		}
		return b.expect(victim, 'N')
	})
}

// A miss over what is being evicted is not filled: a write would see the fill, which no crash brings back, and not
// what lies below it, which a crash does.
func TestMissBesideEviction(t *testing.T) {
	simulate(t, 1, 2*time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		evicting, err := b.evictSome()
		if err != nil {
			return err
		}
		victim := evicting[0]
		if err := v.WriteAt(ctx, page('y'), 6<<20, 0); err != nil { // fills wait for a flush from now on
			return err
		}
		if err := b.expect(victim, 'o'); err != nil {
			return err
		}
		b.rt.Sleep(5 * time.Millisecond)
		if err := v.WriteAt(ctx, page('N'), victim, 0); err != nil {
			return err
		}
		if err := b.cut(blockdev.Prefix); err != nil {
			return err
		}
		return b.expect(victim, 'N') // as the backing device, which has accepted it
	})
}

// A write with FUA goes round the cache after another one whose invalidation is not durable yet.
func TestFUARoundTheCacheOutlivesPowerCuts(t *testing.T) {
	t.Run("over dirty data", func(t *testing.T) {
		simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
			ctx := context.Background()
			if err := b.attribute("cache_mode", "writearound"); err != nil {
				return err
			}
			if err := storeDirty(b.set, b.volumes[0], 0, page('D')); err != nil {
				return err
			}
			if err := b.reopen(""); err != nil {
				return err
			}
			if s := b.volumes[0].Stats(); s.DirtyBytes != 4096 || s.State != "dirty" {
				return fmt.Errorf("state %s, %d bytes dirty", s.State, s.DirtyBytes)
			}
			if err := b.volumes[0].WriteZeroes(ctx, 0, 4096, 0); err != nil {
				return err
			}
			if err := b.volumes[0].WriteAt(ctx, page('C'), 0, FUA); err != nil {
				return err
			}
			if err := b.cut(blockdev.Prefix); err != nil {
				return err
			}
			return b.expect(0, 'C')
		})
	})
	t.Run("in the kernel's order", func(t *testing.T) {
		simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
			ctx := context.Background()
			if err := b.cacheOnDisk(); err != nil {
				return err
			}
			if err := errors.Join(b.attribute("crash_stability", "kernel"), b.attribute("cache_mode", "writearound")); err != nil {
				return err
			}
			if err := b.volumes[0].WriteAt(ctx, page('B'), 0, 0); err != nil {
				return err
			}
			if err := b.volumes[0].WriteAt(ctx, page('C'), 0, FUA); err != nil {
				return err
			}
			if err := b.cut(blockdev.Prefix); err != nil {
				return err
			}
			return b.expect(0, 'C')
		})
	})
}

// When the journal has failed no write is acknowledged, also none that finds nothing to invalidate: what the write
// before it has invalidated comes back with the next start.
func TestNoWriteAfterTheJournalFailed(t *testing.T) {
	o := breakable(t)
	o.dir = ""
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := b.cacheOnDisk(); err != nil {
			return err
		}
		if err := b.attribute("cache_mode", "writearound"); err != nil {
			return err
		}
		b.faults[0].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite, blockdev.OpFlush}})
		for i, c := range []byte("BC") {
			if err := v.WriteAt(ctx, page(c), 0, 0); err == nil {
				return fmt.Errorf("write %d was acknowledged; the set: %v", i, b.set.Err())
			}
		}
		b.faults[0].Clear()
		if err := b.set.Close(ctx); err == nil {
			return errors.New("a set that has failed was closed without an error")
		}
		b.set = nil
		return b.open("")
	})
}

// twin makes a device of 1 MiB that has the superblock of the first backing device, unattached, as change has it.
func (b *bench) twin(change func(sb *ondisk.Superblock)) (blockdev.Device, error) {
	m, err := blockdev.Memory(1<<20, blockdev.MemoryOptions{Runtime: b.rt})
	if err != nil {
		return nil, err
	}
	from, err := blockdev.NewIO(b.backing[0], 1)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	sb, err := cacheset.ReadSuperblock(from)
	if err != nil {
		return nil, err
	}
	sb.SetState(ondisk.StateNone)
	sb.SetUUID = ondisk.UUID{}
	change(sb)
	to, err := blockdev.NewIO(m, 1)
	if err != nil {
		return nil, err
	}
	return m, errors.Join(cacheset.WriteSuperblock(to, sb, to.Flush), to.Close())
}

// A snapshot of an open device has its uuid, and must not take its slot from it, which may have dirty data.
func TestSnapshotOfAnOpenDevice(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		if err := storeDirty(b.set, b.volumes[0], 0, page('D')); err != nil {
			return err
		}
		if err := b.reopen(""); err != nil {
			return err
		}
		snapshot, err := b.twin(func(*ondisk.Superblock) {})
		if err != nil {
			return err
		}
		_, err = b.set.OpenVolume(context.Background(), VolumeOptions{Name: "snapshot", BackingDevice: snapshot})
		if !errors.Is(err, ErrAttached) {
			return fmt.Errorf("opening it: %v; want ErrAttached", err)
		}
		if slots := b.set.set.Slots(); slots[b.volumes[0].v.Inode()].Retired() {
			return errors.New("the slot of the open volume was retired")
		}
		if err := b.reopen(""); err != nil {
			return err
		}
		return b.expect(0, 'D')
	})
}

// A device may say once only that it has lost writes: when it says so to the flusher, the next flush tells of it, also
// behind a write with FUA, which answers for itself alone.
func TestFlushErrorIsTold(t *testing.T) {
	fua := func(v *Volume) error { return v.WriteAt(context.Background(), page('B'), 1<<20, FUA) }
	later := map[string]func(v *Volume) error{
		"to a flush":                func(v *Volume) error { return v.Flush(context.Background()) },
		"to a flush behind a write": func(v *Volume) error { return errors.Join(fua(v), v.Flush(context.Background())) },
	}
	for name, try := range later {
		t.Run(name, func(t *testing.T) {
			simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
				if err := b.volumes[0].WriteAt(context.Background(), page('A'), 0, 0); err != nil {
					return err
				}
				remove := b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpFlush}, Count: 1})
				b.rt.Sleep(10 * time.Second)
				if n := remove(); n != 1 {
					return fmt.Errorf("%d flushes failed, want 1", n)
				}
				if err := try(b.volumes[0]); err == nil {
					return errors.New("all is well, although a flush failed since the write")
				}
				return try(b.volumes[0]) // once is enough
			})
		})
	}
	t.Run("not to a write", func(t *testing.T) {
		simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
			ctx, v := context.Background(), b.volumes[0]
			if err := v.WriteAt(ctx, page('A'), 0, 0); err != nil {
				return err
			}
			b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpFlush}, Count: 1})
			b.rt.Sleep(10 * time.Second)
			if err := fua(v); err != nil {
				return err
			}
			if err := v.Flush(ctx); err == nil {
				return errors.New("the flush behind it is told nothing")
			}
			return nil
		})
	})
	t.Run("to a stop", func(t *testing.T) {
		simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
			if err := b.volumes[0].WriteAt(context.Background(), page('A'), 0, 0); err != nil {
				return err
			}
			b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpFlush}, Count: 1})
			b.rt.Sleep(10 * time.Second)
			err := b.set.Close(context.Background())
			b.set = nil
			if err == nil {
				return errors.New("all is well, although a flush failed since the write")
			}
			return nil
		})
	})
}

// The same holds for the cache device: a flush before a node is not repeated until it succeeds.
func TestFlushErrorOfTheCacheStopsTheSet(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		if err := b.cacheOnDisk(); err != nil {
			return err
		}
		if err := b.volumes[0].WriteAt(context.Background(), page('B'), 0, 0); err != nil {
			return err
		}
		remove := b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForBtree}, Ops: []blockdev.Op{blockdev.OpFlush}, Count: 1})
		b.rt.Sleep(2 * time.Minute)
		if n := remove(); n != 1 {
			return fmt.Errorf("%d flushes failed, want 1", n)
		}
		if b.set.Err() == nil {
			return errors.New("the set goes on")
		}
		_ = b.set.Close(context.Background())
		b.set = nil
		return nil
	})
}
