package ubcache

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/rt"
)

// The flush that comes before a superblock's first sector may be the one to which the device says that it has lost
// writes: whoever flushes next is told.
func TestFlushErrorOfTheSuperblockIsTold(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), v.WriteAt(ctx, page('A'), 0, FUA), v.WriteBack(ctx)); err != nil {
			return err
		}
		if err := errors.Join(v.WriteAt(ctx, page('B'), 0, FUA), hold(v, true)); err != nil { // DIRTY again
			return err
		}
		if err := v.WriteZeroes(ctx, 4<<20, 4096, 0); err != nil {
			return err
		}
		remove := b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpFlush}, Count: 1})
		_ = b.attribute("cache_mode", "writethrough")
		if n := remove(); n != 1 {
			return fmt.Errorf("%d flushes failed, want 1", n)
		}
		if err := v.Flush(ctx); err == nil {
			return errors.New("all is well, although a flush of the backing device failed since the write")
		}
		return v.Flush(ctx) // once is enough
	})
}

// WriteBack ends, and says what cannot be written back, also where others go on writing.
func TestWriteBackOfABadRangeBesideAWriter(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true), v.WriteAt(ctx, page('A'), 0, FUA)); err != nil {
			return err
		}
		b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Off: crashOffset, Len: 4096})
		var group rt.WaitGroup
		group.Init(b.rt)
		over := false
		var failed error
		group.Go("writer", func() {
			for i := int64(0); !over && failed == nil; i++ {
				failed = v.WriteAt(ctx, page('B'), 1<<20+i%100*8192, 0)
				b.rt.Sleep(20 * time.Millisecond)
			}
		})
		c, cancel := b.rt.WithTimeout(ctx, 5*time.Minute)
		defer cancel()
		begin := b.rt.Now()
		err := v.WriteBack(c)
		took := b.rt.Now() - begin
		over = true
		group.Wait()
		b.faults[1].Clear()
		if we := (*WriteBackError)(nil); !errors.As(err, &we) || took > time.Minute {
			return fmt.Errorf("WriteBack took %v: %v", took, err)
		}
		return failed
	})
}

// Where the set's blocks are smaller than those of the backing device, a power cut may leave a part of one of these dirty:
// half of the clean keys of a batch are in the journal. It can be written back nevertheless.
func TestPartOfABlockIsDirty(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		dev, err := blockdev.Memory(8<<20, blockdev.MemoryOptions{Runtime: b.rt, LogicalBlock: 4096, PhysicalBlock: 4096})
		if err != nil {
			return err
		}
		if _, err := offline.Format(ctx, offline.FormatOptions{Backing: []blockdev.Device{dev}, Block: 4096}); err != nil {
			return err
		}
		v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "4k", BackingDevice: dev})
		if err != nil {
			return err
		}
		if err := storeDirty(b.set, v, 0, page('D')[:512]); err != nil {
			return err
		}
		c, cancel := b.rt.WithTimeout(ctx, time.Minute)
		defer cancel()
		return v.WriteBack(c)
	})
}
