package rt

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Why Sim.Run gave up.
var (
	ErrDeadlock  = errors.New("every goroutine waits, and no timer is set")
	ErrPanic     = errors.New("a goroutine panicked")
	ErrTimeLimit = errors.New("the limit of simulated time is reached")
	ErrLivelock  = errors.New("goroutines run on and on while time stands still")
	ErrStopped   = errors.New("stopped")
)

// A RunError says why a simulation did not come to its end, and where everybody was. It matches its Reason, and
// also the value of the panic if that is an error.
type RunError struct {
	Seed   uint64
	At     time.Duration // simulated time
	Steps  uint64        // scheduling points passed
	Reason error         // ErrDeadlock, ErrPanic, ErrTimeLimit, ErrLivelock, ErrStopped

	Panicked string // for ErrPanic: the goroutine
	Value    any    // the value of the panic
	Stack    string // of the goroutine, at the panic

	Goroutines []Waiting // those that had not ended, in the order in which they were started
}

// A Waiting says what a goroutine that had not ended was doing.
type Waiting struct {
	Name   string
	Number int    // in the order of their start, from 1
	For    string // "Mutex made at set.go:31, held by reader (3)"; "its turn" if it could have run
	At     string // "set.go:97", empty if it had not begun
}

// Error gives all of it: a line for the reason, the panic with its stack, a line for each goroutine.
func (e *RunError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rt: simulation with seed %d, at %v, after %d steps: %v", e.Seed, e.At, e.Steps, e.Reason)
	if e.Reason == ErrPanic {
		fmt.Fprintf(&b, ": %s: %v\n%s", e.Panicked, e.Value, strings.TrimSuffix(e.Stack, "\n"))
	}
	for _, w := range e.Goroutines {
		fmt.Fprintf(&b, "\n\t%s (%d) waits for %s", w.Name, w.Number, w.For)
		if w.At != "" {
			fmt.Fprintf(&b, ", at %s", w.At)
		}
	}
	return b.String()
}

// Unwrap returns the reason, and the panic's value if it is an error.
func (e *RunError) Unwrap() []error {
	if err, ok := e.Value.(error); ok {
		return []error{e.Reason, err}
	}
	return []error{e.Reason}
}
