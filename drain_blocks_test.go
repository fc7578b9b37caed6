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
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// add4K adds a volume on a device with blocks of 4096 bytes to the set, whose blocks have 512 (case 02 f).
func (b *bench) add4K() (*Volume, error) {
	ctx := context.Background()
	dev, err := blockdev.Memory(8<<20, blockdev.MemoryOptions{Runtime: b.rt, LogicalBlock: 4096, PhysicalBlock: 4096})
	if err != nil {
		return nil, err
	}
	if _, err := offline.Format(ctx, offline.FormatOptions{Backing: []blockdev.Device{dev}, Block: 4096}); err != nil {
		return nil, err
	}
	v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "4k", BackingDevice: dev})
	if err != nil {
		return nil, err
	}
	return v, b.set.SetAttribute(ctx, "4k", "sequential_cutoff", "0")
}

// A block of the backing device of which the cache has a part can be read: the bucket of the other part was evicted.
func TestReadOfABlockThatIsCachedInPart(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		v, err := b.add4K()
		if err != nil {
			return err
		}
		rng := rand.New(rand.NewPCG(1, 1))
		buf := make([]byte, 32<<10)
		for i := range int64(5000) {
			if i%50 == 0 { // moves the write points of the other volume by one sector
				if err := b.volumes[0].WriteAt(ctx, page('x')[:512], i*512, 0); err != nil {
					return err
				}
			}
			n := 4096 * (1 + rng.Int64N(8))
			off := rng.Int64N(v.Size()-n) / 4096 * 4096
			if err := v.ReadAt(ctx, buf[:n], off); err != nil {
				return fmt.Errorf("read %d: %w", i, err)
			}
			b.rt.Sleep(time.Millisecond)
		}
		return nil
	})
}

// A write for a part of which there is no room, in the middle of a block of the backing device, succeeds.
func TestRoomThatEndsWithinABlock(t *testing.T) {
	for m := range int64(120) { // in one of these the last bucket that is ready is one that another volume has begun
		roomThatEnds(t, m)
		if t.Failed() {
			return
		}
	}
}

func roomThatEnds(t *testing.T, m int64) {
	t.Helper()
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		v, err := b.add4K()
		if err != nil {
			return err
		}
		if err := errors.Join(b.attribute("cache_mode", "writeback"), b.set.SetAttribute(ctx, "4k", "cache_mode", "writeback"), hold(v, true), hold(b.volumes[0], true)); err != nil {
			return err
		}
		b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForPrio}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 20 * time.Second})
		var queues []*blockdev.IO // each has a bucket of its own, which it has begun
		for range 3 {
			io, err := blockdev.NewIO(b.volumes[0].v, 1)
			if err != nil {
				return err
			}
			defer io.Close()
			queues = append(queues, io)
		}
		const large = 16 << 10
		for i := int64(0); i < 160; i++ {
			for j, io := range queues {
				if i < m {
					if err := io.WriteAt(page('x')[:512], int64(j)*1<<20+i%4*1024, 0); err != nil {
						return err
					}
				}
			}
			if err := v.WriteAt(ctx, make([]byte, large), i*large, 0); err != nil {
				return fmt.Errorf("write %d of %d: %w", i, m, err)
			}
		}
		return nil
	})
}

// addOffset adds a volume with blocks of 4096 bytes whose data begins at sector 17, as make-bcache allows, on a device
// with blocks of 512, to a set with blocks of 512.
func (b *bench) addOffset() (*Volume, blockdev.Device, error) {
	ctx := context.Background()
	dev, err := blockdev.Memory(8<<20, blockdev.MemoryOptions{Runtime: b.rt})
	if err != nil {
		return nil, nil, err
	}
	slow := blockdev.NewDelaying(dev, blockdev.Latency{Read: 300 * time.Microsecond, Write: 300 * time.Microsecond, Flush: time.Millisecond})
	if _, err := offline.Format(ctx, offline.FormatOptions{Backing: []blockdev.Device{dev}, Block: 4096}); err != nil {
		return nil, nil, err
	}
	io, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return nil, nil, err
	}
	sb, err := cacheset.ReadSuperblock(io)
	if err != nil {
		return nil, nil, err
	}
	sb.Version, sb.Word184 = ondisk.VersionBackingOff, 17
	if err := errors.Join(cacheset.WriteSuperblock(io, sb, io.Flush), io.Close()); err != nil {
		return nil, nil, err
	}
	v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "off", BackingDevice: slow})
	if err != nil {
		return nil, nil, err
	}
	return v, dev, errors.Join(b.set.SetAttribute(ctx, "off", "sequential_cutoff", "0"), b.set.SetAttribute(ctx, "off", "cache_mode", "writeback"))
}

// Blocks of a volume whose data offset is no multiple of its block are written back alone: what a neighbour gets
// meanwhile, by a write that goes round the cache or by another batch, stays.
func TestWriteBackAtAnOddDataOffset(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		v, _, err := b.addOffset()
		if err != nil {
			return err
		}
		rng := rand.New(rand.NewPCG(1, 1))
		for round := range 50 {
			if err := hold(v, true); err != nil {
				return err
			}
			const blocks = 64
			for i := int64(0); i < blocks; i += 2 {
				if err := v.WriteAt(ctx, page('D'), i*4096, 0); err != nil {
					return err
				}
			}
			if err := errors.Join(v.Flush(ctx), b.set.SetAttribute(ctx, "off", "cache_mode", "writearound")); err != nil {
				return err
			}
			var group rt.WaitGroup
			group.Init(b.rt)
			var werr error
			group.Go("writer", func() {
				for i := int64(1); i < blocks; i += 2 {
					werr = errors.Join(werr, v.WriteAt(ctx, page(byte('a'+round%20)), i*4096, FUA))
					b.rt.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
				}
			})
			if err := v.WriteBack(ctx); err != nil {
				return err
			}
			group.Wait()
			if werr != nil {
				return werr
			}
			p := make([]byte, 4096)
			for i := int64(0); i < blocks; i++ {
				want := byte('D')
				if i%2 == 1 {
					want = byte('a' + round%20)
				}
				if err := v.ReadAt(ctx, p, i*4096); err != nil {
					return err
				}
				if !bytes.Equal(p, page(want)) {
					return fmt.Errorf("round %d: block %d reads as %q...%q, was written with FUA as %q", round, i, p[0], p[4095], want)
				}
			}
			if err := b.set.SetAttribute(ctx, "off", "cache_mode", "writeback"); err != nil {
				return err
			}
		}
		return nil
	})
}
