package rt

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// A Sim is a simulated runtime. It is being written: for now Run fails.
type Sim struct {
	rng *rand.PCG
	now time.Duration
}

// NewSim returns a simulation whose every choice follows from seed.
func NewSim(seed uint64) *Sim { return &Sim{rng: rand.NewPCG(seed, 0)} }

// Runtime returns the runtime to hand to what is simulated.
func (s *Sim) Runtime() *Runtime { return &Runtime{sim: s} }

// Run runs main as the first simulated goroutine, and returns when all goroutines have ended.
func (s *Sim) Run(main func()) error { return errors.New("rt: the simulation is not written yet") }

func (s *Sim) nowFor(string) time.Duration                { return s.now }
func (s *Sim) wallTime() time.Time                        { return time.Unix(1767225600, 0).UTC().Add(s.now) }
func (s *Sim) sleep(context.Context, time.Duration) error { panic("rt: not written yet") }
func (s *Sim) spawn(string, func())                       { panic("rt: not written yet") }
func (s *Sim) yield()                                     { panic("rt: not written yet") }
func (s *Sim) random(string) *rand.PCG                    { return s.rng }
func (s *Sim) withTimeout(context.Context, time.Duration) (context.Context, context.CancelFunc) {
	panic("rt: not written yet")
}
func (s *Sim) afterFunc(time.Duration, func()) *simTimer { panic("rt: not written yet") }
func (s *Sim) newLock(string) *simLock                   { return &simLock{} }
func (s *Sim) newGroup() *simGroup                       { return &simGroup{s: s} }

type simTimer struct{}

func (t *simTimer) stop() bool               { panic("rt: not written yet") }
func (t *simTimer) reset(time.Duration) bool { panic("rt: not written yet") }

type simLock struct{}

func (l *simLock) lock()             { panic("rt: not written yet") }
func (l *simLock) tryLock() bool     { panic("rt: not written yet") }
func (l *simLock) unlock()           { panic("rt: not written yet") }
func (l *simLock) rlock()            { panic("rt: not written yet") }
func (l *simLock) tryRLock() bool    { panic("rt: not written yet") }
func (l *simLock) runlock()          { panic("rt: not written yet") }
func (l *simLock) newCond() *simCond { return &simCond{} }

type simCond struct{}

func (c *simCond) wait(context.Context) { panic("rt: not written yet") }
func (c *simCond) signal()              { panic("rt: not written yet") }
func (c *simCond) broadcast()           { panic("rt: not written yet") }

type simGroup struct{ s *Sim }

func (g *simGroup) add(int) { panic("rt: not written yet") }
func (g *simGroup) wait()   { panic("rt: not written yet") }
