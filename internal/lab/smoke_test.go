package lab

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// small is a setup that takes a second or two.
func small() Setup {
	s := Defaults()
	s.Policies, s.Depths, s.Rounds, s.RW = []string{"exact"}, []int{1, 32}, 1, "randrw"
	s.CacheBytes, s.BackingBytes, s.BucketBytes, s.Nodes = 64<<20, 96<<20, 8<<10, 20
	s.Runtime, s.GCEvery = Duration(400*time.Millisecond), Duration(100*time.Millisecond)
	return s
}

// sane says what cannot be of a run of small.
func sane(t *testing.T, r *Result) {
	t.Helper()
	for _, x := range r.Runs {
		for name, w := range map[string]*Window{"without": &x.Without, "with": &x.With} {
			l := &w.Latency
			var counted uint64
			var most Duration
			for _, b := range w.Bins {
				counted += b.Count
				most = max(most, b.Max)
				if b.P99 > b.Max {
					t.Errorf("a bin with p99 %v and maximum %v", b.P99, b.Max)
				}
			}
			switch {
			case l.Count == 0 || counted != l.Count:
				t.Errorf("%s: %d requests, in bins %d", name, l.Count, counted)
			case l.P50 <= 0 || l.P50 > l.P99 || l.P99 > l.P999 || l.P999 > l.Max || most != l.Max:
				t.Errorf("%s: %v, in bins %v", name, l, most)
			case w.Took < r.Setup.Runtime || w.Gap <= 0 || w.Gap > w.Took:
				t.Errorf("%s: took %v, longest gap %v", name, w.Took, w.Gap)
			case w.Reads < l.Count/3 || w.Reads > l.Count*2/3:
				t.Errorf("%s: %d of %d are reads", name, w.Reads, l.Count)
			case w.Load.Hits+w.Load.Misses < w.Reads || w.Load.Writes < l.Count-w.Reads:
				t.Errorf("%s: the volume has counted %+v", name, w.Load)
			case w.Bytes != int64(l.Count)*int64(r.Setup.BlockBytes):
				t.Errorf("%s: %d bytes", name, w.Bytes)
			}
		}
		if x.Nodes < r.Setup.Nodes {
			t.Errorf("%d nodes", x.Nodes)
		}
	}
}

func TestExactOnMemory(t *testing.T) {
	s := small()
	s.Runtime = Duration(1500 * time.Millisecond) // a sweep begins within a second
	s.Depths = []int{32}
	stages := map[string]int{}
	r, err := Measure(context.Background(), Config{Setup: s, RuntimeDir: t.TempDir(), Progress: func(p Progress) { stages[p.Stage]++ }})
	if err != nil {
		t.Fatal(err)
	}
	if r.Partial || len(r.Runs) != 1 || len(r.Rows) != 1 || len(stages) != 4 {
		t.Fatalf("partial %v, %d runs, %d rows, progress %v", r.Partial, len(r.Runs), len(r.Rows), stages)
	}
	sane(t, r)
	row := &r.Rows[0]
	if row.Collections == 0 || row.Work.NodesSwept == 0 || row.Work.Verifications == 0 || row.CollectionMax <= 0 {
		t.Errorf("nothing was done: %+v", row)
	}
}

// In a simulation the same seed measures the same.
func TestSimulated(t *testing.T) {
	run := func(seed uint64) *Result {
		sim := rt.NewSim(1)
		var r *Result
		var err error
		simErr := sim.Run(func() {
			s := small()
			s.Seed, s.Runtime = seed, Duration(2*time.Second)
			s.Depths = []int{1}
			cache, backing, merr := Models("nvme,ssd")
			if merr != nil {
				err = merr
				return
			}
			r, err = Measure(context.Background(), Config{
				Setup: s, RT: sim.Runtime(), Open: Delayed(MemoryDevices(s.CacheBytes, s.BackingBytes), cache, backing),
			})
		})
		if err = errors.Join(err, simErr); err != nil {
			t.Fatal(err)
		}
		return r
	}
	a, b, c := run(1), run(1), run(2)
	sane(t, a)
	text := func(r *Result) string {
		var s strings.Builder
		if err := r.WriteJSON(&s); err != nil {
			t.Fatal(err)
		}
		return s.String()
	}
	if text(a) != text(b) {
		t.Error("the same seed has measured something else")
	}
	if !a.Machine.Simulated || a.Runs[0].Without.Latency == c.Runs[0].Without.Latency {
		t.Error("another seed has measured the same")
	}
}

