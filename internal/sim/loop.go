package sim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A Disk is what a device of a Loop is like.
type Disk struct {
	Size    int64
	Options blockdev.MemoryOptions // but for the runtime
	Latency blockdev.Latency       // zero: that of a fast disk, whose requests overtake one another
}

// fast is the default of Disk.Latency.
var fast = blockdev.Latency{Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond, Jitter: 0.5, Parallel: 8}

// An Env is what one life of a process is given.
type Env struct {
	Runtime *rt.Runtime
	Devices []blockdev.Device // as Loop.Disks; whoever opens queues closes them
	Dir     string            // the runtime directory: it outlives the process, and is empty after a power cut
	Boot    int               // how often the power was cut before
	Life    int               // 0 for Prepare, 1 for Build, then 2, 3...
	Seed    uint64            // of the life
}

// A System is a process that serves volumes.
type System struct {
	Targets []Target // in the order of Loop.Volumes
	// Close ends it in good order; when the power is gone, somehow. After that nothing of it runs, and no queue
	// is open.
	Close func(ctx context.Context) error
	Own   any // the test's
}

// Rest is a set of devices that nobody uses.
type Rest struct {
	Images []*blockdev.MemoryDevice // on the real runtime; they must not be changed
	Kind   Kind                     // how the last life ended
}

// A Loop lets a system die under a load at one operation after the other, and checks what comes back each time. See
// the package comment. Its functions run in simulated goroutines, several loops' at the same time; they return
// errors, and must not call methods of testing.T that end a test.
type Loop struct {
	Seed uint64
	// The first life ends before operation Start, Start+Step, Start+2 Step... that changes something, counted
	// from the beginning of Build, until one comes to its end. Step 0 stands for 1.
	Start, Step int
	// Most bounds the number of cuts, 0 for no bound; negative: only the life that comes to its end.
	Most      int
	Strengths []blockdev.Strength // nil: all three
	Kill      bool                // the process is killed instead; in lives after the first, in two of three
	Lives     int                 // how many lives, default 1, end so, each after the first at an operation that the seed chooses
	Early     bool                // lives after the first end while they start, or soon after

	Disks    []Disk
	Volumes  []Volume
	Workload Workload // Seed and Between are set by the loop

	// Prepare formats the devices, once for all lives, and fills them.
	Prepare func(ctx context.Context, e *Env) error
	// Build starts the first process, Reopen all others. They may fail when the power is gone.
	Build, Reopen func(ctx context.Context, e *Env) (*System, error)
	// Between, if set, is called before each request of the workload, as Workload.Between.
	Between func(ctx context.Context, e *Env, s *System, n int) error
	// Stir, if set, does what makes a cache change without a write, to see that no block changes.
	Stir func(ctx context.Context, e *Env, s *System) error
	// Check, if set, looks at the devices: right after the crash, and after an orderly stop at the end.
	Check func(ctx context.Context, r Rest) error
	// Alone, if set, is called where Check is. It returns, in the order of Volumes, what each holds without its cache:
	// all of it, in memory that stays as it is; nil for one that the devices say must not be used so. It is judged as
	// what the volume's own reads return is, and may differ from that where the History leaves a choice.
	Alone func(r Rest) ([][]byte, error)

	// Limit is the simulated time that a life may take, default 2 h.
	Limit time.Duration
	// Test is the name that messages tell to repeat; Run sets it.
	Test string
}

// A Result says how much a Loop has done.
type Result struct {
	Cuts   int // lives that were cut short
	Images int // what they left, reopened and checked
	Alone  int // volumes that were checked without their cache
	Ops    int // changing operations of the life that came to its end
}

// A Failure is a life that went wrong, and how to see it again.
type Failure struct {
	Seed     uint64
	Cut      int
	Strength string // or "kill", or "stop" after the life that came to its end
	Life     int    // in which it shows
	Err      error
	command  string
}

func (f *Failure) Error() string {
	return fmt.Sprintf("seed %d, cut %d, %s, life %d: %v\nto repeat: %s", f.Seed, f.Cut, f.Strength, f.Life, f.Err, f.command)
}

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Err }

// Run runs the loop and fails the test at the first failure. If the environment asks for one seed, cut and strength
// (see Seeds), it does nothing else.
func (l Loop) Run(t testing.TB) {
	t.Helper()
	l.Test = t.Name()
	only, err := fromEnvironment()
	if err != nil {
		t.Fatal(err)
	}
	if only.seed != nil && *only.seed != l.Seed {
		t.Logf("seed %d: not asked for by %s", l.Seed, variable)
		return
	}
	r, err := l.try(only)
	if err != nil {
		t.Error(err)
	}
	t.Logf("seed %d: %d cuts, %d images checked, %d volumes without their cache, %d operations", l.Seed, r.Cuts, r.Images, r.Alone, r.Ops)
}

