// Package lab is the stall laboratory: it measures what each policy of garbage collection costs the requests that meet it.
//
//	Measure    rounds: for each policy a fresh set, filled, then measured without and with collection
//	  |-- Load      a closed loop of requests on a volume's queue, as an NBD connection has one; every read is checked
//	  |     |-- Content    what each block must hold
//	  |     '-- Recorder   latencies: histogram, a line of bins, the longest time without a completion
//	  |-- watch     forces collections, sees when they begin and end
//	  '-- Result    runs, and a Row for each policy and depth
//	Result.WriteText, WriteJSON, WriteHTML, WritePNG; LatLog for fio's tools
//
// Whatever happens while requests are under way takes time and goroutines from a Runtime, so that the same code measures
// real devices by the clock, and modelled ones in simulated time. In a simulation the devices must take time (blockdev.Delaying),
// or the load never ends.
//
// # How a round is made
//
// Sets are fresh for each policy and round, not kept from round to round: each round is then a measurement of its own, only one
// set takes memory at a time, and no set works in the background while another is measured. The fill runs under the
// policy exact, with the same seed for all, so that all begin with the same kind of index, and no policy is measured on what its own
// stalls made of the fill. Policies go A B C in even rounds and C B A in odd ones, and so do depths: drift of the machine
// hits all alike.
//
// A ratio is that of two windows on the same set, one right after the other. Reported are the median of the ratios of all
// rounds, and the least and greatest.
//
// # Experiments of the field
//
// RunField makes the experiments that were reported of the kernel again, in simulated time, on devices that store metadata
// alone: the Presets that it takes.
package lab
