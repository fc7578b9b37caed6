package journal

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A Header is what an entry says about the set besides its keys: where the roots are. All that it refers to is
// durable, or at least written, on the cache device.
type Header struct {
	Root       ondisk.Key // btree_root
	Level      uint16     // of the root
	UUIDBucket ondisk.Key
	Prio       uint64 // bucket number of the first prio set
}

// An Owner is the set that the journal belongs to.
type Owner interface {
	// JournalHeader fills in the header of the entry that is being closed. It is called with the set's lock held and
	// must not wait.
	JournalHeader(h *Header)

	// WriteOldest writes out whatever pins entries up to and including upTo, the root and nodes of every level among
	// it, and lets go of the pins. It is called without the lock, by one goroutine; it returns when what it
	// found is done, or under way elsewhere and done, or with the error that kept it from that. An error fails the
	// journal. ctx ends when the journal is closed.
	//
	// What pins entries up to ahead, if that is more, is to be written soon, too, after the others; it is not waited for.
	//
	// It may need entries for roots and gens, any number of them, and may find that a node is held by someone who waits
	// for one. Such entries are urgent (RequestEntryLocked). It must not wait for a Reserve, or for anyone who does.
	WriteOldest(ctx context.Context, upTo, ahead uint64) error
}

// DefaultDelay is how long keys wait for company before their entry is written, where nobody asks earlier.
const DefaultDelay = 100 * time.Millisecond

// A Config says what a Journal works with.
type Config struct {
	Runtime *rt.Runtime
	Lock    *rt.Mutex // the set's: guards the journal's state too. It must have been bound to Runtime
	Source            // Source.IO best has a queue of its own, so that entries never wait behind data
	Dev     int       // index of the cache device in the set (nr_this_dev)
	Owner   Owner

	// Shared is where the open entry lives. Without it the process's death loses what is not on disk, so that
	// Acknowledge waits. Open takes it over, and Close leaves it empty; the caller unmaps it after that.
	Shared   *Shared
	Identity Identity // of this activation: the superblock's seq as it will be once raised

	Delay time.Duration // default DefaultDelay; see SetDelay
}

// A Journal writes the entries of one running set. Methods whose names end in Locked are called with the set's lock
// held and never wait; all others take it themselves, and are safe for concurrent use.
type Journal struct {
	rt      *rt.Runtime
	mu      *rt.Mutex // the set's
	io      *blockdev.IO
	geo     ondisk.Geometry
	dev     int
	owner   Owner
	shared  *Shared // never nil
	lasting bool    // shared outlasts the process
	sector  int     // bytes that the device writes whole
	pool    *blockdev.Pool
	buf     *blockdev.Buffer // the newest entry as it is on disk, or goes there

	failed  atomic.Pointer[FailedError]
	stopped context.Context // of the owner's callback
	stop    context.CancelFunc
	running rt.WaitGroup // writer and reclaimer

	// All that follows is guarded by the set's lock.

	ring   ring
	pos    position // behind the last closed entry
	pins   pinTable
	closed bool
	start  bool // replay is not over

	// The open entry. Its keys are in the shared slot.
	seq    uint64
	renum  numbering
	number uint64 // its seq on disk, and in the mapping
	slot   int
	words  int
	due    time.Duration // when it is written at the latest, if it has keys
	timer  *rt.Timer
	delay  time.Duration

	// The closed entry under way, if any.
	flying bool
	flight flight
	header Header // what the owner fills in, here so that it need not be allocated

	durable    uint64   // greatest seq on disk
	durablePos position // behind it
	lastSeq    uint64   // of the last closed entry
	placed     place    // of the newest entry that was not amended

	wanted     uint64 // someone waits for this entry to be durable
	wantedRoom uint64 // the same, and it may use the room that is kept
	done       [2]rt.Cond
	work       rt.Cond // for the writer
	tight      rt.Cond // for the reclaimer
	blocked    bool    // the writer, or a reservation, waits for room

	reserved int // words
	waiters  waiterList

	replay    Pin // the oldest entry not yet replayed
	replayEnd uint64

	stats Stats
}

// A flight is an entry on its way to the disk.
type flight struct {
	seq         uint64 // set.Seq is that on disk
	set         ondisk.JSet
	pos         position // behind it
	off         int64    // bytes on the device
	amends      bool     // it takes the place of the header of the entry before
	lastDurable uint64   // last_seq of the entry before it
}

// Stats counts what a journal has done.
type Stats struct {
	Entries      uint64 // written
	EmptyEntries uint64 // of these, without keys
	Amended      uint64 // and these: headers written over that of the newest entry, since the ring was full
	Keys         uint64 // appended
	Bytes        uint64 // written, rounded up to blocks
	Commit       time.Duration

	ReserveWaits uint64 // reservations that had to wait for room: in memory (the entry before is not on disk yet) or on disk
	ReserveWait  time.Duration
	DurableWaits uint64 // flushes, FUA and root changes that waited for an entry
	DurableWait  time.Duration
	Reclaims     uint64 // calls of Owner.WriteOldest

	// The state now.
	Seq, LastSeq, Durable uint64 // open entry; oldest that the newest entry needs; greatest on disk
	Oldest                uint64 // oldest pinned
	Reserved              int    // words
	UsedBlocks, Blocks    int    // of the ring: needed, and all but what is left for a start (which starts may have taken)
}

