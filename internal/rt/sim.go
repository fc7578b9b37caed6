package rt

import (
	"context"
	"fmt"
	"iter"
	"math"
	"math/bits"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// A Sim is a simulated runtime: it runs one goroutine at a time, the next chosen by seed, and its time jumps
// to the next timer when no goroutine can run. The same seed and program give the same history.
//
// Make what is to be simulated with Runtime, then call Run. While Run runs, only simulated goroutines (main, and
// whatever was started by Go or AfterFunc) may use the runtime and what is bound to it; any other goroutine
// that does panics, since it would have no place in the order of things. Before and after Run, whoever called
// it may read the clock, take locks that are free and so on; what would have to wait panics.
//
// t.Fatal and the like may be called by simulated goroutines if Run was called by the test's own goroutine: Run
// then ends that one as well (runtime.Goexit in a simulated goroutine always does this).
type Sim struct {
	// Limit is the simulated time at which Run gives up, 0 for never. Give one where something ticks for
	// ever: ticking hides a deadlock of the rest.
	Limit time.Duration

	// Livelock is how many scheduling points may pass at one instant of simulated time before Run gives up;
	// 0 stands for 2^28, some 20 seconds of real time.
	Livelock uint64

	// Watchdog is how much real time may pass between two switches of goroutines before the program is
	// ended with all stacks, because a goroutine waits for something outside of the simulation. 0 stands for
	// two minutes, a negative value for never.
	Watchdog time.Duration

	// Trace, if set, is called whenever a goroutine is given its turn. Number tells goroutines of the same
	// name apart. It must not use the simulation.
	Trace func(at time.Duration, name string, number int)

	seed    uint64
	runtime Runtime
	choices *rand.PCG // which goroutine runs next
	values  *rand.PCG // what the program asks for, apart so that neither disturbs the other
	sticky  uint64    // mask: a scheduling point keeps its goroutine running unless choices & sticky is 0

	now    time.Duration
	timers timerHeap
	age    uint64 // of timers, to order those of the same time

	active   atomic.Bool    // Run is running
	running  atomic.Uintptr // gid of the simulated goroutine whose turn it is, 0 for none
	beat     atomic.Uint64  // changes with each turn, for the watchdog
	current  *simG
	runnable []*simG // in no order
	all      []*simG // alive, in no order
	bounded  []*simG // parked with a context that may end their wait
	idle     []*simG // coroutines for reuse
	number   int     // of the last goroutine started

	steps  uint64 // scheduling points so far
	calm   uint64 // steps when time last moved
	digest uint64 // of the order of turns
	failed *RunError
	dying  bool // the goroutines that are left are being ended
}

// epoch is where the wall clock of a simulation begins.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// NewSim returns a simulation whose every choice follows from seed.
func NewSim(seed uint64) *Sim {
	s := &Sim{
		seed:    seed,
		choices: rand.NewPCG(seed, 0x63686f69636573),
		values:  rand.NewPCG(seed, 0x76616c756573),
	}
	s.runtime.sim = s
	// Some seeds switch at every chance, others let goroutines run on for long: they find different things.
	s.sticky = []uint64{0, 0, 1, 3, 7, 31}[s.choose(6)]
	return s
}

// Runtime returns the runtime to hand to what is simulated.
func (s *Sim) Runtime() *Runtime { return &s.runtime }

// Seed returns the number that the simulation was made with.
func (s *Sim) Seed() uint64 { return s.seed }

// Steps returns the number of scheduling points passed so far.
func (s *Sim) Steps() uint64 { return s.steps }

// Digest returns a hash of the history so far: which goroutine had its turn, and when. Two runs that should be
// the same but have different digests are not a function of their seed.
func (s *Sim) Digest() uint64 { return s.digest }

// Run runs main as the first simulated goroutine, and returns when it and all goroutines started since have
// ended; timers that are waiting then are dropped. If that does not come to pass, the goroutines that are left
// are ended where they are, running their deferred functions, and the error is a *RunError that says why:
// ErrDeadlock, ErrPanic, ErrTimeLimit, ErrLivelock or ErrStopped.
//
// Run may be called again, and time goes on from where it was; but what goroutines that were ended had locked, or
// waited for, must not be used any more.
func (s *Sim) Run(main func()) error {
	if s.active.Swap(true) {
		panic("rt: Sim.Run called while the simulation runs")
	}
	defer s.active.Store(false)
	s.failed, s.calm = nil, s.steps
	stop := s.watch()
	defer stop()
	defer s.end() // for Goexit; does nothing the second time

	s.start("main", main)
	for s.failed == nil {
		g := s.next()
		if g == nil {
			break
		}
		s.turn(g)
	}
	waits := s.end()
	if s.failed != nil {
		s.failed.Goroutines = waits
		return s.failed
	}
	return nil
}

// Stop, called by a simulated goroutine, ends the simulation at once, as if the machine had lost power: neither
// the caller nor any other goroutine goes on, save for deferred functions. Run returns ErrStopped.
func (s *Sim) Stop() {
	g := s.blocking("Stop")
	if g == nil {
		panic("rt: Sim.Stop called while the simulation does not run")
	}
	s.fail(ErrStopped)
	s.park(g, stopping{})
}

// next chooses who has the next turn, nil if there is nobody.
func (s *Sim) next() *simG {
	for {
		if len(s.runnable) == 0 || s.steps&15 == 0 {
			s.pollContexts()
		}
		if s.steps-s.calm > s.livelock() {
			s.fail(ErrLivelock)
			return nil
		}
		if n := len(s.runnable); n > 0 {
			i := s.choose(n)
			g := s.runnable[i]
			s.runnable[i] = s.runnable[n-1]
			s.runnable = s.runnable[:n-1]
			return g
		}
		if len(s.all) == 0 || !s.advance() {
			return nil
		}
	}
}

// advance moves time to the next timer and fires all timers of that instant.
func (s *Sim) advance() bool {
	if len(s.timers) == 0 {
		s.fail(ErrDeadlock)
		return false
	}
	at := s.timers[0].when
	if s.Limit > 0 && at > s.Limit {
		s.fail(ErrTimeLimit)
		return false
	}
	s.now, s.calm = at, s.steps
	for len(s.timers) > 0 && s.timers[0].when == at {
		t := s.timers[0]
		s.timers.remove(t)
		t.fire()
	}
	return true
}

// turn runs g until it waits, ends or is made to let another one run.
func (s *Sim) turn(g *simG) {
	if s.Trace != nil {
		s.Trace(s.now, g.name, g.number)
	}
	s.digest = bits.RotateLeft64(s.digest*0x9e3779b97f4a7c15, 29) ^ uint64(s.now)<<20 ^ uint64(g.number)
	s.beat.Add(1)
	s.current = g
	s.running.Store(g.gid) // 0 on its first turn: the goroutine fills it in
	g.resume()
	s.running.Store(0)
	s.current = nil
}

// end ends the goroutines that are left, and returns what each was doing.
func (s *Sim) end() []Waiting {
	s.running.Store(0)
	s.dying = true
	left := s.all
	slices.SortFunc(left, func(a, b *simG) int { return a.number - b.number })
	// The texts first: once one of them runs its deferred functions, all may change.
	list := make([]Waiting, len(left))
	for i, g := range left {
		list[i] = Waiting{Name: g.name, Number: g.number, For: g.waitText()}
	}
	s.all = nil
	for i, g := range left {
		s.cancel(g)
		list[i].At = place(g.stack[:g.depth])
	}
	for _, g := range s.idle {
		g.cancel()
	}
	s.idle, s.runnable, s.bounded, s.timers = nil, nil, nil, nil
	s.dying = false
	return list
}

// cancel ends a goroutine where it is.
func (s *Sim) cancel(g *simG) {
	s.current = g
	s.running.Store(g.gid)
	s.beat.Add(1)
	done := make(chan struct{})
	go func() { // because the Goexit that ends g also ends whoever cancels it
		defer close(done)
		g.cancel()
	}()
	<-done
	g.dead = true
	s.running.Store(0)
	s.current = nil
}

func (s *Sim) fail(why error) {
	if s.failed == nil {
		s.failed = &RunError{Seed: s.seed, At: s.now, Steps: s.steps, Reason: why}
	}
}

// choose returns a number in [0, n).
func (s *Sim) choose(n int) int { return int(scale(s.choices.Uint64(), uint64(n))) }

// scale maps a random 64-bit number to [0, n).
func scale(x, n uint64) uint64 {
	hi, _ := bits.Mul64(x, n)
	return hi
}

// watch ends the program when no turn has ended for long.
func (s *Sim) watch() (stop func()) {
	limit := s.Watchdog
	if limit < 0 {
		return func() {}
	}
	if limit == 0 {
		limit = 2 * time.Minute
	}
	quit := make(chan struct{})
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		tick := time.NewTicker(limit)
		defer tick.Stop()
		for last := s.beat.Load(); ; {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			now := s.beat.Load()
			if now == last {
				stacks := make([]byte, 1<<20)
				os.Stderr.Write(stacks[:runtime.Stack(stacks, true)])
				panic(fmt.Sprintf("rt: simulation with seed %d: a goroutine has not come to a scheduling point for %v;"+
					" it waits for something outside of the simulation, or works for ever (stacks above)", s.seed, limit))
			}
			last = now
		}
	}()
	return func() { close(quit); <-gone }
}

