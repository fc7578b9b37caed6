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
)

// A flash-only volume that takes up most of the cache is overwritten at random, several times over: its buckets have less
// and less that is live, and there are always some to write to only because what is left is brought together.
func TestFlashOnlyVolumeNeedsMoving(t *testing.T) {
	const buckets, bucketSize = 1024, 64 << 10
	for _, moving := range []bool{true, false} {
		t.Run(fmt.Sprintf("moving %v", moving), func(t *testing.T) {
			const size = 800 * bucketSize
			simulateFlash(t, buckets, bucketSize, size, func(b *bench) error {
				ctx, v := context.Background(), b.volumes[0]
				b.set.set.SetMoving(moving)
				rng := rand.New(rand.NewPCG(5, 5))
				version := make([]uint64, size/4096)
				var longest time.Duration
				for n := range 4 * size / 4096 {
					i := rng.IntN(len(version))
					if n < len(version) {
						i = n
					}
					version[i]++
					begin := b.rt.Now()
					if err := v.WriteAt(ctx, pattern(int64(i)*4096, 4096, version[i]), int64(i)*4096, 0); err != nil {
						if moving {
							return fmt.Errorf("write %d: %w; %+v", n, err, b.set.set.Info())
						}
						return nil // as expected
					}
					longest = max(longest, b.rt.Now()-begin)
				}
				if !moving {
					return fmt.Errorf("there was room for all without moving: %+v", b.set.set.Info())
				}
				info := b.set.set.Info()
				t.Logf("%d passes moved %d MiB for %d MiB of overwrites and emptied %d buckets; the longest write took %v; %v",
					info.MovePasses, info.MovedSectors>>11, 3*size>>20, info.MovedBuckets, longest, info.Buckets)
				if info.MovedBuckets == 0 || longest > time.Second {
					return fmt.Errorf("the longest write took %v", longest)
				}
				got := make([]byte, 4096)
				for i, n := range version {
					if err := v.ReadAt(ctx, got, int64(i)*4096); err != nil {
						return err
					}
					if !bytes.Equal(got, pattern(int64(i)*4096, 4096, n)) {
						return fmt.Errorf("page %d reads as %x", i, got[:16])
					}
				}
				return nil
			})
		})
	}
}

// What the cache device cannot read of dirty data stays where it is, what it cannot write is tried again; everything else
// is moved, nothing is lost, and the mover does not try for ever without a rest.
func TestMovingOverErrors(t *testing.T) {
	for _, op := range []blockdev.Op{blockdev.OpRead, blockdev.OpWrite} {
		t.Run(op.String(), func(t *testing.T) {
			simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
				ctx := context.Background()
				counts, err := b.count("writeback")
				if err != nil {
					return err
				}
				v := b.volumes[0]
				b.set.set.SetMoving(false)
				if err := errors.Join(b.attribute("sequential_cutoff", "0"), hold(v, true)); err != nil {
					return err
				}
				// Three quarters of each bucket are dirty, then a quarter: the others go to the backing device.
				for off := int64(0); off < 3<<20; off += 8 << 10 {
					if err := v.WriteAt(ctx, pattern(off, 6<<10, 1), off, 0); err != nil {
						return err
					}
				}
				for off := int64(0); off < 3<<20; off += 8 << 10 {
					if err := v.Discard(ctx, off+1024, 5<<10); err != nil {
						return err
					}
				}
				// Some of what is moved first lies there, and some of what it is moved to.
				f := blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForMoving}, Ops: []blockdev.Op{op}, Off: 1 << 20, Len: 64 << 10}
				if op == blockdev.OpWrite {
					f.Off, f.Len = 2<<20, 1<<20
				}
				b.faults[0].Add(f)
				dirty := v.Stats().DirtyBytes
				b.set.set.SetMoving(true)
				b.rt.Sleep(10 * time.Minute)
				info := b.set.set.Info()
				t.Logf("%d sweeps, %d passes, %d sectors, %d buckets, %d errors; %v", info.Table.Sweeps, info.MovePasses, info.MovedSectors, info.MovedBuckets, info.MoveErrors, info.Buckets)
				if info.MovePasses > 1000 || info.MoveErrors == 0 || info.MovedBuckets < 50 || v.Stats().DirtyBytes != dirty {
					return fmt.Errorf("%+v", info.Stats)
				}
				if n := counts[0].Counts(blockdev.ForMoving, blockdev.OpRead).Ops; n > 20000 {
					return fmt.Errorf("%d reads for moving", n)
				}
				got := make([]byte, 1024)
				for off := int64(0); off < 3<<20; off += 8 << 10 {
					if err := v.ReadAt(ctx, got, off); err != nil {
						return err
					}
					if !bytes.Equal(got, pattern(off, 6<<10, 1)[:1024]) {
						return fmt.Errorf("offset %d reads as %x", off, got[:16])
					}
				}
				return nil
			})
		})
	}
}
