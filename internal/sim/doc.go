// Package sim lets systems of volumes live and die in a simulation, and checks what their volumes read. It is imported
// by tests only.
//
//	      Workload, by seed                  Loop: for each changing operation n
//	   clients |                               |
//	           v                               v
//	Client: writes say what they are --> History: what was sent, acknowledged, flushed, read, in which order
//	           |                               ^
//	           v                               | check
//	Target: the volume under test              |
//	           |                               |
//	devices of the Env                         |
//	           |   dies before operation n     |
//	           v                               |
//	images, one per strength -- Reopen --> read all, Stir, read all, stop, Reopen, read all, Check, Alone
//
// # What a read may return
//
// Each block says which volume, block and write it belongs to, and a checksum covers that, so that data of another
// block, or a mixture of two writes, is never taken for what it is not. Which of a block's own values may be read:
//
//   - While it runs, blocks are linearizable one by one: there is one order of all operations on a block in which each
//     lies between its beginning and its end, and each read returns what was written last. Requests of several blocks
//     are not atomic.
//   - After a power cut: the last flushed write, or a later one, acknowledged or not. Flushed is what was acknowledged
//     with FUA, or was acknowledged before a flush was sent that was itself acknowledged.
//   - After the death of the process: the last acknowledged write, or a later one. So too after an orderly stop.
//     What was acknowledged but not flushed may still be lost in a power cut that follows.
//   - What the first read after that returns is what the block holds: it does not change without a write, whatever is
//     read, evicted, flushed, stopped and started, and not in another crash.
//   - Writes of zeroes write the value zero, which does not say who wrote it; where several may have, the check
//     takes none for certain.
//   - A discarded block reads as anything that it ever held, or zeroes; once it has been read, it stays so.
//   - A request that failed may have happened, wholly or in part, and may happen later, until the next start.
//
// Where Volume.Loose says so, reads of a block do not bind one another after a crash: each may return another of what
// that may have left. What a volume holds without its cache (Loop.Alone) is judged as one more read, which nobody hears
// of.
//
// # How a Loop works
//
// Every life is a simulation of its own (package rt). The first one is always the same, up to operation n: the cuts of
// one loop walk through one history. At the cut the History is frozen, and pictures are taken of what the devices may
// show after it, one per blockdev.Strength. The process then finds its devices dead, and must come to an end: a system
// that hangs on dead devices is a failure too. In kill mode the runtime directory is copied at that moment, what the
// devices have accepted is completed, and half of the kills come between operations.
//
// A life's devices, from the process down; see serial for why:
//
//	power cut:  Delaying (reorders writes) - tap (counts, cuts) - serial - Crashable - Delaying - Memory
//	kill:                                    tap (counts, kills)         - Crashable - Delaying - Memory
//
// Everything follows from Loop.Seed, the number of the cut and the strength. A Failure tells how to repeat it:
//
//	UBCACHE_SIM="seed=7 cut=123 strength=torn" go test -run '^TestCrash$' ./internal/volume
//
// and UBCACHE_SIM="seeds=100-199" gives the tests that ask Seeds for theirs these instead.
package sim
