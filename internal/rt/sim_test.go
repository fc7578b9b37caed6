package rt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// simulate runs main in a simulation, which must come to its end.
func simulate(t *testing.T, seed uint64, main func(r *Runtime)) *Sim {
	t.Helper()
	s := NewSim(seed)
	if err := s.Run(func() { main(s.Runtime()) }); err != nil {
		t.Fatal(err)
	}
	return s
}

// busy is a workload that uses everything, and writes down what happens in which order.
func busy(r *Runtime, log *bytes.Buffer) {
	note := func(format string, args ...any) {
		fmt.Fprintf(log, "%v "+format+"\n", append([]any{r.Now()}, args...)...)
	}
	var (
		mu    Mutex
		rw    RWMutex
		full  Cond
		sem   Semaphore
		all   WaitGroup
		queue []int
		value int
	)
	mu.Init(r)
	rw.Init(r)
	full.Init(&mu)
	sem.Init(r, 2)
	all.Init(r)
	for i := range 3 {
		all.Go(fmt.Sprint("producer", i), func() {
			for j := range 5 {
				r.Sleep(time.Duration(r.Uint64N(3)) * time.Millisecond)
				mu.Lock()
				queue = append(queue, 10*i+j)
				note("producer %d puts %d", i, j)
				mu.Unlock()
				full.Signal()
			}
		})
		all.Go(fmt.Sprint("consumer", i), func() {
			for range 5 {
				mu.Lock()
				for len(queue) == 0 {
					full.Wait()
				}
				note("consumer %d gets %d", i, queue[0])
				queue = queue[1:]
				mu.Unlock()
				full.Broadcast()
				r.Yield()
			}
		})
		all.Go(fmt.Sprint("reader", i), func() {
			for range 4 {
				rw.RLock()
				seen := value
				r.Yield()
				if seen != value {
					panic("a writer came between")
				}
				note("reader %d sees %d", i, seen)
				rw.RUnlock()
			}
		})
		all.Go(fmt.Sprint("writer", i), func() {
			for range 3 {
				rw.Lock()
				value++
				r.Sleep(time.Microsecond)
				note("writer %d wrote %d", i, value)
				rw.Unlock()
			}
		})
		all.Go(fmt.Sprint("bounded", i), func() {
			ctx, cancel := r.WithTimeout(context.Background(), time.Duration(i)*time.Millisecond)
			defer cancel()
			if err := sem.Acquire(ctx, 2); err != nil {
				note("bounded %d: %v", i, err)
				return
			}
			defer sem.Release(2)
			r.Sleep(3 * time.Millisecond)
			note("bounded %d had it: %v", i, r.SleepContext(ctx, time.Hour))
		})
		r.AfterFunc(time.Duration(i)*time.Millisecond, func() { note("timer %d at %v", i, r.WallTime()) })
	}
	all.Wait()
	b := make([]byte, 11)
	_, _ = r.Read(b)
	note("end %x %v", b, r.Float64())
}

func history(t *testing.T, seed uint64) string {
	t.Helper()
	var log, turns bytes.Buffer
	s := NewSim(seed)
	s.Trace = func(at time.Duration, name string, number int) { fmt.Fprintln(&turns, at, name, number) }
	if err := s.Run(func() { busy(s.Runtime(), &log) }); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(&log, s.Digest(), s.Steps())
	return log.String() + turns.String()
}

func TestSameSeedSameHistory(t *testing.T) {
	for seed := range uint64(30) {
		want := history(t, seed)
		for _, procs := range []int{1, 2, 8} {
			old := runtime.GOMAXPROCS(procs)
			got := history(t, seed)
			runtime.GOMAXPROCS(old)
			if got != want {
				t.Fatalf("seed %d differs with GOMAXPROCS %d:\n%s\nfirst:\n%s", seed, procs, got, want)
			}
		}
	}
}

