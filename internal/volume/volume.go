package volume

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// Sentinels.
var (
	// ErrAttached: a volume of this device is open already.
	ErrAttached = errors.New("attached already")
	// ErrOtherSet: the backing device belongs to another cache set.
	ErrOtherSet = errors.New("attached to another cache set")
	// ErrUnflushed: there may be unflushed data that this set does not have.
	ErrUnflushed = errors.New("the device says that it has unflushed data in the cache, and the cache set does not know it")
	// ErrBlockSize: the backing device's blocks are smaller than the set's.
	ErrBlockSize = errors.New("block size less than the set's block size")
	// ErrNoVolume: there is no such flash-only volume.
	ErrNoVolume = errors.New("no such flash-only volume")
	// ErrNoBacking: a flash-only volume has no backing device.
	ErrNoBacking = errors.New("a flash-only volume has no backing device")
	// ErrDetached: the volume is not attached to a set, or about to leave it.
	ErrDetached = errors.New("not attached")
	// ErrNoSpace: a flash-only volume found no room in the cache.
	ErrNoSpace = fmt.Errorf("the cache has no room for more data that is nowhere else: %w", unix.ENOSPC)
)

const (
	ioDepth    = 128 // of each device
	fillMost   = 2048
	fillBytes  = 64 << 20         // of fills under way
	cutoffAdd  = 95               // percent in use above which nothing is added to the cache
	spaceTries = 8                // batches of buckets that a write which stays in the cache waits for
	spaceLong  = 30 * time.Second // or so long, where it can go nowhere else
	flushEvery = 5 * time.Second  // at the latest, clean keys wait no longer for a flush of the backing device
	maxKey     = 32768            // sectors of an invalidation, the kernel's limit
)

// A below is a device below the volume.
type below struct {
	dev   blockdev.Device
	info  blockdev.Info
	align int
	queue blockdev.Queue
}

// A Volume is an open volume. It is a blockdev.Device: all methods are safe for concurrent use.
type Volume struct {
	set   *cacheset.Set
	rt    *rt.Runtime
	log   *slog.Logger
	info  atomic.Pointer[blockdev.Info]
	name  string
	inode uint32
	flash bool
	first uint64                            // sector of the key space where the volume begins: the data offset
	block uint64                            // sectors of a block of the set
	super atomic.Pointer[ondisk.Superblock] // of the backing device, as stored; replaced as a whole
	claim ondisk.UUID                       // see cacheset.Set.Claim
	bio   *blockdev.IO                      // on the backing device: superblock, flushes

	back, cache below // back.dev is nil for flash-only volumes
	pool        *blockdev.Pool
	config      atomic.Pointer[conf]
	changing    rt.Mutex // one change of superblock or config at a time; taken before the set's lock

	fillRoom rt.Semaphore
	ops      freeList[op]

	stop    context.Context
	cancel  context.CancelFunc
	running rt.WaitGroup
	closed  atomic.Bool
	drainer *drainer // nil: flash-only

	// Guarded by the set's lock.
	ranges  ranges
	begun   uint64 // flushes of the backing device that have begun; counts from 1
	flushed uint64 // the greatest of them that is done
	flushing
	flushFails uint64 // how many have failed
	told       uint64 // how many of these a queue that is made now counts as told of
	acks       acks
	wrote      uint64 // begun when the last write of the backing device was done
	point      uint32 // the next queue's number
	newest     uint64 // journal entry of the last change of the volume's part of the index
	dirty      dirtyState
	left       bool // the volume has given its inode up, for good: it may be another's

	warned   [warnings]warned
	replaced []*conf // configurations that requests may still go by
	stats    Stats
}

// Stats are totals since the volume was opened. Requests of a read count as hits, misses and so on as a whole: a half
// hit is a miss.
type Stats struct {
	Hits, Misses, BypassHits, BypassMisses uint64

	Bypassed                                                  uint64 // sectors of reads and writes that went round the cache
	BypassSequential, BypassFull, BypassMode, BypassUnaligned uint64 // requests

	MissCollisions  uint64 // fills that a write voided
	ReadRaces       uint64 // cache reads whose bucket was reused meanwhile
	CacheReadErrors uint64
	FillsSkipped    uint64 // too many under way, or no bucket

	CacheWriteErrors uint64 // of data; its blocks are not in the cache, or the request failed
	NoRoom           uint64 // writes of which not all found room in the cache

	// Writes of a volume in writeback mode that did not stay in the cache, although nothing else kept them out of it.
	DeclinedFull, DeclinedNoRoom uint64 // too many buckets in use; no bucket ready

	Reads, Writes, Flushes, Discards, Zeroes uint64
	ReadSectors, WrittenSectors              uint64
	InvalidationWaits                        uint64 // writes that waited for a durable invalidation (strict)
}

// Info describes the volume as a device.
func (v *Volume) Info() blockdev.Info { return *v.info.Load() }

// unit returns what requests begin and end at, in sectors: a block of the volume. Data that is cached does so too, but
// what a kernel has cached only at the set's blocks.
func (v *Volume) unit() uint64 { return uint64(v.info.Load().LogicalBlock) / ondisk.SectorSize }

// down and up return where the block of the volume that has a sector begins, and where the one before a sector ends. The
// first block begins at the data offset, which need be no multiple of it.
func (v *Volume) down(sector uint64) uint64 {
	if sector <= v.first {
		return sector
	}
	return sector - (sector-v.first)%v.unit()
}

func (v *Volume) up(sector uint64) uint64 {
	if at := v.down(sector); at != sector {
		return at + v.unit()
	}
	return sector
}

