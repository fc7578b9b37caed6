package volume

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/writeback"
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

// A benchLoad sends requests of 4 KiB, 32 at a time, one batch after the other.
type benchLoad struct {
	q    blockdev.Queue
	done chan int
	reqs []*blockdev.Request
	rng  *rand.Rand
}

const benchBatch = 32

func newBenchLoad(b *testing.B, v *Volume, op blockdev.Op) *benchLoad {
	b.Helper()
	l := &benchLoad{done: make(chan int, benchBatch), rng: rand.New(rand.NewPCG(1, 1))}
	q, err := v.NewQueue(benchBatch, func(list []*blockdev.Request) { l.done <- len(list) })
	if err != nil {
		b.Fatal(err)
	}
	l.q = q
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	for range benchBatch {
		l.reqs = append(l.reqs, &blockdev.Request{Op: op, Buf: pool.Get(4096).Data})
	}
	return l
}

// run sends n requests to random places of the first span bytes.
func (l *benchLoad) run(b *testing.B, n int, span int64) {
	for ; n > 0; n -= benchBatch {
		for i, r := range l.reqs {
			r.Off = (l.rng.Int64N(span/4096/benchBatch)*benchBatch + int64(i)) * 4096
		}
		l.q.Submit(l.reqs)
		for left := benchBatch; left > 0; {
			left -= <-l.done
		}
		for _, r := range l.reqs {
			if r.Err != nil {
				b.Fatal(r.Err)
			}
		}
	}
}

func (l *benchLoad) close(b *testing.B) {
	if err := l.q.Close(); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkRequests sends requests to memory devices, which take no time, so what is measured is ours.
func BenchmarkRequests(b *testing.B) {
	for _, op := range []blockdev.Op{blockdev.OpRead, blockdev.OpWrite} {
		b.Run(op.String(), func(b *testing.B) {
			v := benchVolume(b)
			l := newBenchLoad(b, v, op)
			b.ReportAllocs()
			b.ResetTimer()
			l.run(b, b.N, benchSize)
			b.StopTimer()
			l.close(b)
		})
	}
}

// benchDirty is what the benchmarks below write to: buckets that overwrites have left only partly empty take more than
// five times that in the long run, which has to fit below the cut-off of dirty data.
const benchDirty = 64 << 20

// writeBackOnly makes the volume keep what is written as dirty data.
func writeBackOnly(b *testing.B, v *Volume) {
	b.Helper()
	if err := v.SetMode(ondisk.Writeback); err != nil {
		b.Fatal(err)
	}
	if err := v.ChangeWriteback(func(s *writeback.Settings) error { s.Running = false; return nil }); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkWriteback writes to the cache alone.
func BenchmarkWriteback(b *testing.B) {
	v := benchVolume(b)
	writeBackOnly(b, v)
	l := newBenchLoad(b, v, blockdev.OpWrite)
	l.run(b, 2*benchDirty/4096, benchDirty)
	b.ReportAllocs()
	b.ResetTimer()
	l.run(b, b.N, benchDirty)
	b.StopTimer()
	l.close(b)
	if s := v.Stats(); s.Bypassed > 0 || v.DirtySectors() == 0 {
		b.Fatalf("bypassed: %d sectors", s.Bypassed)
	}
}

// BenchmarkDrain brings dirty extents of 4 KiB, one here and one there, to the backing device: one is what is counted.
func BenchmarkDrain(b *testing.B) {
	v := benchVolume(b)
	writeBackOnly(b, v)
	l := newBenchLoad(b, v, blockdev.OpWrite)
	b.ReportAllocs()
	b.ResetTimer()
	var done int64
	for done < int64(b.N) {
		b.StopTimer()
		l.run(b, benchDirty/2/4096, benchDirty)
		done += v.DirtySectors() / 8
		b.StartTimer()
		if err := v.WriteBack(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(done), "ns/extent")
	l.close(b)
}
