// Package volume is the request path: what reads, writes, flushes and discards of a volume do to its backing device,
// to the cache and to the index.
//
//	queue.go    Submit: a batch of requests; reads that hit are looked up in one hold of the set's lock, and go out in
//	   |        one submission, without a goroutine
//	   |-- fast.go    writes that stay in the cache and need not wait go with them
//	   |-- read.go    what misses: the backing device answers, and a copy goes to the cache (a fill)
//	   |-- write.go   route decides once; then through, around or back
//	   '-- flush.go   both devices; epochs; what it means that a flush has failed
//	drainer.go  dirty data goes to the backing device, at the rate that package writeback wants
//	   '-- flight.go  one batch of it
//	ranges.go   writes under way and fills under way, so that they do not get in each other's way
//	group.go    several I/Os at once, waited for
//	config.go   what requests go by, and how it changes under them
//	attach.go   the backing device gets a slot in the set
//	state.go    its states: dirty, clean, detached
//	flash.go    volumes without one
//
// A volume with a backing device has its key space from the data offset on; a flash-only volume has none, all its data
// is dirty, and what is not in the index reads as zeroes.
//
// # What holds
//
//   - Writes that overlap are made one after the other, so that cache and backing device end with the same one.
//   - A fill is void if a write overlaps it, also one that goes round the cache, from the moment the write begins
//     until it is done on the backing device.
//   - What is read from the cache is good only if its bucket's generation is the same afterwards; else it is read
//     again, with the bucket held.
//   - A dirty key is in the index only while the superblock says DIRTY.
//   - What a batch of writeback has taken, no request writes to the backing device, nor does another batch, until it is
//     marked clean.
//   - A write over live dirty data goes to the cache as dirty, whatever the mode. Where it cannot, the backing device
//     is written and flushed before the dirty key goes.
//   - Strict crash stability: clean data in the cache that is about to be overwritten on the backing device is
//     invalidated, durably, before; and a clean key becomes durable only after a flush of the backing device that
//     began after its data was there (its epoch). So whatever a read shows after a power cut, later reads show too.
//     With the kernel's order (crash_stability kernel) neither is waited for.
//
// Sources: F 10, 11; B 1, 9.7, 9.13, 9.14.
package volume
