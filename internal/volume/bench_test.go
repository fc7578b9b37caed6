package volume

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
)

const benchSize = 256 << 20

// benchVolume makes a volume on memory devices, all of it cached.
func benchVolume(b *testing.B) *Volume {
	b.Helper()
	ctx := context.Background()
	disk := func(size int64) blockdev.Device {
		d, err := blockdev.Memory(size, blockdev.MemoryOptions{})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { d.Close() })
		return d
	}
	cache, back := disk(4*benchSize), disk(benchSize+8192)
	if _, err := offline.Format(ctx, offline.FormatOptions{Cache: cache, Backing: []blockdev.Device{back}, Block: 4096}); err != nil {
		b.Fatal(err)
	}
	set, err := cacheset.Open(ctx, cache, cacheset.Options{Shared: journal.NewShared()})
	if err != nil {
		b.Fatal(err)
	}
	v, err := Open(set, back)
	if err != nil {
		b.Fatal(err)
	}
	v.SetSequentialCutoff(0)
	io, err := blockdev.NewIO(v, 1)
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 1<<20)
	for off := int64(0); off < benchSize; off += int64(len(buf)) {
		if err := io.ReadAt(buf, off); err != nil {
			b.Fatal(err)
		}
	}
	io.Close()
	b.Cleanup(func() {
		if err := v.Close(); err != nil {
			b.Error(err)
		}
		if err := set.Close(ctx); err != nil {
			b.Error(err)
		}
	})
	return v
}

// BenchmarkRequests sends requests of 4 KiB, 32 at a time, one after the other batch; memory devices take no time, so
// what is measured is ours.
func BenchmarkRequests(b *testing.B) {
	for _, op := range []blockdev.Op{blockdev.OpRead, blockdev.OpWrite} {
		b.Run(op.String(), func(b *testing.B) {
			v := benchVolume(b)
			const batch = 32
			done := make(chan int, batch)
			q, err := v.NewQueue(batch, func(list []*blockdev.Request) { done <- len(list) })
			if err != nil {
				b.Fatal(err)
			}
			pool := blockdev.NewPool(blockdev.PoolOptions{})
			reqs := make([]*blockdev.Request, batch)
			for i := range reqs {
				reqs[i] = &blockdev.Request{Op: op, Buf: pool.Get(4096).Data}
			}
			rng := rand.New(rand.NewPCG(1, 1))
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n += batch {
				for i, r := range reqs {
					r.Off = (rng.Int64N(benchSize/4096/batch)*batch + int64(i)) * 4096
				}
				q.Submit(reqs)
				for left := batch; left > 0; {
					left -= <-done
				}
				for _, r := range reqs {
					if r.Err != nil {
						b.Fatal(r.Err)
					}
				}
			}
			b.StopTimer()
			if err := q.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
