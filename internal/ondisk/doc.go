// Package ondisk is the format of bcache: superblocks, keys, btree nodes, journal entries, prio sets and uuid
// entries, from bytes to structs and back, with their checksums, acceptance checks and text forms.
//
// It does no I/O, has no clock and no state. There is one decoder and one encoder for each structure; each
// structure carries its byte table. Everything is little endian.
//
// Where the structures lie on a cache device:
//
//	sector 0        8        16                       first_bucket                          nbuckets
//	|-------|-------|--------|------------------------|---------------|--------------------|
//	| zero  | super | unused up to the first bucket   | journal ring  | every other bucket |
//
// Every other bucket is free, holds cached data, or is the home of one btree node, prio set or uuid array;
// nothing in a bucket says which, only what refers to it:
//
//	superblock -> journal ring -> newest jset -> root node -> nodes -> extents (cached data)
//	                                          -> uuid array (slot number = inode of the extents)
//	                                          -> prio sets (generation and priority of each bucket)
//
// Decoders never panic, never allocate by a length they have not checked, and answer bad bytes with a
// *CorruptError that names field, value and rule.
package ondisk
