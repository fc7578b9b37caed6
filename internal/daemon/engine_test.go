package daemon

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/control"
	"github.com/ubcache/ubcache/internal/offline"
)

// realConfig formats a set with volumes a and b, and serves them.
func realConfig(t *testing.T) Config {
	t.Helper()
	dir := t.TempDir()
	image := func(name string, size int64) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c := Config{
		Cache: image("c", 64<<20), Volumes: []Named{{"a", image("a", 64<<20)}, {"b", image("b", 64<<20)}},
		Listen: []string{"unix:" + filepath.Join(dir, "nbd")}, getenv: func(string) string { return "" }, folders: []string{filepath.Join(dir, "run")},
	}
	_, err := ubcache.Format(t.Context(), ubcache.FormatOptions{Cache: c.Cache, Backing: []string{c.Volumes[0].Device, c.Volumes[1].Device}, BucketSize: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A writer overwrites the blocks of a part of a volume, each with its number and version, and reads some back.
type writer struct {
	off                int64    // of the part
	asked, acknowledge []uint64 // versions by block
}

const writerBlocks = 512

func newWriter(off int64) *writer {
	return &writer{off, make([]uint64, writerBlocks), make([]uint64, writerBlocks)}
}

func (w *writer) fill(p []byte, block int, version uint64) {
	clear(p)
	if version == 0 {
		return
	}
	for i := 0; i < len(p); i += 16 {
		binary.LittleEndian.PutUint64(p[i:], uint64(w.off)+uint64(block)<<32)
		binary.LittleEndian.PutUint64(p[i+8:], version)
	}
}

// run writes until an error.
func (w *writer) run(io *blockdev.IO, done *atomic.Int64) error {
	p, q := make([]byte, 4096), make([]byte, 4096)
	for n := uint64(1); ; n++ {
		block := int(n * 2654435761 >> 7 % writerBlocks)
		off := w.off + int64(block)*4096
		if n%4 == 0 {
			if err := io.ReadAt(q, off); err != nil {
				return err
			}
			if w.fill(p, block, w.acknowledge[block]); !bytes.Equal(p, q) {
				return fmt.Errorf("block at %d is not as it was written", off)
			}
			continue
		}
		w.asked[block] = w.acknowledge[block] + 1
		w.fill(p, block, w.asked[block])
		if err := io.WriteAt(p, off, 0); err != nil {
			return err
		}
		w.acknowledge[block] = w.asked[block]
		done.Add(1)
	}
}

// check reads all blocks: each holds what was acknowledged, or what was asked for last.
func (w *writer) check(t *testing.T, io *blockdev.IO) {
	p, q := make([]byte, 4096), make([]byte, 4096)
	for block := range w.asked {
		if err := io.ReadAt(q, w.off+int64(block)*4096); err != nil {
			t.Fatal(err)
		}
		w.fill(p, block, w.acknowledge[block])
		if !bytes.Equal(p, q) {
			w.fill(p, block, w.asked[block])
			if !bytes.Equal(p, q) {
				t.Errorf("block %d of the part at %d: neither version %d nor %d", block, w.off, w.acknowledge[block], w.asked[block])
			}
			w.acknowledge[block] = w.asked[block]
		}
	}
}

// A set that is stopped under load several times: it ends in good order, every acknowledged write is there at the next
// start, the control socket answers all the time, and quickly, and what is left is flawless.
func TestServeSetStopsUnderLoad(t *testing.T) {
	for _, runtime := range []bool{true, false} {
		writes := int64(2000)
		c := realConfig(t)
		if !runtime {
			c.folders = []string{"/nonexistent/run"}
			c.Socket = filepath.Join(t.TempDir(), "s")
			writes = 300 // each waits for the journal
		}
		c.Wrap = func(_, _ string, dev blockdev.Device) blockdev.Device {
			return blockdev.NewDelaying(dev, blockdev.Latency{Flush: time.Millisecond})
		}
		var writers []*writer
		for i := range int64(4) {
			writers = append(writers, newWriter(i*8<<20))
		}
		for range 3 {
			r := serve(t, c)
			var done atomic.Int64
			var all sync.WaitGroup
			for i, w := range writers {
				io := newIO(t, r.dial([]string{"a", "b"}[i%2]))
				w.check(t, io)
				all.Go(func() {
					if err := w.run(io, &done); strings.Contains(err.Error(), "as it was written") {
						t.Error(err)
					}
				})
			}
			ctl := r.control()
			var longest time.Duration
			for done.Load() < writes && !t.Failed() {
				begin := time.Now()
				s, err := ctl.Status(t.Context())
				if err != nil || len(s.Volumes) != 2 {
					t.Fatal(err)
				}
				longest = max(longest, time.Since(begin))
				time.Sleep(time.Millisecond)
			}
			if longest > time.Second {
				t.Errorf("the status took up to %v", longest)
			}
			r.stop()
			all.Wait()
			if strings.Contains(r.log.String(), "level=ERROR") {
				t.Errorf("logged:\n%s", r.log)
			}
		}
		checkSet(t, c)
	}
}

// checkSet lets the checker look at a set at rest.
func checkSet(t *testing.T, c Config) {
	t.Helper()
	dev, err := blockdev.Open(c.Cache, blockdev.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	set, err := offline.Open(t.Context(), dev, offline.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	for _, f := range set.Report.Findings() {
		if f.Severity > offline.Harmless {
			t.Errorf("checker: %v", f)
		}
	}
}

// Numbers that people act on, of two volumes with different loads.
func TestServeSetNumbers(t *testing.T) {
	r := serve(t, realConfig(t))
	ctl := r.control()
	a, b := newIO(t, r.dial("a")), newIO(t, r.dial("b"))
	status := func() *control.Status {
		t.Helper()
		s, err := ctl.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	value := func(n control.Number) int64 {
		v, known := n.Value()
		if !known {
			t.Error("a figure is not told")
		}
		return v
	}
	s := status()
	if s.Total.Cache.HitRatioPercent != nil || s.Volumes[0].Cache.HitRatioPercent != nil {
		t.Error("a hit ratio of no requests")
	}
	p := make([]byte, 8192)
	for _, err := range []error{
		a.WriteAt(p[:4096], 0, 0),  // cached
		a.ReadAt(p[:4096], 0),      // hit
		a.ReadAt(p, 0),             // half in the cache: miss
		b.ReadAt(p[:4096], 32<<20), // miss
		a.Flush(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s = status()
	va, vb := &s.Volumes[0], &s.Volumes[1]
	for _, x := range []struct {
		what      string
		got, want int64
	}{
		{"hits of a", value(va.Cache.Hits), 1},
		{"misses of a", value(va.Cache.Misses), 1},
		{"hits of b", value(vb.Cache.Hits), 0},
		{"misses of b", value(vb.Cache.Misses), 1},
		{"all misses", value(s.Total.Cache.Misses), 2},
		{"reads", value(s.Total.Requests.Reads), 3},
		{"bytes read", value(s.Total.Requests.ReadBytes), 4096 + 8192 + 4096},
		{"writes of a", value(va.Requests.Writes), 1},
		{"writes of b", value(vb.Requests.Writes), 0},
		{"dirty data", value(s.Set.DirtyBytes) + value(s.Total.DirtyBytes), 0},
		{"dirty buckets", value(s.Set.Buckets.Dirty), 0},
	} {
		if x.got != x.want {
			t.Errorf("%s: %d, want %d", x.what, x.got, x.want)
		}
	}
	if h := va.Cache.HitRatioPercent; h == nil || *h != 50 {
		t.Errorf("hit ratio of a: %v", h)
	}
	buckets := s.Set.Buckets
	sum := int64(0)
	for _, n := range []control.Number{buckets.Empty, buckets.Clean, buckets.Ready, buckets.Dirty, buckets.Metadata, buckets.Pinned, buckets.Fixed, buckets.Suspect} {
		sum += value(n)
	}
	if sum != value(buckets.Total) || value(buckets.Available) != value(buckets.Empty)+value(buckets.Clean)+value(buckets.Ready) {
		t.Errorf("each bucket is in one state: %d of %+v", sum, buckets)
	}

	// Sequential reads go round the cache, and are counted by that reason; with the limit at 0 they do not.
	read := func(from int64) {
		t.Helper()
		big := make([]byte, 1<<20)
		for off := from; off < from+16<<20; off += int64(len(big)) {
			if err := b.ReadAt(big, off); err != nil {
				t.Fatal(err)
			}
		}
	}
	read(0)
	s = status()
	sequential := value(s.Volumes[1].Bypassed.ByReason["sequential"])
	if sequential == 0 || value(s.Volumes[1].Bypassed.Bytes) < 8<<20 || value(s.Volumes[0].Bypassed.ByReason["sequential"]) != 0 {
		t.Errorf("bypassed: %+v", s.Volumes[1].Bypassed)
	}
	if _, err := ctl.SetAttribute(t.Context(), "b", "sequential_cutoff", "0"); err != nil {
		t.Fatal(err)
	}
	read(16 << 20)
	if n := value(status().Volumes[1].Bypassed.ByReason["sequential"]); n != sequential {
		t.Errorf("%d bypassed with the limit at 0, %d before", n, sequential)
	}
}

// A set whose cache device takes no more writes: requests fail, the status says why, and the end is in order and says
// it too.
func TestServeSetThatFails(t *testing.T) {
	c := realConfig(t)
	var cache *blockdev.Faulty
	c.Wrap = func(role, _ string, dev blockdev.Device) blockdev.Device {
		if role != "cache" {
			return dev
		}
		cache = blockdev.NewFaulty(dev, 1)
		return cache
	}
	r := serve(t, c)
	ctl := r.control()
	io := newIO(t, r.dial("a"))
	p := make([]byte, 4096)
	if err := io.WriteAt(p, 0, blockdev.FUA); err != nil {
		t.Fatal(err)
	}
	cache.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite, blockdev.OpFlush}})
	failed := ""
	for begin := time.Now(); failed == "" && time.Since(begin) < 30*time.Second; time.Sleep(10 * time.Millisecond) {
		io.WriteAt(p, 0, blockdev.FUA)
		s, err := ctl.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		failed = s.Set.Failed
	}
	if failed == "" {
		t.Error("the set goes on")
	}
	if err := io.WriteAt(p, 0, blockdev.FUA); err == nil {
		t.Error("a write is acknowledged")
	}
	begin := time.Now()
	r.cancel()
	r.cancel = nil
	if err := <-r.ended; err == nil || !strings.Contains(err.Error(), failed) {
		t.Errorf("ended with %v, failed with %s", err, failed)
	}
	if d := time.Since(begin); d > 30*time.Second {
		t.Errorf("took %v", d)
	}
}

// Jobs on a set under load, over a slow disk: cancelled by request, and by the end, which stays bounded; every
// acknowledged write is there at the next start, and after a detach that comes to its end.
func TestServeSetJobsUnderLoad(t *testing.T) {
	ctx, c := t.Context(), realConfig(t)
	c.Wrap = func(role, _ string, dev blockdev.Device) blockdev.Device {
		if role == "cache" {
			return dev
		}
		return blockdev.NewDelaying(dev, blockdev.Latency{Write: 20 * time.Millisecond, Flush: 20 * time.Millisecond})
	}
	w := newWriter(0)
	load := func(r *running, while func(ctl *control.Client)) {
		t.Helper()
		io := newIO(t, r.dial("a"))
		w.check(t, io)
		var done atomic.Int64
		var all sync.WaitGroup
		all.Go(func() {
			if err := w.run(io, &done); strings.Contains(err.Error(), "as it was written") {
				t.Error(err)
			}
		})
		waitFor(t, func() bool { return done.Load() > 300 })
		while(r.control())
		begin := time.Now()
		r.stop()
		if d := time.Since(begin); d > shutdownLimit {
			t.Errorf("stopped after %v", d)
		}
		all.Wait()
		if strings.Contains(r.log.String(), "level=ERROR") || strings.Contains(r.log.String(), "a job does not end") {
			t.Errorf("logged:\n%s", r.log)
		}
	}
	set := func(ctl *control.Client, name, value string) {
		t.Helper()
		if _, err := ctl.SetAttribute(ctx, "a", name, value); err != nil {
			t.Fatal(err)
		}
	}
	start := func(ctl *control.Client, kind string) {
		t.Helper()
		if _, err := ctl.StartJob(ctx, "a", kind); err != nil {
			t.Fatal(err)
		}
	}

	// Cancelled while it drains.
	r := serve(t, c)
	set(r.control(), "cache_mode", "writeback")
	set(r.control(), "writeback_running", "0")
	load(r, func(ctl *control.Client) {
		start(ctl, control.Detach)
		if j, err := ctl.CancelJob(ctx, "a"); err != nil || j.State != "cancelled" {
			t.Errorf("%+v, %v", j, err)
		}
		s, err := ctl.Status(ctx)
		if err != nil || s.Volumes[0].State != "dirty" || s.Volumes[0].Writeback == nil || s.Volumes[0].Writeback.Detaching {
			t.Errorf("%+v, %v", s, err)
		}
	})

	// The end comes first. What was dirty still is.
	load(serve(t, c), func(ctl *control.Client) {
		set(ctl, "writeback_running", "0")
		start(ctl, control.Flush)
	})

	// Detached under load: all is on the disk, and what is written from then on.
	load(serve(t, c), func(ctl *control.Client) {
		start(ctl, control.Detach)
		waitFor(t, func() bool {
			j, err := ctl.Job(ctx, "a")
			return err != nil || j.State != control.Running
		})
		j, err := ctl.Job(ctx, "a")
		if err != nil || j.State != "done" || j.DirtyBytes != control.Num(0) {
			t.Errorf("%+v, %v", j, err)
		}
		if s, err := ctl.Status(ctx); err != nil || s.Volumes[0].State != "no cache" || s.Volumes[0].Writeback != nil {
			t.Errorf("%+v, %v", s, err)
		}
	})
	load(serve(t, c), func(*control.Client) {})
	checkSet(t, c)
}