func TestOtherSeedOtherHistory(t *testing.T) {
	seen := map[string]uint64{}
	for seed := range uint64(30) {
		h := history(t, seed)
		if other, ok := seen[h]; ok {
			t.Errorf("seeds %d and %d have the same history", seed, other)
		}
		seen[h] = seed
	}
}

func TestBusyOnTheRealRuntime(t *testing.T) {
	// The workload notes under different locks, so the log is not read here: what counts is that it ends.
	r := New()
	var mu Mutex
	var all WaitGroup
	n := 0
	for range 8 {
		all.Go("adder", func() {
			for range 1000 {
				mu.Lock()
				n++
				mu.Unlock()
				if n := r.Uint64N(10); n >= 10 {
					panic(n)
				}
			}
		})
	}
	all.Wait()
	if n != 8000 {
		t.Errorf("n = %d", n)
	}
}

func TestEverySwitchIsTried(t *testing.T) {
	// A read, a scheduling point, a write: seeds must exist that lose an update, and others that do not.
	results := map[int]bool{}
	for seed := range uint64(50) {
		n := 0
		simulate(t, seed, func(r *Runtime) {
			var mu Mutex
			mu.Init(r)
			var all WaitGroup
			all.Init(r)
			for range 2 {
				all.Go("adder", func() {
					was := n
					mu.Lock()
					n = was + 1
					mu.Unlock()
				})
			}
			all.Wait()
		})
		results[n] = true
	}
	if !results[1] || !results[2] {
		t.Errorf("results %v", results)
	}
}

func TestDayOfTicksIsShort(t *testing.T) {
	start := time.Now()
	ticks := 0
	s := simulate(t, 1, func(r *Runtime) {
		for range 10 {
			r.Go("ticker", func() {
				for r.Now() < 24*time.Hour {
					r.Sleep(time.Second)
					ticks++
				}
			})
		}
	})
	if s.Runtime().Now() != 24*time.Hour || ticks != 864000 {
		t.Errorf("%d ticks until %v", ticks, s.Runtime().Now())
	}
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("took %v", d)
	}
	if got := s.Runtime().WallTime(); !got.Equal(epoch.AddDate(0, 0, 1)) {
		t.Errorf("wall time %v", got)
	}
}

func TestTimers(t *testing.T) {
	for seed := range uint64(10) {
		var fired []string
		simulate(t, seed, func(r *Runtime) {
			at := func(name string) func() {
				return func() { fired = append(fired, fmt.Sprint(name, r.Now())) }
			}
			r.AfterFunc(3*time.Second, at("c"))
			a := r.AfterFunc(time.Second, at("a"))
			b := r.AfterFunc(2*time.Second, at("b"))
			dropped := r.AfterFunc(time.Hour, at("never"))
			if !b.Stop() || b.Stop() {
				t.Error("Stop does not tell whether the timer waited")
			}
			r.Sleep(90 * time.Second / 60)
			if a.Stop() {
				t.Error("a has fired")
			}
			if a.Reset(time.Second) {
				t.Error("a did not wait")
			}
			if !dropped.Reset(time.Minute) {
				t.Error("it waited")
			}
			r.AfterFunc(0, at("now"))
			r.Sleep(10 * time.Second)
		})
		want := []string{"a1s", "now1.5s", "a2.5s", "c3s"}
		if !slices.Equal(fired, want) {
			t.Fatalf("seed %d: %v, want %v", seed, fired, want)
		}
	}
}

func TestManyTimersFireInOrder(t *testing.T) {
	var times []time.Duration
	simulate(t, 5, func(r *Runtime) {
		var timers []*Timer
		for range 500 {
			timers = append(timers, r.AfterFunc(time.Duration(1+r.Uint64N(100))*time.Millisecond,
				func() { times = append(times, r.Now()) }))
		}
		for i, tm := range timers {
			switch i % 3 {
			case 0:
				tm.Stop()
			case 1:
				tm.Reset(time.Duration(1+r.Uint64N(100)) * time.Millisecond)
			}
		}
		r.Sleep(time.Second)
	})
	if len(times) != 333 || !slices.IsSorted(times) {
		t.Errorf("%d fired, sorted %v", len(times), slices.IsSorted(times))
	}
}

