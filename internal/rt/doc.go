// Package rt is where the engine gets time, randomness, goroutines, locks and waits from.
//
// There are two runtimes behind one concrete type. The real one (New) is the standard library behind a nil
// check. The simulated one (NewSim) runs one goroutine at a time, the next chosen by seed, with time that
// jumps to the next timer when nobody can run:
//
//	     Runtime, Mutex, RWMutex, Cond, WaitGroup, Semaphore, Timer
//	        |                                     |
//	sim == nil: time, sync,               sim != nil: Sim
//	math/rand/v2, crypto/rand              |-- runnable: goroutines that may go on; the seed picks one
//	                                       |-- timers: a heap by time, then by age
//	                                       '-- parked: whoever waits for a lock, a Cond, a time
//
// # How to use it
//
// A part takes a *Runtime when it is made, keeps it, and binds its locks to it with Init before their first
// use. A lock that was never bound belongs to the real runtime, so its zero value is ready. Code that is given
// its runtime must not use go statements, channels or select to wait, package sync, time.Now, time.Sleep, or
// math/rand: none of these is seen by the simulation. (sync/atomic is harmless. So is iterating over a map
// where the order has no effect.)
//
// # What holds
//
//   - In a simulation exactly one goroutine runs at any moment; between two scheduling points nothing else
//     happens. Scheduling points are Lock, RLock, Wait, Sleep, Go, Yield, TryLock and Acquire, never Unlock,
//     Signal, Broadcast or Now.
//   - The history of a simulation is a function of its seed and of the code that it runs: neither GOMAXPROCS,
//     nor the machine's speed, nor the clock has an influence.
//   - Simulated time stands still while any goroutine can run.
//   - No order is promised that the real runtime does not promise: whoever waits for a lock or a Cond is woken
//     in an order that the seed chooses, and a lock that is let go may be taken by a third goroutine first.
//   - Only simulated goroutines may use what is bound to a simulation while it runs; any other one that tries
//     panics with a message that says so. See Sim.
package rt
