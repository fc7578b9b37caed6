// Package ubcache is a block cache in user space on the on-disk format of the kernel's bcache: an SSD in front of a
// slow or remote disk.
//
//	Format      makes the superblocks of a cache device and of backing devices
//	Open        starts a cache set: what a kernel left, clean or cut off, opens; so does what this package left
//	CacheSet    a running set: OpenVolume, Stats, attributes, Close
//	Volume      a cached device: ReadAt, WriteAt, Flush, Discard, WriteZeroes
//
// Devices are files or block devices, locked against other users while they are open. No daemon and no kernel module
// is needed. After a power cut every flushed write is there; after the death of the process every acknowledged one.
//
// All methods may be called by several goroutines at the same time, except that nobody may use a set or its volumes
// while Close is called.
package ubcache