// Open starts the journal of a set. r is what Read found, with the keys of a shared mapping if there was one; nil
// for a set that has no entry yet (see Erase): its first has seq 1 and lies in the ring's second bucket, as a kernel
// would have it.
//
// Keys of the shared mapping are written to the ring first; then the mapping is set up anew for this activation.
// The superblock's seq must be raised, durably, after Open and before anything is acknowledged.
//
// The journal is then in its starting phase, in which the entries of r are pinned and Reserve waits. The owner
// inserts their keys again (Recovery.EachKey, ReplayedLocked) and ends the phase with StartedLocked. Entries for roots
// and gens may be written meanwhile.
//
// Entries are of version 1. Where r.Newest is of version 0, the first one must name a uuid array of the new form.
func Open(ctx context.Context, c Config, r *Recovery) (*Journal, error) {
	if len(c.Buckets) < ondisk.MinJournalBuckets {
		return nil, fmt.Errorf("%w: %d, want %d", ErrFewBuckets, len(c.Buckets), ondisk.MinJournalBuckets)
	}
	j := &Journal{
		rt: c.Runtime, mu: c.Lock, io: c.IO.WithPurpose(blockdev.ForJournal), geo: c.Geometry, dev: c.Dev, owner: c.Owner,
		shared: c.Shared, lasting: c.Shared != nil, sector: c.IO.Device().Info().LogicalBlock,
		ring: newRing(&c.Geometry, c.Buckets), delay: c.Delay, start: true, seq: 1, number: 1,
	}
	if j.shared == nil {
		j.shared = NewShared()
	}
	if j.delay == 0 {
		j.delay = DefaultDelay
	}
	for i := range j.done {
		j.done[i].Init(j.mu)
	}
	j.work.Init(j.mu)
	j.tight.Init(j.mu)
	j.running.Init(j.rt)
	j.stopped, j.stop = context.WithCancel(context.Background())
	j.pool = blockdev.NewPool(blockdev.PoolOptions{})
	j.buf = j.pool.Get(ondisk.MaxJSetBytes)

	j.pos = position{used: j.ring.blocks}
	j.durablePos = j.pos
	j.pins.tail = 1
	if r != nil {
		if err := j.resume(ctx, r); err != nil {
			j.release()
			return nil, err
		}
	}
	j.durable = j.seq - 1
	j.number = j.seq
	j.shared.reset(c.Identity, j.number)
	j.timer = j.rt.AfterFunc(24*time.Hour, j.timeout)
	j.timer.Stop()
	j.running.Go("journal writer", j.write)
	j.running.Go("journal reclaimer", j.reclaim)
	return j, nil
}

// resume takes over what was recovered: the ring goes on behind the newest entry, over what is left there of one that was
// torn.
//
// A torn entry cannot come back to hide or to follow what is written over it: its writer was gone before this process got
// the device, and the next entry is issued only when the one here is durable. A kernel finds in the bucket what it would
// if one process had written all of it. Where it would not see the newest, behind a damaged one, the next bucket is begun.
func (j *Journal) resume(ctx context.Context, r *Recovery) error {
	copy(j.ring.last, r.last)
	j.seq, j.lastSeq = r.Newest.Seq+1, r.Newest.LastSeq
	j.pos = position{cur: r.bucket, used: int(r.end / int64(j.ring.blockSize)), oldest: int(r.Entries[0].Bucket)}
	if r.hidden {
		j.pos.used = j.ring.blocks
	}
	j.pins.tail = r.Entries[0].Seq
	if err := j.resumeNewest(r); err != nil {
		return err
	}
	if err := j.writeMapped(ctx, r); err != nil {
		return err
	}
	j.durablePos = j.pos
	if j.pos.used == j.ring.blocks && j.ring.space(j.pos).more > 0 {
		j.pos.cur, j.pos.used = j.ring.next(j.pos.cur), 0 // the start's bucket, taken while its rule holds
	}
	j.replayEnd = j.seq - 1
	j.replay.seq = j.pins.tail
	*j.pins.at(j.pins.tail)++
	return nil
}

// resumeNewest has the newest entry in memory, to be amended. All that was read is durable when it returns: a process
// that was killed may have left it in the device's cache, and what follows is built on it.
func (j *Journal) resumeNewest(r *Recovery) error {
	at := r.src.at(int32(r.bucket), r.end-r.src.length(&r.Newest))
	b := j.buf.Data[:r.src.length(&r.Newest)]
	if err := j.io.ReadAt(b, at); err != nil {
		return fmt.Errorf("journal entry %d: %w", r.Newest.Seq, err)
	}
	if set, err := ondisk.DecodeJSet(b, &j.geo); err != nil || set.Seq != r.Newest.Seq {
		return fmt.Errorf("%s: journal entry %d has changed since it was read: %w", r.device(), r.Newest.Seq, ondisk.ErrCorrupt)
	}
	j.placed = place{seq: r.Newest.Seq, off: at, bytes: r.Newest.Bytes()}
	return j.io.Flush()
}

