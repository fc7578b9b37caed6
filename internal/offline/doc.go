// Package offline works on bcache devices at rest: it reads everything that a cache device says about itself,
// checks it, and gives the logical content of its volumes. It also makes superblocks.
//
// It knows the format and never the engine: a checker that shared the engine's code would share its mistakes.
//
// How a set is read (Open), in the order in which each part needs the one before:
//
//	superblock
//	journal      all buckets; newest entry, then the needed ones: [newest.last_seq, newest.seq]
//	mapping      entries that a process which died had acknowledged, where Options name its folder
//	prio sets    generation and priority of each bucket, from newest.prio_bucket
//	uuid array   which inode is which device, from newest.uuid_bucket
//	tree         level by level from newest.root; pointers and freeing keys raise generations
//	journal keys, mapped ones last, raise generations, then overlay the tree's keys, oldest first
//
// What comes out is one flat, sorted, pointer-free list of extents, and for each bucket a role and a count of
// live sectors. An extent is live if it has a pointer whose generation is still its bucket's; every other key
// only hides what is older. A part of the tree that cannot be read leaves an unknown range: what it says is
// not guessed, and reading it is an error.
//
// Nothing here writes to a device but Format.
package offline
