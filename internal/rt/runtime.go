package rt

import (
	"context"
	crand "crypto/rand"
	"math/rand/v2"
	"runtime"
	"time"
)

// A Runtime is a source of time, randomness and goroutines: the machine's own (New) or a simulated one
// (Sim.Runtime). All methods may be called by several goroutines at the same time; with a simulated runtime by
// its own goroutines only, and by whoever runs the simulation while it does not run.
type Runtime struct {
	start time.Time
	sim   *Sim // nil: real
}

// New returns a real runtime. Its clock begins now.
func New() *Runtime { return &Runtime{start: time.Now()} }

// Simulated reports whether r is simulated. What waits for things outside (system calls, channels, the
// network) checks this when it is made, and refuses: the simulation would stand still meanwhile.
func (r *Runtime) Simulated() bool { return r.sim != nil }

// Now returns the time since the runtime began. It never goes back and is not affected by changes of the wall
// clock.
func (r *Runtime) Now() time.Duration {
	if r.sim != nil {
		return r.sim.nowFor("Now")
	}
	return time.Since(r.start)
}

// WallTime returns the date and time, for what is stored or shown; it may jump in either direction. In a
// simulation it begins at 2026-01-01 00:00 UTC and keeps step with Now.
func (r *Runtime) WallTime() time.Time {
	if r.sim != nil {
		return r.sim.wallTime()
	}
	return time.Now()
}

// Sleep returns after d, or at once (having let others run) if d is zero or less.
func (r *Runtime) Sleep(d time.Duration) {
	if r.sim != nil {
		_ = r.sim.sleep(context.Background(), d)
		return
	}
	if d <= 0 {
		runtime.Gosched()
		return
	}
	time.Sleep(d)
}

// SleepContext is Sleep that ends early, with ctx.Err(), when ctx is done.
func (r *Runtime) SleepContext(ctx context.Context, d time.Duration) error {
	if r.sim != nil {
		return r.sim.sleep(ctx, d)
	}
	if err := ctx.Err(); err != nil || d <= 0 {
		return err
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Go runs fn in a goroutine of its own. The name appears in the reports of a simulation: what the goroutine
// does, in a few words ("journal writer"). Whoever calls Go sees to it that fn ends; see WaitGroup.Go.
func (r *Runtime) Go(name string, fn func()) {
	if r.sim != nil {
		r.sim.spawn(name, fn)
		return
	}
	go fn()
}

// Yield lets other goroutines run first.
func (r *Runtime) Yield() {
	if r.sim != nil {
		r.sim.yield()
		return
	}
	runtime.Gosched()
}

// Uint64 returns a random number. Random numbers of the real runtime are good for spreading and choosing, not
// for secrets; those of Read are good for both.
func (r *Runtime) Uint64() uint64 {
	if r.sim != nil {
		return r.sim.random("Uint64").Uint64()
	}
	return rand.Uint64()
}

// Uint64N returns a random number in [0, n). It panics if n is 0.
func (r *Runtime) Uint64N(n uint64) uint64 {
	if r.sim != nil {
		if n == 0 {
			panic("rt: Uint64N of 0")
		}
		return scale(r.sim.random("Uint64N").Uint64(), n)
	}
	return rand.Uint64N(n)
}

// Float64 returns a random number in [0, 1).
func (r *Runtime) Float64() float64 {
	if r.sim != nil {
		return float64(r.sim.random("Float64").Uint64()<<11>>11) / (1 << 53)
	}
	return rand.Float64()
}

// Read fills p with random bytes, from the system's secure source in the real runtime. It always fills all of
// p and never fails; its results are those of an io.Reader.
func (r *Runtime) Read(p []byte) (int, error) {
	if r.sim != nil {
		src := r.sim.random("Read")
		for i := 0; i < len(p); i += 8 {
			x := src.Uint64()
			for j := i; j < min(i+8, len(p)); j++ {
				p[j] = byte(x)
				x >>= 8
			}
		}
		return len(p), nil
	}
	return crand.Read(p) // ends the program rather than return an error
}

// WithTimeout is context.WithTimeout by this runtime's clock: the context is done after d, with
// context.DeadlineExceeded, or when cancel is called or the parent is done.
//
// In a simulation, contexts with deadlines must come from here; context.WithCancel and the like are fine as long
// as they are cancelled by simulated goroutines.
func (r *Runtime) WithTimeout(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if r.sim != nil {
		return r.sim.withTimeout(parent, d)
	}
	return context.WithTimeout(parent, d)
}

// A Timer calls a function later; see Runtime.AfterFunc.
type Timer struct {
	real *time.Timer
	sim  *simTimer
}

// AfterFunc calls fn in a goroutine of its own after d, unless the timer is stopped before. A timer that waits
// does not keep a simulation going.
func (r *Runtime) AfterFunc(d time.Duration, fn func()) *Timer {
	if r.sim != nil {
		return &Timer{sim: r.sim.afterFunc(d, fn)}
	}
	return &Timer{real: time.AfterFunc(d, fn)}
}

// Stop keeps the timer from firing. It returns false if the timer has fired or was stopped already; in the
// first case fn may be running still: Stop does not wait for it.
func (t *Timer) Stop() bool {
	if t.sim != nil {
		return t.sim.stop()
	}
	return t.real.Stop()
}

// Reset makes the timer fire d from now, whether it was waiting, stopped or has fired. It returns true if it
// was waiting.
func (t *Timer) Reset(d time.Duration) bool {
	if t.sim != nil {
		return t.sim.reset(d)
	}
	return t.real.Reset(d)
}