// Try runs the loop and returns the first failure, a *Failure.
func (l Loop) Try() (Result, error) { return l.try(only{}) }

func (l Loop) try(only only) (Result, error) {
	if l.Strengths == nil {
		l.Strengths = []blockdev.Strength{blockdev.Prefix, blockdev.Reordered, blockdev.Torn}
	}
	l.Step, l.Lives = max(l.Step, 1), max(l.Lives, 1)
	if l.Limit == 0 {
		l.Limit = 2 * time.Hour
	}
	t := &trial{Loop: l, only: only}
	err := t.all()
	return Result{Cuts: int(t.cuts.Load()), Images: int(t.images.Load()), Alone: int(t.alone.Load()), Ops: int(t.ops.Load())}, err
}

// A trial is one run of a Loop.
type trial struct {
	Loop
	only     only
	prepared []*blockdev.MemoryDevice

	next     atomic.Int64 // number of the next cut
	finished atomic.Bool  // a life came to its end
	cuts     atomic.Int64
	images   atomic.Int64
	alone    atomic.Int64
	ops      atomic.Int64

	mu     sync.Mutex
	failed *Failure // the one with the earliest cut
}

// uncut is the number of the cut that never comes.
const uncut = 1 << 30

// all tries all cuts, on as many threads as there are.
func (t *trial) all() error {
	err := t.prepare()
	defer closeAll(t.prepared)
	if err != nil {
		return t.failure(uncut, "stop", 0, fmt.Errorf("prepare: %w", err))
	}
	if t.only.cut != nil {
		t.job(*t.only.cut)
	} else {
		var g sync.WaitGroup
		for range runtime.GOMAXPROCS(0) {
			g.Go(func() {
				for t.job(t.number()) {
				}
			})
		}
		g.Wait()
	}
	if t.failed != nil {
		return t.failed
	}
	return nil
}

// number returns the next cut to try, negative if there is none.
func (t *trial) number() int {
	if t.finished.Load() {
		return -1
	}
	n := int(t.next.Add(1)) - 1
	switch {
	case t.Most == 0, n < t.Most:
		return t.Start + n*t.Step
	case t.Most < 0 && n == 0:
		return uncut
	}
	return -1
}

// job tries one cut, and reports whether to go on.
func (t *trial) job(cut int) bool {
	if cut < 0 {
		return false
	}
	dir, err := os.MkdirTemp("", "ubcache-sim-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	f := t.lives(cut, dir)
	if f == nil {
		return true
	}
	t.finished.Store(true)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.failed == nil || f.Cut < t.failed.Cut {
		t.failed = f
	}
	return false
}

func (t *trial) failure(cut int, strength string, life int, err error) *Failure {
	var f *Failure
	if errors.As(err, &f) {
		return f
	}
	return &Failure{
		Seed: t.Seed, Cut: cut, Strength: strength, Life: life, Err: err,
		command: command(t.Test, t.Seed, cut, strength),
	}
}

// prepare makes the devices that each first life gets a copy of.
func (t *trial) prepare() error {
	s := rt.NewSim(t.Seed)
	s.Limit = t.Limit
	e := &Env{Runtime: s.Runtime(), Seed: t.Seed}
	for i, d := range t.Disks {
		o := d.Options
		o.Runtime = e.Runtime
		if o.Name == "" {
			o.Name = fmt.Sprintf("disk%d", i)
		}
		m, err := blockdev.Memory(d.Size, o)
		if err != nil {
			return err
		}
		t.prepared = append(t.prepared, m)
		e.Devices = append(e.Devices, m)
	}
	if t.Prepare == nil {
		return nil
	}
	var err error
	if e := s.Run(func() { err = t.Prepare(context.Background(), e) }); e != nil {
		return e
	}
	return err
}

// FillDevice writes to dev, from byte off on, what volume number n holds at first; see Fill.
func FillDevice(dev blockdev.Device, off int64, n int, v Volume) error {
	io, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return err
	}
	p := make([]byte, v.Size)
	Fill(p, n, v.Block, 0)
	return errors.Join(io.WriteAt(p, off, blockdev.FUA), io.Close())
}
