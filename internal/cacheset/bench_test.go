package cacheset

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

const million = 1 << 20

// millionExtents makes a set of 512 KiB buckets in memory with a million cached extents of 4 KiB that no two of which
// can be one, and stops it.
func millionExtents(b *testing.B) blockdev.Device {
	b.Helper()
	dev, err := blockdev.Memory(6<<30, blockdev.MemoryOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { dev.Close() })
	ctx := context.Background()
	if _, err := offline.Format(ctx, offline.FormatOptions{Cache: dev, Block: 4096}); err != nil {
		b.Fatal(err)
	}
	s := openBench(b, dev)
	in := Insertion{Pinned: true}
	for i, at := range rand.New(rand.NewPCG(1, 1)).Perm(million) {
		start := uint64(at) * 16
		if i%64 == 0 {
			s.rt.Yield()
		}
		insertExtent(b, s, &in, start)
	}
	closeBench(b, s)
	return dev
}

func openBench(b *testing.B, dev blockdev.Device) *Set {
	b.Helper()
	s, err := Open(context.Background(), dev, Options{})
	if err != nil {
		b.Fatal(err)
	}
	return s
}

func closeBench(b *testing.B, s *Set) {
	b.Helper()
	if err := s.Close(context.Background()); err != nil {
		b.Fatal(err)
	}
}

// insertExtent inserts 8 sectors.
func insertExtent(b *testing.B, s *Set, in *Insertion, start uint64) {
	for {
		s.Lock()
		p, n := s.SpaceLocked(bucket.ForClean, 0, start, 8, 1, 0)
		s.Unlock()
		if n == 8 {
			in.Keys = append(in.Keys[:0], ondisk.NewExtent(0, start+8, 8, p, false))
			break
		}
		s.rt.Yield()
	}
	if err := s.Insert(in); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkOpen starts a set of a million extents; aim: 0.3 s.
func BenchmarkOpen(b *testing.B) {
	dev := millionExtents(b)
	b.ResetTimer()
	for range b.N {
		s := openBench(b, dev)
		b.StopTimer()
		i := s.Info()
		b.ReportMetric(float64(i.NodeBytes)/million, "bytes/extent")
		b.ReportMetric(float64(i.Live)/8/million, "extents/1M")
		closeBench(b, s)
		b.StartTimer()
	}
}

// BenchmarkLookup looks up 4 KiB in a set of a million extents, one lookup a hold of the lock; aim: 1 µs.
func BenchmarkLookup(b *testing.B) {
	s := openBench(b, millionExtents(b))
	rng := rand.New(rand.NewPCG(2, 2))
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		at := rng.Uint64N(million) * 16
		s.Lock()
		p, miss := s.LookupLocked(0, at, at+8)
		good := miss.IsZero() && p.Cached && s.GoodLocked(p.Ptr)
		if good {
			s.TouchLocked(p.Ptr)
		}
		s.Unlock()
		if !good {
			b.Fatalf("sector %d is not there", at)
		}
	}
	b.StopTimer()
	closeBench(b, s)
}

// BenchmarkInsert overwrites 4 KiB in a set of a million extents: room, journal, index, accounts, and beside it the
// writing of nodes and of generations.
func BenchmarkInsert(b *testing.B) {
	s := openBench(b, millionExtents(b))
	rng := rand.New(rand.NewPCG(3, 3))
	in := Insertion{Pinned: true}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		insertExtent(b, s, &in, rng.Uint64N(million)*16)
	}
	b.StopTimer()
	closeBench(b, s)
}

// BenchmarkInsertWhileVerifying is BenchmarkInsert beside a verifier that never rests.
func BenchmarkInsertWhileVerifying(b *testing.B) {
	s := openBench(b, millionExtents(b))
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		for s.Verify(ctx) == nil {
		}
		close(over)
	}()
	rng := rand.New(rand.NewPCG(3, 3))
	in := Insertion{Pinned: true}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		insertExtent(b, s, &in, rng.Uint64N(million)*16)
	}
	b.StopTimer()
	cancel()
	<-over
	b.ReportMetric(float64(s.Info().VerifyPasses)/b.Elapsed().Seconds(), "passes/s")
	if n := s.Info().VerifyMismatches; n > 0 {
		b.Errorf("%d mismatches", n)
	}
	closeBench(b, s)
}
