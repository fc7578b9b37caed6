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
// # Experiments of the field, in simulated time
//
//	field.go          Field, RunField: what was reported, and how it is run
//	field_presets.go  the experiments, and the device models with their arithmetic
//	field_image.go    a cache is filled once, and cloned for each policy
//	field_run.go      one policy: open, warm, measure
//	field_load.go     requests, so many at a time
//	field_record.go   what they took
//	field_report.go   as text and JSON, what was reported beside it
//
// The engine runs as it is, on a simulated runtime, over devices that store metadata only (blockdev.Hollow) and are as slow
// as a model says (blockdev.Delaying). Models are made from what was measured on raw devices; where nothing was reported of
// one, the usual model of its kind is taken, and the report says so. No parameter comes from a time that a collection took:
// where ours differ from those, the report shows it.
//
// The processor's work takes no time there. A request costs some 5 to 8 microseconds of real time, most of it in the index.
// The metadata of 1,500 nodes takes 0.34 GB, and a run over it 1.4 GB in all.
package lab
