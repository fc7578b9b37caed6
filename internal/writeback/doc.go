// Package writeback is the policy of writing dirty data back to a backing device: whether a write stays in the cache as
// dirty data, how fast such data leaves it again, and in which pieces.
//
//	settings.go   what an operator sets; which writes go back
//	rate.go       the rate, from how much is dirty
//	idle.go       when it is the highest, for a set that nobody uses
//	limiter.go    the waits that keep the drain to the rate
//	plan.go       dirty extents in key order to writes of the backing device; halves of what was refused
//
// Nothing here does I/O, waits, locks or asks for the time: volumes do, and pass it in, so that all of it is tested
// without a set. A value is guarded by whoever owns it.
//
// Lengths and positions are in sectors, rates in sectors per second, times since any fixed point.
//
// Sources: B 1.6, 5.
package writeback
