// Package bucket knows the buckets of a cache device: what is in each, which may be used again and when, and
// what has to be durable before. It counts exactly, so nothing ever has to be walked to find free space.
//
//	     Allocate: data, one pin                      Apply, Unpin
//	Ready ----------------------> Pinned -----------------------------------+
//	 |  ^                                                                   |
//	 |  | BatchDurable                                    live 0   dirty 0  | dirty > 0
//	 |  |                          FillBatch: gen + 1        v        v     v
//	 |  +----------- Inc <-------------------------------- Empty <- Clean  Dirty
//	 |                  prio sets written, and named by a    ^   ^    ^     |
//	 |                  durable journal entry                |   +----+-----+ Apply
//	 |                                                       |
//	 | Allocate: metadata                                    | Release, JournalDurable
//	 +---------------> Meta ------------------------> Meta, gated
//	                        FreeNode, FreeAfter: gen + 1
//
//	Suspect: data whose counts do not fit; rests until Trust.    Fixed: superblock and journal.
//
// A Table takes 12 bytes a bucket and 1.3 for the indexes of what may be picked, moved and discarded, and for the pools, in slices without
// pointers;
// beside that, what the journal window needs for the buckets in it.
//
// # Under the lock
//
// A Table belongs to its cache set and has no lock of its own: every method is called with the set's lock held,
// but for those that say otherwise (Gen, Stale, Bucket, Touch: held shared will do; Age, NewShadow, NewRecount:
// not at all). No method waits or does I/O; each works for at most some 100 µs, and where there may be more to
// do it says so, and is called again after the lock was let go. Only Check looks at everything at once: it is for
// tests. What a loader does is for start-up, when there is nobody to wait.
//
// # Counting
//
// Each insert gathers in a Deltas which sectors of which bucket it adds and which it covers, and Apply makes the
// change in the critical section of the insert. The counts are those of the index in memory, exactly (I1, I2),
// and each bucket is in one category (I3). A doubt is resolved by counting too much: that leaks a bucket, the
// reverse destroys data.
//
// # The reuse gate
//
// A bucket may be written when nothing that a crash could bring back needs its old contents. What that takes
// depends on how the references to them went:
//
//	V1 overwritten by a journalled key   the journal durable up to empty_seq, the entry open then
//	V2 moved                             dirty keys are journalled, so as V1; clean ones as V4
//	V3 cleaned, then evicted             the cleaning was journalled (after a backing flush), so as V4
//	V4 evicted                           the new generation durable
//	V5 a btree node was freed            the parent's append durable: Release. Till then the generation stored
//	                                     stays the old one (I6)
//	   an old root or uuid array         the journal entry that names the new one durable: FreeAfter
//	V6 a leaf was replaced               as V5, and the journal keeps its entries: not this package's part
//
// One mechanism serves V1 to V4: buckets are picked in a batch, all generations are written, and a journal entry
// names them. That entry is younger than whatever emptied the bucket, so when it is durable, the conditions hold.
// BatchDurable and Allocate assert it (I4). Prio sets alternate between two sets of buckets, so the named one is
// never overwritten.
//
// # Generations
//
// A pointer may be 96 generations older than its bucket, not more. oldest is a bound: no pointer in a merged
// node or a needed journal entry is older (I5). When a generation is raised, oldest follows if no older pointer is
// left: the bucket has no residue (keys that left the index without being covered by others) and the journal
// window has passed it. Otherwise the lag grows; a sweep over the index, in the background, finds out what is
// really there. Buckets that cost no generation are picked first; at the limit a bucket rests until a sweep.
//
// # Space
//
// The common pool serves everybody, then metadata and moving have their own reserve. Data, above all dirty
// data, never gets what the kernel needs to activate the set: see Table.roomFor.
package bucket