func TestContexts(t *testing.T) {
	for seed := range uint64(20) {
		simulate(t, seed, func(r *Runtime) {
			ctx, cancel := r.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if err := r.SleepContext(ctx, time.Minute); err != context.DeadlineExceeded || r.Now() != time.Second {
				t.Errorf("%v at %v", err, r.Now())
			}
			if d, ok := ctx.Deadline(); !ok || !d.Equal(r.WallTime()) {
				t.Errorf("deadline %v", d)
			}
			child, stop := context.WithCancel(ctx)
			defer stop()
			if child.Err() == nil || context.Cause(child) != context.DeadlineExceeded {
				t.Errorf("child: %v, cause %v", child.Err(), context.Cause(child))
			}

			// A context of the standard library, cancelled by a simulated goroutine.
			ctx, cancel = context.WithCancel(context.Background())
			var mu Mutex
			var cond Cond
			mu.Init(r)
			cond.Init(&mu)
			r.Go("canceller", func() {
				r.Sleep(time.Second)
				cancel()
			})
			mu.Lock()
			if err := cond.WaitContext(ctx); err != context.Canceled || r.Now() != 2*time.Second {
				t.Errorf("%v at %v", err, r.Now())
			}
			if mu.TryLock() {
				t.Error("WaitContext returned without the lock")
			}
			if err := cond.WaitContext(ctx); err != context.Canceled {
				t.Error(err)
			}
			mu.Unlock()
			cond.Signal() // nobody is left in it

			ctx, cancel = r.WithTimeout(context.Background(), time.Second)
			cancel()
			if err := r.SleepContext(ctx, time.Second); err != context.Canceled {
				t.Error(err)
			}
			ctx, cancel = r.WithTimeout(context.Background(), 0)
			defer cancel()
			if ctx.Err() != context.DeadlineExceeded {
				t.Error(ctx.Err())
			}
		})
	}
}

func TestSignalIsNotLostInCancelledWait(t *testing.T) {
	for seed := range uint64(50) {
		simulate(t, seed, func(r *Runtime) {
			var mu Mutex
			var cond Cond
			mu.Init(r)
			cond.Init(&mu)
			ready := false
			ctx, cancel := context.WithCancel(context.Background())
			r.Go("gives up", func() {
				mu.Lock()
				defer mu.Unlock()
				for !ready {
					if cond.WaitContext(ctx) != nil {
						return
					}
				}
			})
			r.Go("persists", func() {
				mu.Lock()
				defer mu.Unlock()
				for !ready {
					cond.Wait()
				}
			})
			r.Sleep(time.Second)
			mu.Lock()
			ready = true
			cancel()
			cond.Signal()
			mu.Unlock()
		})
	}
}

func TestWritersDoNotStarveReaders(t *testing.T) {
	for seed := range uint64(20) {
		simulate(t, seed, func(r *Runtime) {
			var rw RWMutex
			rw.Init(r)
			stop := false
			for range 3 {
				r.Go("writer", func() {
					for !stop {
						rw.Lock()
						r.Yield()
						rw.Unlock()
					}
				})
			}
			for range 10 {
				rw.RLock()
				if rw.TryLock() {
					t.Error("locked for writing beside a reader")
				}
				rw.RUnlock()
			}
			for !rw.TryRLock() {
				r.Yield()
			}
			rw.RUnlock()
			stop = true
		})
	}
}

func TestCondOfRWMutex(t *testing.T) {
	simulate(t, 3, func(r *Runtime) {
		var rw RWMutex
		var cond Cond
		rw.Init(r)
		cond.InitRW(&rw)
		done := false
		r.Go("setter", func() {
			r.Sleep(time.Second)
			rw.Lock()
			done = true
			rw.Unlock()
			cond.Broadcast()
		})
		rw.Lock()
		for !done {
			cond.Wait()
		}
		rw.Unlock()
	})
}