// Runtime returns the runtime of the set.
func (v *Volume) Runtime() *rt.Runtime { return v.rt }

// Inode returns the volume's slot in the set.
func (v *Volume) Inode() uint32 { return v.inode }

// Flash reports whether the volume has no backing device.
func (v *Volume) Flash() bool { return v.flash }

// Stats returns totals.
func (v *Volume) Stats() Stats {
	v.set.Lock()
	defer v.set.Unlock()
	return v.stats
}

// DirtySectors returns how much of the volume is only in the cache.
func (v *Volume) DirtySectors() int64 {
	v.set.Lock()
	defer v.set.Unlock()
	return v.dirtyLocked()
}

// dirtyLocked returns the dirty sectors of the volume.
func (v *Volume) dirtyLocked() int64 {
	if v.left {
		return 0
	}
	return v.set.DirtyLocked(v.inode)
}

// State returns the state of the backing device as it is stored.
func (v *Volume) State() ondisk.State {
	if v.flash {
		return ondisk.StateNone
	}
	return v.super.Load().State()
}

// Label returns the volume's label.
func (v *Volume) Label() string {
	if v.flash {
		slots := v.set.Slots()
		return slots[v.inode].LabelString()
	}
	return v.super.Load().LabelString()
}

// open makes the queues and starts what runs in the background.
func (v *Volume) open() error {
	v.pool = blockdev.NewPool(blockdev.PoolOptions{})
	v.fillRoom.Init(v.rt, fillBytes)
	v.set.BindCond(&v.ranges.ended)
	v.ops.init(v.rt)
	v.running.Init(v.rt)
	v.stop, v.cancel = context.WithCancel(context.Background())
	for _, b := range []*below{&v.back, &v.cache} {
		if b.dev == nil {
			continue
		}
		b.info = b.dev.Info()
		b.align = b.info.BufferAlign
		q, err := b.dev.NewQueue(ioDepth, groupDone)
		if err != nil {
			return err
		}
		b.queue = q
	}
	if !v.flash {
		// What the device was sent before, by us or others, is not in its cache any more: fills need not wait.
		if err := v.flushBacking(); err != nil {
			return err
		}
		if err := v.startDrainer(); err != nil {
			return err
		}
		v.running.Go("volume flusher", v.flushLoop)
	}
	return nil
}

// Close ends the volume when its queues are closed: the backing device is flushed, so that the index may say what it
// has. Dirty data stays in the cache; where there is none, the superblock says so. The devices stay open. It returns
// what kept this flush, or an earlier one that nobody was told of, from being made.
func (v *Volume) Close() error {
	if v.closed.Swap(true) {
		return blockdev.ErrClosed
	}
	v.cancel()
	v.wake()
	v.running.Wait()
	v.set.Lock()
	untold := v.untoldLocked()
	v.set.Unlock()
	var err error
	if !v.flash && v.back.queue != nil && v.set.Err() == nil {
		if err = v.flushBacking(); err == nil {
			_, err = v.makeClean()
		}
	}
	v.release()
	return errors.Join(untold, err)
}

func (v *Volume) release() {
	if v.drainer != nil {
		v.drainer.release()
	}
	for _, b := range []*below{&v.back, &v.cache} {
		if b.queue != nil {
			_ = b.queue.Close()
		}
	}
	if v.bio != nil {
		_ = v.bio.Close()
	}
	if v.pool != nil {
		v.pool.Trim(0)
	}
	if !v.claim.IsZero() {
		v.set.Unclaim(v.claim) // last: it may be opened again now
	}
}

// flushLoop is the goroutine that flushes the backing device where no client does: clean keys wait for it. It also sees to
// those that a failed flush has made void.
func (v *Volume) flushLoop() {
	for v.rt.SleepContext(v.stop, flushEvery) == nil {
		v.pool.TrimIdle()
		v.set.Lock()
		due, losing := !v.left && v.set.HoldingLocked(v.inode), !v.left && v.set.LosingLocked(v.inode)
		v.set.Unlock()
		if losing {
			_ = v.set.DropLost(v.stop, v.inode) // the set logs why it has stopped
		}
		if !due {
			continue
		}
		if err := v.flushBacking(); err != nil {
			v.log.Warn("flushing the backing device failed; what was not flushed counts as not cached, and clients are told", "volume", v.name, "err", err)
		}
	}
}

// EachState calls fn with the parts of a range of bytes in order: whether they are cached, and dirty. It reads nodes
// where it must.
func (v *Volume) EachState(off, n int64, fn func(cached, dirty bool, off, n int64) bool) error {
	if off < 0 || n < 0 || off > v.Info().Size-n {
		return blockdev.ErrOutOfRange
	}
	if is, _ := v.Detached(); is {
		fn(false, false, off, n)
		return nil
	}
	at, end := v.first+uint64(off)/ondisk.SectorSize, v.first+uint64(off+n)/ondisk.SectorSize
	for at < end {
		v.set.Lock()
		p, miss := v.set.LookupLocked(v.inode, at, end)
		good := miss.IsZero() && p.Cached && v.set.GoodLocked(p.Ptr)
		v.set.Unlock()
		if !miss.IsZero() {
			if err := v.set.ReadNode(miss); err != nil {
				return err
			}
			continue
		}
		if !fn(good, good && p.Dirty, int64(p.Start-v.first)*ondisk.SectorSize, int64(p.End-p.Start)*ondisk.SectorSize) {
			return nil
		}
		at = p.End
	}
	return nil
}