// writeMapped writes the keys of the shared mapping to the ring, in the entries that they were in. Their headers are
// the newest entry's: it is all that the process which died had got durable.
//
// If this process dies in between, the next finds the first of them on disk, and in the mapping, which still has the
// superblock's seq, the second, which has its place behind: see ring.restart.
func (j *Journal) writeMapped(ctx context.Context, r *Recovery) error {
	mapped := r.mapped
	r.Entries = r.Entries[:len(r.Entries)-len(mapped)]
	r.mapped, r.Mapped = nil, 0
	set := r.Newest
	for _, e := range mapped {
		if err := ctx.Err(); err != nil {
			return err
		}
		set.Seq, set.Data = j.seq, e.keys
		words := len(set.Data) / 8
		pos, ok := j.ring.after(j.pos, words, set.LastSeq)
		if !ok || words > j.ring.mostWords {
			return fmt.Errorf("%w for %d bytes of keys that the last process had acknowledged", ErrNoRoom, len(set.Data))
		}
		at := int64(pos.used-j.ring.blocksFor(words)) * int64(j.ring.blockSize)
		off := j.ring.offset(&j.geo, pos.cur, 0) + at
		if err := j.put(&set, off, false); err != nil {
			return &FailedError{Seq: j.seq, Err: err}
		}
		set.Keys = uint32(words)
		r.Entries = append(r.Entries, Entry{Seq: j.seq, Bucket: int32(pos.cur), At: at, Bytes: int32(set.Bytes())})
		j.ring.last[pos.cur] = j.seq
		j.placed = place{seq: j.seq, off: off, bytes: set.Bytes()}
		j.pos = pos
		j.seq++
	}
	return nil
}

// StartedLocked ends the starting phase: all is replayed. From now on one bucket is left free for the next start, and
// keys can be reserved room for. The set's lock is held.
func (j *Journal) StartedLocked() {
	j.UnpinLocked(&j.replay)
	j.start = false
	j.ring.hold = holdRun
	j.grantLocked()
	j.work.Signal()
	j.tight.Signal()
}

// SetDelay changes how long keys wait for company (the attribute journal_delay_ms), for entries begun from now on.
func (j *Journal) SetDelay(d time.Duration) {
	j.mu.Lock()
	j.delay = max(d, time.Millisecond)
	j.mu.Unlock()
}

// Stats returns what the journal has done so far.
func (j *Journal) Stats() Stats {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.stats
	s.Seq, s.LastSeq, s.Durable, s.Oldest, s.Reserved = j.seq, j.lastSeq, j.durable, j.OldestPinLocked(), j.reserved
	s.UsedBlocks, s.Blocks = j.ring.used(j.pos), j.ring.capacity()
	return s
}

// Close writes the open entry if it has keys, then ends the journal; ctx bounds the first part only. It returns the
// error that kept keys from the disk, if any; then the shared mapping keeps them. Nobody may be using the
// journal any more but for those who wait, who get ErrClosed.
func (j *Journal) Close(ctx context.Context) error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return ErrClosed
	}
	seq := j.seq
	if j.words == 0 {
		seq--
	}
	_, err := j.WaitDurableLocked(ctx, seq)
	j.closed = true
	j.stop()
	j.wakeAllLocked()
	j.mu.Unlock()
	j.running.Wait()
	j.timer.Stop()
	if err == nil {
		j.shared.invalidate()
	}
	j.release()
	return err
}

func (j *Journal) release() {
	j.stop()
	j.buf.Release()
	j.pool.Trim(0)
}

// Err returns why the journal has failed, nil if it has not.
func (j *Journal) Err() error {
	if f := j.failed.Load(); f != nil {
		return f
	}
	return nil
}

// errLocked returns why the journal serves nobody any more.
func (j *Journal) errLocked() error {
	if f := j.failed.Load(); f != nil {
		return f
	}
	if j.closed {
		return ErrClosed
	}
	return nil
}

// failLocked ends acknowledging.
func (j *Journal) failLocked(seq uint64, err error) {
	if errors.Is(err, context.Canceled) && j.closed {
		return
	}
	j.failed.CompareAndSwap(nil, &FailedError{Seq: seq, Err: err})
	j.wakeAllLocked()
}

func (j *Journal) wakeAllLocked() {
	for i := range j.done {
		j.done[i].Broadcast()
	}
	for w := j.waiters.head; w != nil; w = w.next {
		w.granted.Signal()
	}
	j.work.Broadcast()
	j.tight.Broadcast()
}