// runError runs main, which must fail for the reason given.
func runError(t *testing.T, s *Sim, reason error, main func(r *Runtime)) *RunError {
	t.Helper()
	err := s.Run(func() { main(s.Runtime()) })
	var re *RunError
	if !errors.As(err, &re) || !errors.Is(err, reason) {
		t.Fatalf("got %v, want %v", err, reason)
	}
	return re
}

func wantText(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%q is not in:\n%v", p, err)
		}
	}
}

func TestDeadlockNamesEverybody(t *testing.T) {
	deferred := 0
	err := runError(t, NewSim(42), ErrDeadlock, func(r *Runtime) {
		var a, b Mutex
		var cond Cond
		var all WaitGroup
		a.Init(r)
		b.Init(r)
		cond.Init(&b)
		all.Init(r)
		all.Go("first", func() {
			defer func() { deferred++ }()
			a.Lock()
			defer a.Unlock()
			r.Sleep(time.Second)
			b.Lock()
			defer b.Unlock()
		})
		all.Go("second", func() {
			defer func() { deferred++ }()
			b.Lock()
			defer b.Unlock()
			r.Sleep(time.Second)
			a.Lock()
			defer a.Unlock()
		})
		r.Go("third", func() {
			defer func() { deferred++ }()
			r.Sleep(time.Minute)
			b.Lock()
			defer b.Unlock()
			cond.Wait()
		})
		all.Wait()
	})
	wantText(t, err, "seed 42", "at 1m0s",
		"main (1) waits for WaitGroup made at sim_test.go:", "which counts 2, at sim_test.go:",
		"first (2) waits for Mutex made at sim_test.go:", "held by second (3), at sim_test.go:",
		"second (3) waits for Mutex", "held by first (2)", "third (4)")
	if deferred != 3 {
		t.Errorf("%d goroutines ran their deferred functions", deferred)
	}
}