// A stray device answers the reads of one place with what another holds.
type stray struct{ blockdev.Device }

func (d stray) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	q, err := d.Device.NewQueue(depth, complete)
	return strayQueue{q}, err
}

type strayQueue struct{ blockdev.Queue }

func (q strayQueue) Submit(reqs []*blockdev.Request) {
	for _, r := range reqs {
		if r.Op == blockdev.OpRead && r.Off == 3<<12 {
			r.Off = 5 << 12
		}
	}
	q.Queue.Submit(reqs)
}

func TestWrongDataFails(t *testing.T) {
	for _, blank := range []bool{true, false} {
		mem, err := blockdev.Memory(64<<12, blockdev.MemoryOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer mem.Close()
		content := NewContent(1, 64<<12, 4096, blank)
		load := func(dev blockdev.Device, reads float64) error {
			l := Load{RT: rt.New(), Device: dev, Content: content, Depth: 4, Reads: reads, Pool: blockdev.NewPool(blockdev.PoolOptions{}), Limit: 2000}
			return l.Run(context.Background())
		}
		if err := load(mem, 0); err != nil {
			t.Fatal(err)
		}
		if err := load(mem, 0.5); err != nil {
			t.Fatal(err)
		}
		err = load(stray{mem}, 0.5)
		if err == nil || !strings.Contains(err.Error(), "wrong data: sector 0 of block 5") || !strings.Contains(err.Error(), "of block 3 was written last") {
			t.Errorf("wrong data: %v", err)
		}
	}
}

func TestErrorOfARequestFails(t *testing.T) {
	mem, err := blockdev.Memory(64<<12, blockdev.MemoryOptions{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	l := Load{
		RT: rt.New(), Device: mem, Content: NewContent(1, 64<<12, 4096, true), Depth: 4,
		Pool: blockdev.NewPool(blockdev.PoolOptions{}), For: time.Minute,
	}
	if err := l.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "write at ") {
		t.Errorf("writes that are refused: %v", err)
	}
}

// An interruption leaves what was measured by then.
func TestInterrupted(t *testing.T) {
	s := small()
	s.Rounds = 3
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, err := Measure(ctx, Config{Setup: s, Progress: func(p Progress) {
		if p.Round == 2 && p.Depth > 0 && p.Stage == "with collection" {
			cancel()
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if !r.Partial || len(r.Rows) != 2 || len(r.Runs) != 3 || !r.Runs[2].Cut || r.Runs[1].Cut {
		t.Errorf("partial %v, %d rows, %d runs", r.Partial, len(r.Rows), len(r.Runs))
	}
	for _, row := range r.Rows {
		if row.Rounds != 1 {
			t.Errorf("depth %d: a window that was cut short counts", row.Depth)
		}
	}
}

// A window in which nothing was done before the end compares with nothing: no ratio of 0 is made of it.
func TestInterruptedBeforeTheFirstRequest(t *testing.T) {
	s := small()
	s.Depths = []int{1}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	run := rt.New()
	r, err := Measure(ctx, Config{Setup: s, RT: run, Log: func(n LogName) (*LatLog, error) {
		if n.Collecting {
			cancel()
		}
		return NewLatLog(run, nowhere{}, LogOptions{})
	}})
	if err != nil || !r.Partial || len(r.Rows) != 0 {
		t.Errorf("%v, %+v", err, r)
	}
}

// nowhere is a log that nobody reads.
type nowhere struct{}

func (nowhere) Write(p []byte) (int, error) { return len(p), nil }
func (nowhere) Close() error                { return nil }

func TestTooFewNodes(t *testing.T) {
	s := small()
	s.Nodes = 1 << 20
	r, err := Measure(context.Background(), Config{Setup: s})
	if err == nil || !strings.Contains(err.Error(), "grows no more, where 1048576 were asked for") || r == nil || !r.Partial {
		t.Errorf("%v", err)
	}
}

func TestUnknownPolicy(t *testing.T) {
	s := small()
	s.Policies = []string{"exact", "magic"}
	if _, err := Measure(context.Background(), Config{Setup: s}); err == nil || !strings.Contains(err.Error(), `no policy "magic"`) {
		t.Errorf("%v", err)
	}
}
