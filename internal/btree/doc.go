// Package btree is the index of a cache set: which ranges of which inode lie where in the cache. It has the tree
// in memory and its nodes, and turns them into bytes and back. It does no I/O and takes no lock: who runs the set
// reads and writes what it is asked to, and guards the tree with the one mutex of the set, which is never held
// meanwhile.
//
//	Tree                          root, nodes in memory, clock, pins, holds
//	 |
//	Node, level 2      kids: position, pointer, *Node where it is in memory
//	 |          \
//	Node  ...  (nil: its reference is all there is; whoever comes by reads it)
//	 |
//	Node, level 0      body: chunks of up to 128 entries, 16 bytes each, sorted, without overlap
//
//	on the disk, a node is a log of sets:
//
//	| set 0, from a rewrite | append | append | in flight |  free   |      F 5.2
//	|<------------------- Node.used -------------------->|          |
//	                              entries flagged open: what the next append takes
//
// # One write, followed down
//
//	Insert   insert.go   the leaf's entries change; the Change says what was removed and what is stored, exactly
//	Pin      pins.go     the leaf needs the journal entry that has the key
//	Freeze   write.go    open entries become an Append; the leaf goes on changing
//	Encode   write.go    its bytes, and how to write them so that a torn write leaves the node as it was
//	Finish   write.go    the pin is let go
//
// A leaf that has no room for an append is rewritten: Begin, Assign, Encode, Install (rewrite.go). The copy is made
// and written while the leaf goes on changing; Install swaps them, and the parent gets the new keys and a freeing
// key for the old node in one append. The same way nodes are split, coalesced and rid of stale keys, and the tree
// grows a new root.
//
// # What holds
//
//   - What the tree says in memory is the newest; the disk and the journal from Tree.OldestPin on say the same at
//     any moment, also in the middle of every write.
//   - Entries of a leaf do not overlap. What a newer one covers is cut off when it is inserted, and reported.
//   - Stale entries, and those without pointer, stay until the node is rewritten: on the disk they hide older ones.
//   - An entry not flagged open is on the disk, or in an append in flight; where it was cut, newer entries that
//     are open, or on the disk, cover the rest.
//   - The keys of a leaf's sets on the disk, merged, fit in their blocks: the rear part of an extent that is hit
//     in its middle is written with what hit it (F 5.7, F 14 #19). Where a node was read that does not hold to
//     this, no append is made to it.
//   - A node is linked once the key that refers to it, and all that leads there, is durable. Until then it keeps
//     the pins of the nodes that it replaced and those of its own appends (rule M1), and is not rewritten.
//   - The buckets of replaced nodes are free only when what replaced them is linked: Finish and RootDurable tell.
//   - An extent that is held goes to the disk without its pointer until its backing device was flushed. Its node
//     stays in memory so long. If a flush fails, its pointer is as if it were not there from then on (FlushFailed).
//   - Only nodes that can be read again as they are, are evicted.
//   - Nothing depends on the order of a map, on time or on chance: random numbers are handed in.
package btree