// A simG is a simulated goroutine: a coroutine that does fn, and when that is done may be given another.
type simG struct {
	s      *Sim
	name   string
	number int
	fn     func()
	index  int  // in all
	dead   bool // has ended, or was ended

	gid    uintptr // of the goroutine below the coroutine, once it has begun
	resume func() (struct{}, bool)
	cancel func()
	pause  func(struct{}) bool // returns false when the goroutine is to end

	on    waitable        // what it waits for
	timer simTimer        // of Sleep
	ctx   context.Context // that may end the wait
	stack [16]uintptr     // where it was when it was ended
	depth int
}

// A waitable is what a goroutine may be parked on.
type waitable interface {
	text() string   // "Mutex made at a.go:7, held by reader (3)"
	forget(g *simG) // g no longer waits, since its context is done
}

// start makes a goroutine that can run.
func (s *Sim) start(name string, fn func()) {
	if s.dying {
		return
	}
	var g *simG
	if n := len(s.idle); n > 0 {
		g = s.idle[n-1]
		s.idle = s.idle[:n-1]
	} else {
		g = s.newG()
	}
	s.number++
	g.name, g.number, g.fn, g.dead, g.index = name, s.number, fn, false, len(s.all)
	s.all = append(s.all, g)
	s.runnable = append(s.runnable, g)
}

