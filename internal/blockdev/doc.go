// Package blockdev is what the engine knows of disks: one interface, Device, the real devices behind it, and
// wrappers around it.
//
//	     Submit(batch)                    complete(batch)
//	          |                                 ^
//	wrappers: Crashable, Faulty, Delaying, Tracing, Counting      each over any Device
//	          |                                 |
//	Open: block device, regular file     Memory, Hollow
//	  |            |           |                |
//	uring        pread       inline           inline
//	one ring     threads     within           within
//	per queue                Submit           Submit
//
// IO sits on top for whoever wants to call and wait. Pool hands out the buffers: outside the heap, page-aligned,
// with room for a protocol header before the data.
//
// # What holds
//
//   - Requests travel in batches both ways: one system call for a batch submitted, one call of complete for all
//     that was found finished.
//   - A request and its buffer belong to the device from Submit to complete, and to the submitter otherwise.
//   - complete is never called twice at the same time for one queue, and Close of a queue returns after its last
//     call (see completer).
//   - In steady state no request allocates or starts a goroutine.
//   - The size of a file or device never changes.
//   - Between two openers of whom one writes, the second is refused, if both look at locks (see lock.go).
//
// # Threads
//
// The kernel completes what a thread has put into a ring in that same thread. While a thread sleeps where signals
// do not reach it (fsync, direct reads, a full page cache), whatever it has submitted before stays incomplete,
// and in Go any goroutine may end up on any thread. So with the uring engine nothing here sleeps so: flushes and
// zeroing go through the ring, the rest is done on threads set apart. The same should hold for other code in the
// process: files that are large, slow or synced belong on a Device, and the two engines should not be mixed.
//
// With the pread engine, a thread that waits for its disk keeps its place among GOMAXPROCS until the scheduler
// looks, 20 microseconds later or more, so there must be more places than processors (see Open).
//
// Memory, Hollow and all wrappers work on a simulated runtime; a file opened with one is served by the inline engine.
// The uring and pread engines wait for the kernel, which no simulation sees, so they use package sync.
package blockdev
