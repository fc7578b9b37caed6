// Package journal writes, keeps and reads the journal of a cache set: the ring of entries that says, in order, which
// leaf keys were inserted since their leaves were last written, and where the roots are.
//
//	insert (under the set's lock)             flush, FUA, root change, 100 ms
//	   | AppendLocked: memory only                 | wanted
//	   v                                           v
//	+------------+  close: header, last_seq   +-----------+  flush, write FUA   +-------------------+
//	| open entry | -------------------------> | in flight | ------------------> | ring of buckets   |
//	+------------+   (under the lock)         +-----------+   (off the lock)    +-------------------+
//	   both in a shared mapping: the death of the process leaves them             |
//	                                                                              | oldest needed
//	      leaf, root: Pin <--- WriteOldest(up to) <--- reclaimer, from 50 % on <--'
//	         '--- written: the pin goes, last_seq of the next entry moves on, the bucket is free when that is durable
//
// # How a change is made
//
// Reserve makes room and may wait; no lock is held. Then, in one critical section of the set's lock, the leaf is
// changed, its keys go to the open entry (AppendLocked) and the leaf pins that entry (PinLocked). So the order of
// the journal is the order of the index. Acknowledge says when the change may be acknowledged, Sync and WaitDurable
// when it is safe from a power cut.
//
// Two goroutines belong to a journal: the writer closes the open entry and writes it, one at a time, and the
// reclaimer asks the owner to write out what pins the oldest entries. It does so whether anybody waits or not, from half of the
// ring on, and the more the fuller the ring is; so room does not depend on who waits being woken to ask for it.
//
// # What is there after a crash
//
// Of the disk we assume that a sector is written whole or not at all, and that what completed before a flush is
// durable after it.
//
// Power cut. Entry n+1 is issued when n is durable, so the entries on disk have no gap, and only the last can be torn;
// a torn one fails its checksum and has never been: the next start writes over it. What an entry refers to, data and nodes, had completed before
// it was closed and is flushed before it is written. Read takes the newest entry's last_seq: all from there on is on
// disk, because a bucket is entered only if the last durable entry needs nothing from it; if the entry being written
// gets there, that one's needs count, and they are fewer. All before is durable in leaves, because last_seq never
// passes a pin. So every key whose entry was durable is found, in order.
//
// Death of the process. The keys of the two entries that may not be on disk are in the mapping; a slot is given to
// entry n+2 when n is durable, so disk and mapping together have no gap. Within a slot, keys are stored before the one
// word that counts them: killed between any two instructions, the prefix that is counted is whole. The next process
// writes these keys to the ring before it raises the superblock's seq, which ends the mapping's validity. So every
// key that was appended is found.
//
// A failed write is as a death: nothing is acknowledged any more (FailedError, for good), the mapping stays, the next
// start finds everything.
//
// # Room
//
// A full journal can always be emptied. Let "a place" be what the open entry needs in the ring to be closed.
//
//  1. What is reserved always fits into the open entry, so that AppendLocked never waits: admission looks at
//     open + reserved + new.
//  2. Admission also sees to it that the open entry, with all that is reserved, has a place and leaves what is kept
//     (half a bucket in a ring of 4 to 7; an eighth of all buckets in a larger one). Entries with keys alone are closed
//     only if that stays so.
//  3. Urgent entries (roots, gens) may take what is kept as long as what is reserved has a place behind them.
//  4. An entry without keys has a place always: where there is no other it amends the newest, whose header it takes
//     (amend.go). It counts its own last_seq, so that when no pin is left in the oldest bucket, it frees that. It is
//     written as soon as someone waits for room.
//  5. Whoever holds a Reservation waits for no entry, so what is reserved becomes keys, or goes back, by itself.
//
// So whoever waits for room waits for at most the writing of the leaves that pin the oldest bucket and for one entry; and
// whoever writes them waits for nobody who waits for room.
//
// Starting. A start goes on behind the newest entry. What is appended is bounded further (ring.restart), so that a next
// process can write what is in the mapping; nothing else that a start writes needs room. So a set starts however
// often its starts were cut short, and however full a kernel left the ring.
//
// # Invariants
//
//   - seq of the open entry is that of the last closed one plus 1, and durable is that or one less. On disk an amendment
//     has the seq of what it amends.
//   - last_seq never decreases, and is never greater than the seq of an entry with keys that are not in durable leaves.
//   - The ring's buckets are entered in order, none is skipped; entries lie end to end and never span buckets.
//   - The lock is never held over I/O, and under it nothing waits.
//   - A Pin is a number: no pointer per key, none per entry.
//
// Sources: F 6, 12, 14, 16; B 4.5, 9.3, 9.13.
package journal
