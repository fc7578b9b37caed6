package blockdev_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

func mustIO(t testing.TB, d blockdev.Device, depth int) *blockdev.IO {
	t.Helper()
	io, err := blockdev.NewIO(d, depth)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := io.Close(); err != nil {
			t.Error(err)
		}
	})
	return io
}

func TestFaultyByRangeOperationAndCount(t *testing.T) {
	f := blockdev.NewFaulty(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), 1)
	io := mustIO(t, f, 1)
	block := make([]byte, 4096)
	outcome := func() string { // of a read and a write at 0 and at 64 KiB, and a flush
		var s strings.Builder
		for _, err := range []error{
			io.ReadAt(block, 0), io.WriteAt(block, 0, 0), io.ReadAt(block, 65536),
			io.WithPurpose(blockdev.ForJournal).WriteAt(block, 65536, 0), io.Flush(),
		} {
			switch {
			case err == nil:
				s.WriteByte('.')
			case errors.Is(err, unix.EIO):
				s.WriteByte('E')
			case errors.Is(err, unix.ENOSPC):
				s.WriteByte('S')
			default:
				t.Error(err)
			}
		}
		return s.String()
	}
	for _, c := range []struct {
		fault blockdev.Fault
		want  []string
	}{
		{blockdev.Fault{}, []string{"EEEEE", "EEEEE"}},
		{blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Err: unix.ENOSPC}, []string{".S.S."}},
		{blockdev.Fault{Off: 4096, Len: 1 << 19, Ops: []blockdev.Op{blockdev.OpRead, blockdev.OpWrite}}, []string{"..EE."}},
		{blockdev.Fault{Off: 0, Len: 1}, []string{"EE..E"}},
		{blockdev.Fault{Skip: 3, Count: 3}, []string{"...EE", "E...."}},
		{blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForJournal}}, []string{"...E."}},
	} {
		remove := f.Add(c.fault)
		struck := 0
		for _, want := range c.want {
			if got := outcome(); got != want {
				t.Errorf("%+v: %s, want %s", c.fault, got, want)
			}
			struck += 5 - strings.Count(want, ".")
		}
		if n := remove(); n != struck {
			t.Errorf("%+v: struck %d times, want %d", c.fault, n, struck)
		}
		if got := outcome(); got != "....." {
			t.Errorf("after the fault was removed: %s", got)
		}
	}
}

func TestFaultyByProbabilityFollowsItsSeed(t *testing.T) {
	run := func(seed uint64) string {
		f := blockdev.NewFaulty(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), seed)
		io := mustIO(t, f, 1)
		f.Add(blockdev.Fault{Prob: 0.3})
		var s strings.Builder
		for range 200 {
			s.WriteByte("E."[b2i(io.Flush() == nil)])
		}
		return s.String()
	}
	a := run(1)
	if n := strings.Count(a, "E"); n < 30 || n > 90 {
		t.Errorf("%d of 200 failed at a probability of 0.3", n)
	}
	if a != run(1) {
		t.Error("the same seed gives other faults")
	}
	if a == run(2) {
		t.Error("another seed gives the same faults")
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestFaultyHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := blockdev.NewFaulty(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), 1)
		io, err := blockdev.NewIO(f, 1)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		f.Add(blockdev.Fault{Hang: time.Minute, Count: 1})
		if err := io.Flush(); err != nil || time.Since(start) != time.Minute {
			t.Errorf("%v after %v, want none after a minute", err, time.Since(start))
		}
		f.Add(blockdev.Fault{Hang: time.Hour, Count: 1, Err: unix.ETIMEDOUT})
		if err := io.Flush(); !errors.Is(err, unix.ETIMEDOUT) || time.Since(start) != time.Hour+time.Minute {
			t.Errorf("%v after %v, want a timeout after an hour and a minute", err, time.Since(start))
		}
		if err := io.Close(); err != nil {
			t.Error(err)
		}
	})
}

// onSim runs fn in a simulation.
func onSim(t *testing.T, seed uint64, fn func(r *rt.Runtime)) {
	t.Helper()
	sim := rt.NewSim(seed)
	if err := sim.Run(func() { fn(sim.Runtime()) }); err != nil {
		t.Fatal(err)
	}
}

