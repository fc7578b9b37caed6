package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// The load of the demo.
const (
	demoConns    = 4   // connections
	demoDepth    = 4   // requests at a time on each
	demoWrites   = 0.2 // of the requests
	demoZipfS    = 1.1 // a block of rank k is asked for in proportion to (demoZipfV+k)^-demoZipfS
	demoZipfV    = 16
	demoZipfSeed = 1 // all loads draw the same blocks
)

// demoFigures is what a load has measured over some time.
type demoFigures struct {
	took          time.Duration
	reads, writes *hdrhistogram.Histogram // latencies in nanoseconds
	diskReads     int64                   // reads that the disk saw meanwhile
}

func newDemoFigures() *demoFigures {
	h := func() *hdrhistogram.Histogram {
		return hdrhistogram.New(int64(time.Microsecond), int64(time.Minute), 3)
	}
	return &demoFigures{reads: h(), writes: h()}
}

func (f *demoFigures) add(g *demoFigures) {
	f.took += g.took
	f.diskReads += g.diskReads
	f.reads.Merge(g.reads)
	f.writes.Merge(g.writes)
}

func (f *demoFigures) reset() {
	f.took, f.diskReads = 0, 0
	f.reads.Reset()
	f.writes.Reset()
}

// iops is requests a second.
func (f *demoFigures) iops() float64 {
	return float64(f.reads.TotalCount()+f.writes.TotalCount()) / f.took.Seconds()
}

// hits is the share of reads that the disk did not see.
func (f *demoFigures) hits() float64 {
	n := f.reads.TotalCount()
	if n == 0 {
		return 0
	}
	return max(0, 1-float64(f.diskReads)/float64(n)) // a read may be counted a tick before its request is
}

// A demoLoad sends requests to a device for some time and checks every answer.
type demoLoad struct {
	content   *demoContent
	dev       blockdev.Device
	base      int64        // where on dev block 0 lies, in bytes
	diskReads func() int64 // how many reads the disk has seen
}

// run keeps demoConns*demoDepth requests under way for d. Every interval tick gets the figures of that interval,
// which it must not keep. The error is the first of a request, what is wrong with an answer, or ctx's.
func (l *demoLoad) run(ctx context.Context, d, interval time.Duration, tick func(now time.Duration, f *demoFigures)) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var ios []*blockdev.IO
	defer func() {
		for _, o := range ios {
			o.Close()
		}
	}()
	for range demoConns {
		o, err := blockdev.NewIO(l.dev, demoDepth)
		if err != nil {
			return err
		}
		ios = append(ios, o)
	}

	over := make(chan struct{})
	begin := time.Now()
	last, seen := begin, l.diskReads()
	var workers []*demoWorker
	var wg sync.WaitGroup
	for i := range demoConns * demoDepth {
		w := newDemoWorker(l, ios[i%demoConns], uint64(i))
		workers = append(workers, w)
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-over:
					return
				default:
				}
				if err := w.step(); err != nil {
					fail(err)
					return
				}
			}
		})
	}

	collect := func() {
		f := newDemoFigures()
		for _, w := range workers {
			w.take(f)
		}
		now, n := time.Now(), l.diskReads()
		f.took, f.diskReads = now.Sub(last), n-seen
		last, seen = now, n
		tick(now.Sub(begin), f)
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	end := time.NewTimer(d)
	defer end.Stop()
	for running := true; running; {
		select {
		case <-ticker.C:
			if d-time.Since(begin) > interval/2 { // what is left belongs to the last interval
				collect()
			}
		case <-end.C:
			running = false
		case <-ctx.Done():
			running = false
		}
	}
	close(over)
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	collect()
	return nil
}

// A demoWorker does one request after the other.
type demoWorker struct {
	l    *demoLoad
	io   *blockdev.IO
	rand *rand.Rand
	zipf *rand.Zipf

	buf, scratch [demoBlock]byte

	mu sync.Mutex
	f  *demoFigures // since the last take
}

func newDemoWorker(l *demoLoad, o *blockdev.IO, number uint64) *demoWorker {
	r := rand.New(rand.NewPCG(demoZipfSeed, number))
	return &demoWorker{
		l: l, io: o, rand: r, zipf: rand.NewZipf(r, demoZipfS, demoZipfV, uint64(l.content.blocks()-1)),
		f: newDemoFigures(),
	}
}

// draw returns a block: ranks lie scattered over the volume.
func (w *demoWorker) draw() int {
	return int(w.zipf.Uint64() * 2654435761 % uint64(w.l.content.blocks()))
}

// step does one request.
func (w *demoWorker) step() error {
	c := w.l.content
	block := w.draw()
	if w.rand.Float64() >= demoWrites {
		stood := c.beginRead(block)
		begin := time.Now()
		if err := w.io.ReadAt(w.buf[:], w.l.base+int64(block)*demoBlock); err != nil {
			return err
		}
		w.record(w.f.reads, time.Since(begin))
		if err := c.endRead(w.buf[:], block, stood, w.scratch[:]); err != nil {
			return fmt.Errorf("not what was written: %w", err)
		}
		return nil
	}
	version, ok := c.beginWrite(w.buf[:], block)
	for !ok { // another one writes it: the last of two writes at once would be anyone's guess
		block = w.draw()
		version, ok = c.beginWrite(w.buf[:], block)
	}
	begin := time.Now()
	if err := w.io.WriteAt(w.buf[:], w.l.base+int64(block)*demoBlock, 0); err != nil {
		return err
	}
	w.record(w.f.writes, time.Since(begin))
	c.endWrite(block, version)
	return nil
}

func (w *demoWorker) record(h *hdrhistogram.Histogram, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = h.RecordValue(min(int64(d), h.HighestTrackableValue()))
}

// take moves what was recorded to f.
func (w *demoWorker) take(f *demoFigures) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f.add(w.f)
	w.f.reset()
}