func (s *Sim) newG() *simG {
	g := &simG{s: s}
	g.timer = simTimer{s: s, g: g, index: -1}
	g.resume, g.cancel = iter.Pull(func(pause func(struct{}) bool) {
		g.pause = pause
		g.gid = gid()
		s.running.Store(g.gid)
		for {
			g.run()
			if !pause(struct{}{}) {
				return
			}
		}
	})
	return g
}

// run does what the goroutine was started for.
func (g *simG) run() {
	s := g.s
	defer func() {
		if p := recover(); p != nil && s.failed == nil {
			s.fail(ErrPanic)
			s.failed.Panicked = g.String()
			s.failed.Value = p
			s.failed.Stack = string(debug.Stack())
		}
		g.dead, g.fn = true, nil
		if !s.dying {
			last := s.all[len(s.all)-1]
			s.all[g.index], last.index = last, g.index
			s.all = s.all[:len(s.all)-1]
			s.idle = append(s.idle, g)
		}
	}()
	g.fn()
}

func (g *simG) String() string { return fmt.Sprintf("%s (%d)", g.name, g.number) }

func (g *simG) waitText() string {
	if g.on == nil {
		return "its turn"
	}
	return g.on.text()
}

// self returns the calling goroutine; nil if the simulation does not run. It panics if it does, and the caller
// is not the one whose turn it is.
func (s *Sim) self(op string) *simG {
	if s.running.Load() == gid() {
		return s.current
	}
	if s.active.Load() {
		panic(fmt.Sprintf("rt: %s of a simulated runtime (seed %d) called by a goroutine that is not simulated, while"+
			" the simulation runs; start goroutines with Runtime.Go, and keep what calls back from threads of its own"+
			" (io_uring, net, context.AfterFunc) out of simulations", op, s.seed))
	}
	return nil
}

// blocking is self for what may wait: a goroutine that is being ended goes no further.
func (s *Sim) blocking(op string) *simG {
	g := s.self(op)
	if g != nil && s.dying {
		g.leave()
	}
	return g
}

// point is a scheduling point: the calling goroutine may lose its turn.
func (s *Sim) point(op string) *simG {
	g := s.blocking(op)
	if g != nil {
		s.perhapsSwitch(g, s.sticky)
	}
	return g
}

