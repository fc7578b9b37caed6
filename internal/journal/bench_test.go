package journal

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// usual is a set with 512 KiB buckets and as many journal buckets as one of 8 GiB has.
var usual = layout{buckets: 128, bucket: 1024, block: 8, leaves: 1}

// A benchSet is an owner whose leaves are written in no time.
type benchSet struct {
	mu   rt.Mutex
	j    *Journal
	pin  Pin
	root ondisk.Key
	dev  *blockdev.MemoryDevice
	io   *blockdev.IO
}

func (b *benchSet) JournalHeader(h *Header) { h.Root, h.UUIDBucket, h.Prio = b.root, b.root, 300 }

func (b *benchSet) WriteOldest(context.Context, uint64, uint64) error {
	b.mu.Lock()
	b.j.UnpinLocked(&b.pin)
	b.mu.Unlock()
	return nil
}

// insert journals one key as an insert does.
func (b *benchSet) insert(ctx context.Context, k *[1]ondisk.Key) (uint64, error) {
	res, err := b.j.Reserve(ctx, 3, 1)
	if err != nil {
		return 0, err
	}
	b.mu.Lock()
	seq := b.j.AppendLocked(&res, k[:])
	b.j.PinLocked(&b.pin, seq)
	b.j.ReleaseLocked(&res)
	b.mu.Unlock()
	return seq, b.j.Acknowledge(ctx, seq)
}

func newBenchSet(tb testing.TB, latency *blockdev.Latency) *benchSet {
	b := &benchSet{root: ondisk.NewChild(ondisk.MaxInode, ondisk.MaxOffset, 512, ondisk.MakePtr(1, 1<<20, 0))}
	b.dev = newDisk(tb, usual, rt.New())
	dev := blockdev.Device(b.dev)
	if latency != nil {
		dev = blockdev.NewDelaying(dev, *latency)
	}
	r := blockdev.RuntimeOf(dev)
	b.mu.Init(r)
	var err error
	b.io, err = blockdev.NewIO(dev, 4)
	must(tb, err)
	sb := usual.superblock()
	b.j, err = Open(context.Background(), Config{
		Runtime: r, Lock: &b.mu, Owner: b, Shared: NewShared(),
		Source: Source{IO: b.io, Geometry: ondisk.NewGeometry(sb), Buckets: sb.D[:usual.buckets]},
	}, nil)
	must(tb, err)
	must(tb, b.j.WriteEntry(context.Background()))
	b.mu.Lock()
	b.j.StartedLocked()
	b.mu.Unlock()
	return b
}

func (b *benchSet) close(tb testing.TB) {
	must(tb, b.j.Close(context.Background()))
	must(tb, b.io.Close())
	must(tb, b.dev.Close())
}

// BenchmarkAppend journals keys without asking for durability: entries are written when they are full.
func BenchmarkAppend(b *testing.B) {
	for _, device := range []string{"memory", "nvme"} {
		b.Run(device, func(b *testing.B) {
			var latency *blockdev.Latency
			if device != "memory" {
				l, err := blockdev.LatencyPreset(device)
				must(b, err)
				latency = &l
			}
			s := newBenchSet(b, latency)
			defer s.close(b)
			ctx := context.Background()
			k := [1]ondisk.Key{ondisk.NewExtent(1, 80, 8, ondisk.MakePtr(1, 1000, 0), true)}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.insert(ctx, &k); err != nil {
					b.Fatal(err)
				}
			}
			st := s.j.Stats()
			b.ReportMetric(float64(st.Keys)/float64(max(1, st.Entries)), "keys/entry")
		})
	}
}

// BenchmarkCommit journals keys of which each is waited for, by a number of writers.
func BenchmarkCommit(b *testing.B) {
	for _, device := range []string{"memory", "nvme"} {
		for _, writers := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("%s/writers=%d", device, writers), func(b *testing.B) {
				var latency *blockdev.Latency
				if device != "memory" {
					l, err := blockdev.LatencyPreset(device)
					must(b, err)
					latency = &l
				}
				s := newBenchSet(b, latency)
				defer s.close(b)
				ctx := context.Background()
				var g rt.WaitGroup
				before := s.j.Stats().Entries
				b.ReportAllocs()
				b.ResetTimer()
				for n := range writers {
					g.Go("writer", func() {
						k := [1]ondisk.Key{ondisk.NewExtent(1, 80, 8, ondisk.MakePtr(1, 1000, 0), true)}
						for range (b.N + writers - 1 - n) / writers {
							seq, err := s.insert(ctx, &k)
							if err == nil {
								err = s.j.WaitDurable(ctx, seq)
							}
							if err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				g.Wait()
				b.StopTimer()
				b.ReportMetric(float64(b.N)/float64(max(1, s.j.Stats().Entries-before)), "keys/entry")
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "keys/s")
			})
		}
	}
}

// TestAppendAllocates nothing, entries that are closed and written on the way included.
func TestAppendAllocates(t *testing.T) {
	s := newBenchSet(t, nil)
	defer s.close(t)
	s.j.SetDelay(time.Hour)
	ctx := context.Background()
	k := [1]ondisk.Key{ondisk.NewExtent(1, 80, 8, ondisk.MakePtr(1, 1000, 0), true)}
	round := func() {
		for range 20000 { // some 15 entries
			if _, err := s.insert(ctx, &k); err != nil {
				t.Fatal(err)
			}
		}
		must(t, s.j.Sync(ctx))
	}
	round()
	before := s.j.Stats().Entries
	if n := testing.AllocsPerRun(5, round); n > 5 { // what the Go runtime may allocate when goroutines sleep and wake
		t.Errorf("%v allocations in 20000 appends", n)
	} else {
		t.Logf("%v allocations in 20000 appends and %d entries", n, (s.j.Stats().Entries-before)/6)
	}
}
