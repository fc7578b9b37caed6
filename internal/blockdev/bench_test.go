package blockdev_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// BenchmarkDevice measures random reads and writes of 4 KiB, depth of them at a time, on a file with O_DIRECT:
// the one that BLOCKDEV_BENCH_FILE names, all of whose content is overwritten, or a new one under /var/tmp.
// bench/device.sh compares it with fio.
func BenchmarkDevice(b *testing.B) {
	path := os.Getenv("BLOCKDEV_BENCH_FILE")
	if path == "" {
		path = makeFile(b, diskDir(b), 128<<20)
		writeAll(b, path)
	}
	for _, engine := range []string{blockdev.EngineUring, blockdev.EnginePread} {
		for _, op := range []blockdev.Op{blockdev.OpRead, blockdev.OpWrite} {
			for _, depth := range []int{1, 8, 32, 128} {
				b.Run(fmt.Sprintf("%s/%v/depth=%d", engine, op, depth), func(b *testing.B) {
					d := mustOpen(b, path, blockdev.Options{Engine: engine})
					defer d.Close()
					if !d.Info().Direct {
						b.Skip("no O_DIRECT here")
					}
					benchmarkQueue(b, d, op, depth)
				})
			}
		}
	}
}

// BenchmarkFlush is a write of 4 KiB and a flush, one after the other.
func BenchmarkFlush(b *testing.B) {
	path := makeFile(b, diskDir(b), 16<<20)
	writeAll(b, path)
	for _, engine := range []string{blockdev.EngineUring, blockdev.EnginePread, blockdev.EngineInline} {
		b.Run(engine, func(b *testing.B) {
			d := mustOpen(b, path, blockdev.Options{Engine: engine})
			defer d.Close()
			io := mustIO(b, d, 1)
			p := make([]byte, 4096)
			b.ReportAllocs()
			for i := int64(0); b.Loop(); i++ {
				if err := io.WriteAt(p, i%4096*4096, 0); err != nil {
					b.Fatal(err)
				}
				if err := io.Flush(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkMemory is what the layer itself costs.
func BenchmarkMemory(b *testing.B) {
	for _, depth := range []int{1, 32} {
		b.Run(fmt.Sprintf("read/depth=%d", depth), func(b *testing.B) {
			d := mustMemory(b, 64<<20, blockdev.MemoryOptions{})
			defer d.Close()
			benchmarkQueue(b, d, blockdev.OpRead, depth)
		})
	}
}

// benchmarkQueue keeps depth requests going: whatever completes together is submitted again together.
func benchmarkQueue(b *testing.B, d blockdev.Device, op blockdev.Op, depth int) {
	const size = 4096
	blocks := d.Info().Size / size
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	rng := rand.New(rand.NewPCG(1, uint64(depth)))
	left := b.N // requests to be submitted; complete's, once it has begun
	var done atomic.Int64
	finished := make(chan struct{})
	var q blockdev.Queue
	again := make([]*blockdev.Request, 0, depth)
	q, err := d.NewQueue(depth, func(batch []*blockdev.Request) {
		again = again[:0]
		for _, r := range batch {
			if r.Err != nil {
				b.Error(r.Err)
			}
			if left > 0 {
				left--
				r.Off = rng.Int64N(blocks) * size
				again = append(again, r)
			}
		}
		if len(again) > 0 {
			q.Submit(again)
		}
		if done.Add(int64(len(batch))) == int64(b.N) {
			close(finished)
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	var first []*blockdev.Request
	for range min(depth, b.N) {
		buf := pool.Get(size)
		defer buf.Release()
		first = append(first, &blockdev.Request{Op: op, Off: rng.Int64N(blocks) * size, Buf: buf.Data})
	}
	left -= len(first)
	if d.Info().Engine == blockdev.EnginePread { // what Open has done, and package testing undone
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(8, runtime.NumCPU())))
	}
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime()
	start := time.Now()
	q.Submit(first)
	<-finished
	took := time.Since(start)
	cpu = cpuTime() - cpu
	b.StopTimer()
	b.ReportMetric(float64(b.N)/took.Seconds(), "IOPS")
	b.ReportMetric(float64(cpu.Nanoseconds())/1e3/float64(b.N), "cpu-us/op")
	if err := q.Close(); err != nil {
		b.Error(err)
	}
}

// cpuTime returns the processor time that the process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// writeAll gives every block of a file a place on the disk.
func writeAll(b *testing.B, path string) {
	d := mustOpen(b, path, blockdev.Options{})
	defer d.Close()
	io, err := blockdev.NewIO(d, 1)
	if err != nil {
		b.Fatal(err)
	}
	defer io.Close()
	p := make([]byte, 1<<20)
	for i := range p {
		p[i] = byte(i * 7)
	}
	for off := int64(0); off < d.Info().Size; off += int64(len(p)) {
		if err := io.WriteAt(p, off, 0); err != nil {
			b.Fatal(err)
		}
	}
	if err := io.Flush(); err != nil {
		b.Fatal(err)
	}
}