func (s *Sim) perhapsSwitch(g *simG, sticky uint64) {
	s.steps++
	if s.steps&15 == 0 {
		s.pollContexts()
		if s.steps-s.calm > s.livelock() {
			s.fail(ErrLivelock)
			g.switchAway()
		}
	}
	n := len(s.runnable)
	if n == 0 {
		return
	}
	x := s.choices.Uint64()
	if x&sticky != 0 {
		return
	}
	if scale(x, uint64(n+1)) == uint64(n) {
		return // it is chosen to go on
	}
	s.runnable = append(s.runnable, g)
	g.switchAway()
}

func (s *Sim) livelock() uint64 {
	if s.Livelock == 0 {
		return 1 << 28
	}
	return s.Livelock
}

// park waits until someone calls ready(g).
func (s *Sim) park(g *simG, on waitable) { s.parkUntil(context.Background(), g, on) }

// parkUntil is park that also ends when ctx is done.
func (s *Sim) parkUntil(ctx context.Context, g *simG, on waitable) {
	s.steps++
	g.on = on
	if ctx.Done() != nil {
		g.ctx = ctx
		s.bounded = append(s.bounded, g)
	}
	g.switchAway()
}

// mayPark panics unless the caller is a simulated goroutine, which self found.
func (s *Sim) mayPark(g *simG, on waitable) {
	if g == nil {
		panic(fmt.Sprintf("rt: would have to wait for %s, but the simulation (seed %d) does not run", on.text(), s.seed))
	}
}

// ready lets a parked goroutine run again.
func (s *Sim) ready(g *simG) {
	if g.dead {
		return // it was ended by an earlier Run
	}
	if g.ctx != nil {
		g.ctx = nil
		i := slices.Index(s.bounded, g)
		s.bounded = slices.Delete(s.bounded, i, i+1)
	}
	g.on = nil
	s.runnable = append(s.runnable, g)
}

// pollContexts wakes those whose context is done. Contexts cannot tell us: their callbacks come in goroutines
// that are not simulated.
func (s *Sim) pollContexts() {
	for i := 0; i < len(s.bounded); {
		g := s.bounded[i]
		if g.ctx.Err() == nil {
			i++
			continue
		}
		g.on.forget(g)
		s.ready(g) // takes g out of bounded
	}
}

// switchAway ends the turn and returns at the beginning of the next one, or never.
func (g *simG) switchAway() {
	if !g.pause(struct{}{}) {
		g.leave()
	}
}

// leave ends the calling goroutine because the simulation is over.
func (g *simG) leave() {
	if g.depth == 0 {
		g.depth = runtime.Callers(2, g.stack[:])
	}
	runtime.Goexit()
}

func (s *Sim) nowFor(op string) time.Duration {
	s.self(op)
	return s.now
}

func (s *Sim) random(op string) *rand.PCG {
	s.self(op)
	return s.values
}

func (s *Sim) spawn(name string, fn func()) {
	s.blocking("Go")
	s.start(name, fn)
	s.point("Go")
}

func (s *Sim) yield() {
	if g := s.blocking("Yield"); g != nil {
		s.perhapsSwitch(g, 0)
	}
}

func (s *Sim) sleep(ctx context.Context, d time.Duration) error {
	g := s.blocking("Sleep")
	if err := ctx.Err(); err != nil {
		return err
	}
	if d <= 0 {
		s.yield()
		return nil
	}
	s.mayPark(g, sleeping{})
	g.timer.set(d)
	s.parkUntil(ctx, g, sleeping{})
	return ctx.Err()
}

type sleeping struct{}

func (sleeping) text() string   { return "the end of Sleep" }
func (sleeping) forget(g *simG) { g.s.timers.remove(&g.timer) }

type stopping struct{}

func (stopping) text() string { return "the end: it called Stop" }
func (stopping) forget(*simG) {}

// place returns the innermost frame outside of this package, "set.go:31".
func place(stack []uintptr) string {
	const us = "github.com/ubcache/ubcache/internal/rt."
	frames := runtime.CallersFrames(stack)
	for {
		f, more := frames.Next()
		inside := strings.HasPrefix(f.Function, us) && !strings.HasSuffix(f.File, "_test.go")
		if f.File != "" && !inside && !strings.HasPrefix(f.Function, "runtime.") {
			return fmt.Sprintf("%s:%d", f.File[strings.LastIndexByte(f.File, '/')+1:], f.Line)
		}
		if !more {
			return ""
		}
	}
}

// saturate returns a+b, or the last moment if that is beyond it.
func saturate(a, b time.Duration) time.Duration {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}
