// Package writeback is the policy of writing dirty data back to a backing device: whether a write stays in the cache as
// dirty data, and how fast such data leaves it again.
//
//	settings.go   what an operator sets; which writes go back
//	rate.go       the rate, from how much is dirty
//	limiter.go    the waits that keep the drain to the rate
//
// Nothing here does I/O, waits, locks or asks for the time: volumes do, and pass it in, so that all of it is tested
// without a set. A value is guarded by whoever owns it.
//
// Lengths and positions are in sectors, rates in sectors per second, times since any fixed point.
//
// Sources: B 1.6, 5.
package writeback