// elapsed runs n operations at once, each with its number, on a device with this latency, and returns how long
// all took.
func elapsed(t *testing.T, l blockdev.Latency, n int, op func(io *blockdev.IO, i int) error) time.Duration {
	t.Helper()
	var took time.Duration
	onSim(t, 1, func(r *rt.Runtime) {
		m, err := blockdev.Memory(64<<20, blockdev.MemoryOptions{Runtime: r})
		if err != nil {
			t.Error(err)
			return
		}
		d := blockdev.NewDelaying(m, l)
		io, err := blockdev.NewIO(d, n)
		if err != nil {
			t.Error(err)
			return
		}
		start := r.Now()
		var g rt.WaitGroup
		g.Init(r)
		for i := range n {
			g.Go("operation", func() {
				if err := op(io, i); err != nil {
					t.Error(err)
				}
			})
		}
		g.Wait()
		took = r.Now() - start
		if err := errors.Join(io.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return took
}

func TestDelaying(t *testing.T) {
	const ms = time.Millisecond
	read := func(io *blockdev.IO, i int) error { return io.ReadAt(make([]byte, 4096), int64(i*7%1000)*8192) }
	flush := func(io *blockdev.IO, _ int) error { return io.Flush() }
	megabyte := func(io *blockdev.IO, i int) error { return io.WriteAt(make([]byte, 1<<20), int64(i)<<20, 0) }
	for _, c := range []struct {
		name     string
		latency  blockdev.Latency
		n        int
		op       func(*blockdev.IO, int) error
		from, to time.Duration
	}{
		{"none", blockdev.Latency{}, 10, read, 0, 0},
		{"one read", blockdev.Latency{Read: 5 * ms}, 1, read, 5 * ms, 5 * ms},
		{"all at once", blockdev.Latency{Read: 5 * ms}, 10, read, 5 * ms, 5 * ms},
		{"one after the other", blockdev.Latency{Read: 5 * ms, Parallel: 1}, 10, read, 50 * ms, 50 * ms},
		{"four at once", blockdev.Latency{Read: 5 * ms, Parallel: 4}, 10, read, 15 * ms, 15 * ms},
		{"flush", blockdev.Latency{Read: time.Second, Flush: 3 * ms}, 2, flush, 3 * ms, 3 * ms},
		{"bandwidth is shared", blockdev.Latency{Write: ms, PerMiB: 10 * ms}, 3, megabyte, 31 * ms, 31 * ms},
		{"jitter", blockdev.Latency{Read: 10 * ms, Jitter: 0.5, Parallel: 1}, 100, read, 900 * ms, 1100 * ms},
	} {
		if took := elapsed(t, c.latency, c.n, c.op); took < c.from || took > c.to {
			t.Errorf("%s: %v, want %v to %v", c.name, took, c.from, c.to)
		}
	}
	discard := func(io *blockdev.IO, i int) error {
		if i > 0 {
			return io.WriteAt(make([]byte, 4096), int64(i)<<20, 0)
		}
		return errors.Join(io.WriteAt(make([]byte, 4096), 0, 0), io.Discard(0, 1<<20))
	}
	for _, c := range []struct {
		exclusive bool
		want      time.Duration
	}{{false, 31 * ms}, {true, 35 * ms}} { // one of the five writes beside it is before the discard
		l := blockdev.Latency{Write: ms, Discard: 30 * ms, Exclusive: c.exclusive}
		during := func(io *blockdev.IO, i int) error {
			if i == 0 {
				return discard(io, 0)
			}
			for range 5 {
				if err := discard(io, i); err != nil {
					return err
				}
			}
			return nil
		}
		if took := elapsed(t, l, 2, during); took != c.want {
			t.Errorf("five writes beside a discard, exclusive %v: %v, want %v", c.exclusive, took, c.want)
		}
	}
	curve := blockdev.Percentiles{{Part: 0, Time: ms}, {Part: 0.9, Time: 3 * ms}, {Part: 1, Time: 103 * ms}}
	if m := curve.Mean(); m != 7100*time.Microsecond {
		t.Errorf("mean %v", m)
	}
	if curve.At(0) != ms || curve.At(0.45) != 2*ms || curve.At(0.9) != 3*ms || curve.At(1) != 103*ms {
		t.Errorf("percentiles: %v %v %v %v", curve.At(0), curve.At(0.45), curve.At(0.9), curve.At(1))
	}
	drawn := func(io *blockdev.IO, _ int) error {
		for i := range 2000 {
			if err := io.WriteAt(make([]byte, 4096), int64(i)*4096, 0); err != nil {
				return err
			}
		}
		return nil
	}
	if took := elapsed(t, blockdev.Latency{Write: time.Hour, Jitter: 1, Writes: &curve}, 1, drawn); took < 2000*6*ms || took > 2000*8*ms {
		t.Errorf("2000 writes of 7.1 ms each: %v", took)
	}
	sequential := func(io *blockdev.IO, _ int) error {
		for i := range 10 {
			if err := io.ReadAt(make([]byte, 4096), int64(i)*4096); err != nil {
				return err
			}
		}
		return nil
	}
	if took := elapsed(t, blockdev.Latency{Read: 10 * ms, Sequential: ms}, 1, sequential); took != 19*ms {
		t.Errorf("sequential: %v, want 19ms", took)
	}
	for _, name := range []string{"nvme", "ssd", "hdd", "network"} {
		l, err := blockdev.LatencyPreset(name)
		if err != nil {
			t.Error(err)
		}
		t.Logf("%s: a read %v, 1000 reads %v", name, elapsed(t, l, 1, read), elapsed(t, l, 1000, read))
	}
	if _, err := blockdev.LatencyPreset("tape"); err == nil {
		t.Error("a preset named tape")
	}
}

func TestTracing(t *testing.T) {
	log := blockdev.NewTraceLog(nil)
	faulty := blockdev.NewFaulty(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), 1)
	cache := mustIO(t, blockdev.NewTracing(faulty, log, blockdev.TraceOptions{Label: "cache", Done: true}), 1)
	backing := mustIO(t, blockdev.NewTracing(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), log, blockdev.TraceOptions{
		Label: "backing", Only: func(r *blockdev.Request) bool { return r.Op != blockdev.OpRead },
	}), 1)
	block := make([]byte, 512)
	_ = cache.WithPurpose(blockdev.ForJournal).WriteAt(block, 4096, blockdev.FUA)
	_ = backing.WithPurpose(blockdev.ForWriteback).WriteAt(block, 0, 0)
	_ = backing.ReadAt(block, 0)
	_ = backing.WriteZeroes(512, 1024, blockdev.NoUnmap|blockdev.FastZero)
	faulty.Add(blockdev.Fault{})
	_ = cache.Flush()
	want := `cache write 4096+512 journal fua
cache done write 4096+512 journal fua
backing write 0+512 writeback
backing zero 512+1024 data nounmap,fastzero
cache flush data
cache done flush data: memory: flush: input/output error
`
	if got := log.Take(); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	if log.Take() != "" {
		t.Error("lines taken twice")
	}
}

func TestCounting(t *testing.T) {
	c := blockdev.NewCounting(mustMemory(t, 1<<20, blockdev.MemoryOptions{}))
	io := mustIO(t, c, 1)
	block := make([]byte, 4096)
	for i := range 3 {
		_ = io.WithPurpose(blockdev.ForBtree).WriteAt(block, int64(i)*4096, 0)
	}
	_ = io.WriteAt(block, 0, 0)
	_ = io.Discard(0, 4096)
	_ = io.Discard(0, 2<<20)
	_ = io.Flush()
	if got := c.Counts(blockdev.ForBtree, blockdev.OpWrite); got != (blockdev.Counts{Ops: 3, Bytes: 3 * 4096}) {
		t.Errorf("btree writes: %+v", got)
	}
	if got := c.Total(blockdev.OpWrite); got != (blockdev.Counts{Ops: 4, Bytes: 4 * 4096}) {
		t.Errorf("writes: %+v", got)
	}
	if got := c.Total(blockdev.OpDiscard); got != (blockdev.Counts{Ops: 2, Bytes: 4096, Errors: 1}) {
		t.Errorf("discards: %+v", got)
	}
	if got := c.Total(blockdev.OpFlush); got != (blockdev.Counts{Ops: 1}) {
		t.Errorf("flushes: %+v", got)
	}
}

// All wrappers on one simulation: the same seed gives the same history, another seed another.
func TestWrappersAreDeterministic(t *testing.T) {
	run := func(seed uint64) (history string) {
		onSim(t, seed, func(r *rt.Runtime) {
			m, err := blockdev.Memory(1<<20, blockdev.MemoryOptions{Runtime: r})
			if err != nil {
				t.Error(err)
				return
			}
			log := blockdev.NewTraceLog(r)
			below := blockdev.NewTracing(m, log, blockdev.TraceOptions{Label: "below"})
			l, _ := blockdev.LatencyPreset("ssd")
			f := blockdev.NewFaulty(blockdev.NewDelaying(below, l), 3)
			f.Add(blockdev.Fault{Prob: 0.1, Hang: time.Millisecond})
			f.Add(blockdev.Fault{Prob: 0.1})
			d, err := blockdev.NewCrashable(f, blockdev.CrashableOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			io, err := blockdev.NewIO(blockdev.NewTracing(d, log, blockdev.TraceOptions{Label: "above", Done: true}), 3)
			if err != nil {
				t.Error(err)
				return
			}
			var g rt.WaitGroup
			g.Init(r)
			for i := range 6 {
				g.Go(fmt.Sprint("writer ", i), func() {
					p := bytes.Repeat([]byte{byte(i)}, 4096)
					for j := range 20 {
						_ = io.WriteAt(p, int64(j)*4096, 0)
						if j%7 == i {
							_ = io.Flush()
						}
					}
				})
			}
			g.Wait()
			if err := io.Close(); err != nil {
				t.Error(err)
			}
			history = log.Take() + r.Now().String()
		})
		return history
	}
	a := run(1)
	if b := run(1); a != b {
		t.Error("the same seed gives another history")
	}
	if b := run(2); a == b {
		t.Error("another seed gives the same history")
	}
	if n := strings.Count(a, "\n"); n < 300 {
		t.Errorf("only %d lines", n)
	}
}