func TestDeadlockInCond(t *testing.T) {
	err := runError(t, NewSim(1), ErrDeadlock, func(r *Runtime) {
		var mu RWMutex
		var cond Cond
		mu.Init(r)
		cond.InitRW(&mu)
		r.Go("reader", func() { mu.RLock(); r.Sleep(time.Second); mu.RLock() })
		r.Go("waiter", func() { r.Sleep(time.Minute); mu.Lock(); cond.Wait() })
		r.Sleep(time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		cond.Wait()
	})
	wantText(t, err, "reader (2) waits for RWMutex", "held by 1 readers", "main (1) waits for RWMutex")

	err = runError(t, NewSim(1), ErrDeadlock, func(r *Runtime) {
		var mu Mutex
		var cond Cond
		mu.Init(r)
		cond.Init(&mu)
		mu.Lock()
		defer mu.Unlock()
		cond.Wait()
	})
	wantText(t, err, "main (1) waits for Cond of Mutex made at sim_test.go:")
}

func TestPanicIsReported(t *testing.T) {
	cause := errors.New("the sky fell")
	err := runError(t, NewSim(9), ErrPanic, func(r *Runtime) {
		r.Go("chicken", func() {
			r.Sleep(time.Second)
			panic(cause)
		})
		r.Sleep(time.Hour)
	})
	if !errors.Is(err, cause) {
		t.Error("does not match the panic's value")
	}
	wantText(t, err, "seed 9", "chicken (2): the sky fell", "TestPanicIsReported", "main (1) waits for the end of Sleep")
}

func TestTimeLimit(t *testing.T) {
	s := NewSim(1)
	s.Limit = time.Minute
	err := runError(t, s, ErrTimeLimit, func(r *Runtime) {
		for {
			r.Sleep(time.Second)
		}
	})
	if err.At != time.Minute {
		t.Errorf("at %v", err.At)
	}
}

func TestLivelock(t *testing.T) {
	for _, n := range []int{1, 2} {
		s := NewSim(1)
		s.Livelock = 10000
		runError(t, s, ErrLivelock, func(r *Runtime) {
			for range n {
				r.Go("spinner", func() {
					for {
						r.Yield()
					}
				})
			}
		})
	}
	s := NewSim(1)
	s.Livelock = 10000
	runError(t, s, ErrLivelock, func(r *Runtime) { // without a single call that is a scheduling point by itself
		var mu Mutex
		var cond Cond
		mu.Init(r)
		cond.Init(&mu)
		for range 2 {
			r.Go("player", func() {
				mu.Lock()
				for {
					cond.Signal()
					cond.Wait()
				}
			})
		}
	})
}

func TestStop(t *testing.T) {
	s := NewSim(1)
	after, cleaned := false, false
	runError(t, s, ErrStopped, func(r *Runtime) {
		var mu Mutex
		mu.Init(r)
		r.Go("other", func() {
			defer func() {
				r.Sleep(time.Second) // goes no further
				after = true
			}()
			defer func() { cleaned = true }()
			mu.Lock()
			defer mu.Unlock()
			r.Sleep(time.Minute)
			after = true
		})
		r.Sleep(time.Second)
		s.Stop()
		after = true
	})
	if after || !cleaned {
		t.Errorf("after %v, cleaned %v", after, cleaned)
	}
	// The simulation goes on with others.
	if err := s.Run(func() { s.Runtime().Sleep(time.Second) }); err != nil || s.Runtime().Now() != 2*time.Second {
		t.Errorf("%v at %v", err, s.Runtime().Now())
	}
}

// panicText returns what f panics with.
func panicText(f func()) (text string) {
	defer func() { text = fmt.Sprint(recover()) }()
	f()
	return text
}

func TestOutsidersFail(t *testing.T) {
	s := NewSim(77)
	r := s.Runtime()
	var mu Mutex
	mu.Init(r)
	var got []string
	simulate := func() {
		done := make(chan struct{})
		go func() { // a real goroutine while the simulation runs
			defer close(done)
			got = append(got,
				panicText(func() { mu.Lock() }),
				panicText(func() { r.Now() }),
				panicText(func() { r.Go("x", func() {}) }))
		}()
		<-done
	}
	if err := s.Run(simulate); err != nil {
		t.Fatal(err)
	}
	for i, op := range []string{"Lock", "Now", "Go"} {
		if !strings.Contains(got[i], op) || !strings.Contains(got[i], "seed 77") || !strings.Contains(got[i], "not simulated") {
			t.Errorf("%s: %q", op, got[i])
		}
	}

	// While it does not run, what need not wait is allowed, and the rest fails.
	r.Now()
	mu.Lock()
	if text := panicText(func() { mu.Lock() }); !strings.Contains(text, "does not run") {
		t.Error(text)
	}
	if text := panicText(func() { r.Sleep(1) }); !strings.Contains(text, "does not run") {
		t.Error(text)
	}
	mu.Unlock()
	if text := panicText(func() { mu.Unlock() }); !strings.Contains(text, "not locked") {
		t.Error(text)
	}
	ran := false
	r.Go("early", func() { ran = true })
	if err := s.Run(func() {}); err != nil || !ran {
		t.Error(err, ran)
	}
}

func TestGoexitEndsTheCaller(t *testing.T) {
	done := make(chan string)
	go func() {
		text := "Run returned"
		defer func() { done <- text }()
		text = "Run did not return"
		s := NewSim(1)
		_ = s.Run(func() {
			s.Runtime().Go("sleeper", func() { s.Runtime().Sleep(time.Hour) })
			runtime.Goexit()
		})
		text = "Run returned"
	}()
	if got := <-done; got != "Run did not return" {
		t.Error(got)
	}
}

func TestNothingIsLeftBehind(t *testing.T) {
	before := runtime.NumGoroutine()
	for seed := range uint64(20) {
		s := NewSim(seed)
		s.Limit = time.Second
		_ = s.Run(func() {
			for range 50 {
				s.Runtime().Go("sleeper", func() { s.Runtime().Sleep(time.Duration(s.Runtime().Uint64N(2)) * time.Hour) })
			}
		})
	}
	for i := 0; runtime.NumGoroutine() > before && i < 100; i++ {
		time.Sleep(10 * time.Millisecond)
	}
	if n := runtime.NumGoroutine(); n > before {
		t.Errorf("%d goroutines, %d before", n, before)
	}
}

func TestManyGoroutines(t *testing.T) {
	simulate(t, 8, func(r *Runtime) {
		var all WaitGroup
		var mu Mutex
		all.Init(r)
		mu.Init(r)
		n := 0
		for range 5000 {
			all.Go("one of many", func() {
				mu.Lock()
				n++
				r.Yield()
				mu.Unlock()
			})
		}
		all.Wait()
		if n != 5000 {
			t.Error(n)
		}
	})
}

func TestWatchdog(t *testing.T) {
	if os.Getenv("RT_TEST_HANG") != "" {
		s := NewSim(1)
		s.Watchdog = 50 * time.Millisecond
		_ = s.Run(func() { <-make(chan int) })
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestWatchdog$")
	cmd.Env = append(os.Environ(), "RT_TEST_HANG=1")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "outside of the simulation") || !strings.Contains(string(out), "chan receive") {
		t.Errorf("%v\n%s", err, out)
	}
}

func BenchmarkSimYield(b *testing.B) {
	for _, n := range []int{1, 2, 10, 100} {
		b.Run(fmt.Sprint("goroutines=", n), func(b *testing.B) {
			s := NewSim(1)
			if err := s.Run(func() {
				for range n {
					s.Runtime().Go("yielder", func() {
						for range b.N/n + 1 {
							s.Runtime().Yield()
						}
					})
				}
			}); err != nil {
				b.Fatal(err)
			}
		})
	}
}

func BenchmarkSimSleep(b *testing.B) {
	s := NewSim(1)
	r := s.Runtime()
	if err := s.Run(func() {
		for range 10 {
			r.Go("sleeper", func() {
				for range b.N/10 + 1 {
					r.Sleep(time.Second)
				}
			})
		}
	}); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkSimGo(b *testing.B) {
	s := NewSim(1)
	if err := s.Run(func() {
		var all WaitGroup
		all.Init(s.Runtime())
		for range b.N {
			all.Go("short", func() {})
			all.Wait()
		}
	}); err != nil {
		b.Fatal(err)
	}
}

// LockTimed says how long it took, and makes no other history than Lock.
func TestLockTimedIsLock(t *testing.T) {
	for seed := range uint64(20) {
		var digests [2]uint64
		for i := range digests {
			s := NewSim(seed)
			r := s.Runtime()
			var mu Mutex
			mu.Init(r)
			var total time.Duration
			err := s.Run(func() {
				for range 5 {
					r.Go("locker", func() {
						for range 20 {
							if i == 0 {
								mu.Lock()
							} else {
								begin := r.Now()
								d := mu.LockTimed()
								if d != r.Now()-begin {
									t.Errorf("%v, and it took %v", d, r.Now()-begin)
								}
								total += d
							}
							if r.Uint64N(2) == 0 {
								r.Sleep(time.Millisecond)
							}
							mu.Unlock()
							r.Yield()
						}
					})
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if i == 1 && total == 0 {
				t.Error("nobody has waited")
			}
			digests[i] = s.Digest()
		}
		if digests[0] != digests[1] {
			t.Errorf("seed %d: %x with Lock, %x with LockTimed", seed, digests[0], digests[1])
		}
	}
}
