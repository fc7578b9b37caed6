// Package cacheset joins the engine's parts to a running cache set: the tree, the journal, the bucket table and the
// slots of the volumes, on one cache device.
//
//	volume: Lookup, Insert, Space, Sync             all under, or around, one lock
//	   |
//	  Set -- tree (btree)      node.go     nodes are read, appended to, rewritten: never under the lock
//	   |  \- journal           Owner       says where the roots are, writes out what pins old entries
//	   |   \ buckets (bucket)  refill.go   generations are made durable ahead of need
//	   |    slots              slots.go    the uuid array: which inode is which device
//	 device: an IO for metadata, one for the journal; data goes through queues of the volumes' own
//
// # The lock
//
// Set.mu guards tree, open journal entry, bucket table, open buckets and slots. Under it: memory only, at most
// about 200 µs, no waiting. Before it may be held: Set.attaching. Inside it: nothing. Whoever needs a bucket or
// journal space reserves it first, the lock not held. It is a plain mutex: a lookup takes half a microsecond, a batch
// of them one hold, and readers that share would pay more for the sharing than for the wait.
//
// # One insert, followed down
//
//	insert.go   Reserve room in the journal; no lock held
//	            lock: Tree.Insert, Journal.AppendLocked, Tree.Pin, Table.Apply, Unpin the key's bucket: one critical
//	            section, so that the journal's order is the index's and the counts are exact
//	            what is missing (a node, room in the leaf) is seen to with the lock let go, then the key goes on
//	node.go     when a page of keys has gathered, or the journal wants it, or after half a minute: Freeze under the
//	            lock, Encode and write without, Finish under it; where many wait for that, several share their flushes
//	rewrite.go  a leaf without room is copied, split, and swapped in its parent by one append
//	sweep.go    a walk over all nodes, now and then, finds out how old pointers are, and what there is to do
//	gentle.go   what nobody waits for goes to the device in small parts
//	maintain.go neighbours that fit in fewer nodes are coalesced, nodes that are mostly stale rewritten
//
// # Goroutines
//
// Writers (node.go) bring nodes to the disk, the refiller (refill.go) makes buckets ready, the ticker (tick.go) ages
// nodes and lets memory go, the sweeper (sweep.go) finds out how old pointers are, the verifier (verify.go) holds the counts
// against the index, the mover (move.go) brings dirty data together, another frees retired slots (dead.go), another discards
// empty buckets (discard.go); the journal has two of its own. What they wait for forms no circle: a writer waits for buckets,
// the refiller for a journal entry, the journal for the writing of old leaves, which takes appends, or rewrites with buckets
// from the reserve that only nodes may have, and entries of the kept kind (journal/doc.go, Room). A rewrite waits for its
// parent, and a parent for its own parent, never for a child. Tidiers (maintain.go) do what
// the sweeper finds; it waits for them only while nobody waits for buckets, and they give up then.
//
// # Waits
//
// What requests wait for is counted by cause (stall.go), where they wait. Who asks says whether a request waits: methods
// whose names end in Request, or a field, are for these. Where nothing is waited for, no clock is read: the lock is tried
// first, and a batch of hits reads it once when it goes to the device and once when it is back.
//
// # After an error
//
// A metadata write that fails is repeated. When that is of no use the set has failed, for good: nothing is
// acknowledged any more, nothing is written, and what was acknowledged is in the journal and its mapping for the
// next start.
//
// Sources: F 5, 6, 7, 8, 9, 12, 14, 16; B 1.7, 9.
package cacheset
