package cacheset

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// Options modify Open. The zero value of each field is its default.
type Options struct {
	// Shared is where the open journal entry lives, so that the process's death loses nothing acknowledged; nil:
	// nowhere, and every acknowledgement waits for the disk. Boot names this boot of the machine. The caller closes
	// it after the set.
	Shared *journal.Shared
	Boot   ondisk.UUID

	NodeCache    int64         // bytes of nodes kept in memory; default 256 MiB
	JournalDelay time.Duration // how long keys wait for company; default 100 ms
	Buckets      bucket.Options
	VerifyEvery  time.Duration // how long from one verification of the counts to the next; default a week

	// Restless has work in the background begin again as soon as it is through, without a pause, whether there is need
	// for it or not: for tests and measurements.
	Restless bool

	Broken Broken // rules not to keep: for tests

	// Of the verifier, for tests: buckets counted in one walk, as many as verifyMemory is enough for, and extents in one hold
	// of the lock.
	verifyWindow uint32
	verifyKeys   int
	markKeys     int  // as markSlice: likewise
	noMove       bool // dirty data stays where it is: for tests that say where

	Logger *slog.Logger // default: none
}

const (
	defaultNodeCache = 256 << 20

	ioDepth     = 64 // metadata operations at a time
	writers     = 4  // nodes that are brought to the disk at a time
	scanners    = 16 // nodes read at a time at the start
	appendBytes = 4096 - 48

	appendsAtOnce = 16 // nodes of which a writer brings the appends to the disk together

	dirtyAge   = 30 * time.Second // a node is written when it has waited so long
	tickEvery  = time.Second
	closeLimit = 10 * time.Second
	startLimit = 5 * time.Minute // a start in which nothing happens for so long is given up

	startBuckets = 32 // for nodes that are rewritten during replay, at most
	writeTries   = 3
	retryPause   = 100 * time.Millisecond
)

// Sentinels.
var (
	// ErrClosed: the set has been closed.
	ErrClosed = errors.New("cache set: closed")
	// ErrFailed is matched by what a set answers that could not write its metadata.
	ErrFailed = errors.New("cache set failed")
	// ErrHangs: a device does not answer, and was left with what it was asked. Nothing is lost that was
	// acknowledged, but it cannot be closed.
	ErrHangs = errors.New("the device does not answer")
	// ErrNoSlot: the uuid array has no free slot for one more volume.
	ErrNoSlot = errors.New("no room in the uuid array for one more volume")
	// ErrStuck: a start waits for something that does not come. It was given up, and nothing is lost.
	ErrStuck = errors.New("the start does not go on")
	// ErrNoSpace: no bucket can be had for metadata.
	ErrNoSpace = errors.New("cache set: no bucket for metadata")
)

// A FailedError says why a set has stopped. It matches ErrFailed and its cause.
type FailedError struct{ Err error }

func (e *FailedError) Error() string { return "the cache set has stopped: " + e.Err.Error() }

// Unwrap makes errors.Is find ErrFailed and the cause.
func (e *FailedError) Unwrap() []error { return []error{ErrFailed, e.Err} }

// A Set is a running cache set. Methods whose names end in Locked are called with the set's lock held and never
// wait; all others take it themselves, and are safe for concurrent use.
type Set struct {
	rt   *rt.Runtime
	log  *slog.Logger
	dev  blockdev.Device
	info blockdev.Info
	io   *blockdev.IO // metadata
	jio  *blockdev.IO // journal
	dio  *blockdev.IO // discards; nil: the device cannot do them
	pool *blockdev.Pool
	opt  Options

	geo   ondisk.Geometry
	super ondisk.Superblock

	failed    atomic.Pointer[FailedError]
	stalls    stalls
	used      atomic.Bool // see NoteRequest
	idleMax   atomic.Bool
	inflight  atomic.Int64 // requests
	attaching rt.Mutex     // one change of the slots at a time; taken before mu
	gcChange  rt.Mutex     // one change of the policy; likewise

	// The lock. All that follows is guarded by it.
	mu      rt.Mutex
	tree    *btree.Tree
	journal *journal.Journal
	table   *bucket.Table
	pin     journal.Pin // the oldest entry that the tree needs

	slots   []ondisk.UUIDEntry
	claimed map[ondisk.UUID]bool // of open volumes
	uuids   ondisk.Key           // where the array lies
	dirty   []dirtyMap           // of each inode
	started uint64               // newest journal entry when the replay was over
	start   progress             // of the replay
	prio    uint64               // bucket of the first prio set
	prioNo  uint64               // seq of the newest prio sets

	open [uses]openList // buckets that take data

	closed  bool
	running rt.WaitGroup
	stop    context.Context // ends when the set is closed
	cancel  context.CancelFunc

	loading map[uint32]bool     // buckets of nodes that are being read; true: somebody waits
	lane    rt.Semaphore        // see gently
	torn    map[ondisk.Ptr]bool // nodes whose last append was torn, and does without
	jobs    []*btree.Node       // nodes to write
	crowded []*btree.Node       // nodes to rewrite, before these: they may be waited for
	work    rt.Cond             // for the writers
	busy    int                 // writers and tidiers at work
	changed rt.Cond             // a node was read, written, rewritten or let go
	aging   []aged              // nodes with keys that are not on the disk, in the order in which they became so
	chores  []chore             // for the tidiers
	chore   rt.Cond             // chores have come, or are done
	lagging rt.Cond             // for the sweeper

	tidying  int       // tidiers at work
	emptied  int       // keys that went since the last sweep began, and left nothing in their place
	serving  bool      // the replay is over
	index    IndexSize // as the last sweep has found it
	refill   rt.Cond   // for the refiller
	ready    rt.Cond   // buckets are ready, or room is
	batching bool      // a batch of buckets is on its way to the disk
	needMeta int       // who waits for a bucket for metadata
	dead     rt.Cond   // a slot was retired
	verify   verifier
	gc       collector
	gate     *gate         // while a policy collects; nil: nobody is kept out
	marks    *bucket.Marks // of such a policy

	slotFreed rt.Cond // retired slots can be used again, or cannot be had
	stuck     bool    // they cannot

	discards      rt.Cond // the setting has changed, or the replay is over
	discardFailed bool    // it was said
	move          rt.Cond // for the mover
	noMove        bool    // see SetMoving
	moving        bool    // a pass is under way
	needSpace     int     // who waits for room for dirty data

	backed map[uint32]uint64 // sectors of the backing devices of open volumes, by inode
	idle   int               // see IdleLocked

	requests uint64 // see NoteRequestsLocked

	batchEntry uint64        // the entry that the batch under way waits for
	noted      uint64        // newest durable entry that the table knows of
	deltas     bucket.Deltas // of the insert under way
	freed      []btree.Ref

	stats Stats
}

// Stats are totals since the start.
type Stats struct {
	NodeReads, NodeAppends, NodeRewrites, NodeSplits uint64
	NodesSwept                                       uint64 // by sweeps
	NodesCoalesced                                   uint64 // that were replaced by fewer
	NodesStale                                       uint64 // rewritten since pointers were old, or most keys said nothing
	TreesLowered                                     uint64 // times that a root went for its only child
	RoomWaits                                        uint64 // insertions that waited until a leaf was split
	ReplayedKeys, MappedEntries                      uint64
	NoBucket                                         uint64 // data that found no bucket ready
	SlotsFreed                                       uint64 // of volumes that are no more
	DiscardedBuckets, DiscardedBytes, DiscardErrors  uint64

	MovePasses   uint64 // passes that brought dirty data together
	MovedKeys    uint64 // extents in these
	MovedSectors uint64
	MovedBuckets uint64 // that have nothing dirty any more
	MoveErrors   uint64 // extents and nodes that could not be read, writes that failed

	VerifyPasses     uint64 // times that all counts were held against the index
	VerifyMismatches uint64 // counts that were something else: each is a bug, or damage in memory
	VerifyTrusted    uint64 // buckets in doubt whose counts were found to be right
}

// Lock takes the set's lock: for Locked methods. It is held for microseconds.
func (s *Set) Lock() { s.mu.Lock() }

// Unlock lets the lock go.
func (s *Set) Unlock() { s.mu.Unlock() }

// Runtime returns the runtime that the set runs on: its device's.
func (s *Set) Runtime() *rt.Runtime { return s.rt }

// Device returns the cache device.
func (s *Set) Device() blockdev.Device { return s.dev }

// Geometry returns the sizes of the set.
func (s *Set) Geometry() *ondisk.Geometry { return &s.geo }

// UUID returns the set's uuid.
func (s *Set) UUID() ondisk.UUID { return s.super.SetUUID }

// Err returns why the set has stopped, nil if it has not.
func (s *Set) Err() error {
	if f := s.failed.Load(); f != nil {
		return f
	}
	if s.journal != nil {
		return s.journal.Err()
	}
	return nil
}

// fail stops the set.
func (s *Set) fail(err error) error {
	f := &FailedError{err}
	if s.failed.CompareAndSwap(nil, f) {
		s.log.Error("the cache set has stopped", "set", s.UUID().String(), "err", err)
	}
	s.mu.Lock()
	s.wakeAllLocked()
	s.mu.Unlock()
	return s.Err()
}

func (s *Set) wakeAllLocked() {
	s.work.Broadcast()
	s.chore.Broadcast()
	s.changed.Broadcast()
	s.refill.Broadcast()
	s.ready.Broadcast()
	s.dead.Broadcast()
	s.slotFreed.Broadcast()
	s.discards.Broadcast()
	s.move.Broadcast()
	s.lagging.Broadcast()
	s.verify.wake.Broadcast()
	s.gc.wake.Broadcast()
	s.gc.over.Broadcast()
}

// errLocked returns why nobody is served any more.
func (s *Set) errLocked() error {
	if err := s.Err(); err != nil {
		return err
	}
	if s.closed {
		return ErrClosed
	}
	return nil
}

// gen is what the tree asks for generations: what it leaves out of a copy, because it is stale, must not come back after
// a crash, for then a write that found nothing to invalidate would be undone.
func (s *Set) gen(b uint64) uint8 { return s.table.SafeGen(uint32(b)) }

// bucketOf returns the bucket that a node lies in.
func (s *Set) bucketOf(p ondisk.Ptr) uint32 { return uint32(s.geo.Bucket(p.Sector())) }

// LookupLocked says what there is at sector from of an inode: see btree.Tree.Lookup. Where a node is missing, miss
// names it, for ReadNode.
func (s *Set) LookupLocked(inode uint32, from, to uint64) (btree.Piece, btree.Ref) {
	return s.tree.Lookup(inode, from, to)
}

// GoodLocked reports whether a pointer is to what its bucket holds now.
func (s *Set) GoodLocked(p ondisk.Ptr) bool {
	b, ok := s.table.Bucket(p)
	return ok && s.table.Gen(b) == p.Gen()
}

// EvictingLocked reports whether a pointer that is not good any more would be good again after a crash.
func (s *Set) EvictingLocked(p ondisk.Ptr) bool { return s.table.Evicting(p) }

// TouchLocked notes a hit.
func (s *Set) TouchLocked(p ondisk.Ptr) { s.table.Touch(s.bucketOf(p)) }

// HoldLocked pins the bucket that a pointer names, if the pointer is good: what it names stays until LetGoLocked.
func (s *Set) HoldLocked(p ondisk.Ptr) bool { return s.table.PinIf(p) }

// LetGoLocked ends a hold.
func (s *Set) LetGoLocked(p ondisk.Ptr) { s.table.Unpin(s.bucketOf(p)) }

// Age counts the sectors of an accepted request: priorities sink with them.
func (s *Set) Age(sectors uint64) { s.table.Age(sectors) }

// InUseLocked returns how many percent of the buckets are in use, exactly.
func (s *Set) InUseLocked() int { return s.table.InUse() }

// UsedLocked returns how many buckets are in use.
func (s *Set) UsedLocked() int { return s.table.Used() }

// NoteRequest says that a volume has got a request: the set is in use.
func (s *Set) NoteRequest() {
	if !s.used.Load() { // a store costs the other processors more
		s.used.Store(true)
	}
}

// NoteRequestsLocked counts requests that came together.
func (s *Set) NoteRequestsLocked() { s.requests++ }

// RequestsLocked returns how often NoteRequestsLocked was called: if it is more than before, requests have come.
func (s *Set) RequestsLocked() uint64 { return s.requests }

// Noted reports whether a request has come since IdleLocked was asked last.
func (s *Set) Noted() bool { return s.used.Load() }

// IdleLocked returns how often it was asked without a request in between.
func (s *Set) IdleLocked() int {
	s.idle++
	if s.used.Swap(false) {
		s.idle = 0
	}
	return s.idle
}

// SetIdleMaxRate changes whether an idle set is written back as fast as it goes; IdleMaxRate tells.
func (s *Set) SetIdleMaxRate(yes bool) { s.idleMax.Store(yes) }

// IdleMaxRate reports whether an idle set is written back as fast as it goes.
func (s *Set) IdleMaxRate() bool { return s.idleMax.Load() }

// BackLocked says that a volume of that inode is open, with a backing device of so many sectors; UnbackLocked ends that.
func (s *Set) BackLocked(inode uint32, sectors uint64) { s.backed[inode] = sectors }

// UnbackLocked is the end of BackLocked.
func (s *Set) UnbackLocked(inode uint32) { delete(s.backed, inode) }

// BackedLocked returns how many volumes with backing devices are open, and the sectors of these devices in all.
func (s *Set) BackedLocked() (volumes int, sectors uint64) {
	for _, n := range s.backed {
		sectors += n
	}
	return len(s.backed), sectors
}

// FlashDirtyLocked returns the sectors of the flash-only volumes that have data.
func (s *Set) FlashDirtyLocked() (sectors int64) {
	for i := range s.slots {
		if s.slots[i].FlashOnly() {
			sectors += s.dirty[i].total
		}
	}
	return sectors
}

// forever is for waits of requests: the journal ends them when it fails or is closed, and a context that can end costs
// three allocations a wait.
var forever = context.Background()

// Lasting reports whether what was inserted may be acknowledged at once, so that Acknowledge waits for nothing.
func (s *Set) Lasting() bool { return s.opt.Shared != nil }

// Acknowledge returns when a change in journal entry seq may be acknowledged. It is for requests.
func (s *Set) Acknowledge(seq uint64) error {
	if seq == 0 || !s.Lasting() {
		return s.WaitDurableRequest(seq)
	}
	return s.journal.Acknowledge(forever, seq)
}

// WaitDurableRequest is WaitDurable on behalf of a request.
func (s *Set) WaitDurableRequest(seq uint64) error {
	if seq == 0 {
		return s.Err()
	}
	s.LockRequest()
	waited, err := s.journal.WaitDurableLocked(forever, seq)
	s.mu.Unlock()
	s.stalls.add(StallJournalWrite, waited)
	return err
}

// SyncRequest is Sync on behalf of a request.
func (s *Set) SyncRequest() error {
	s.LockRequest()
	waited, err := s.journal.WaitDurableLocked(forever, s.journal.NewestLocked())
	s.mu.Unlock()
	s.stalls.add(StallJournalWrite, waited)
	return err
}

// WaitDurable returns when journal entry seq is durable.
func (s *Set) WaitDurable(seq uint64) error {
	if seq == 0 {
		return s.Err()
	}
	return s.journal.WaitDurable(forever, seq)
}

// Sync returns when all that was inserted before is safe from a power cut, and the data that it points to.
func (s *Set) Sync() error { return s.journal.Sync(forever) }

// FlushDoneLocked says that the flush of that number of an inode's backing device is done.
func (s *Set) FlushDoneLocked(inode uint32, flush uint64) { s.tree.FlushDone(inode, flush) }

// FlushFailedLocked says that the youngest flush of an inode's backing device has failed: clean keys that wait for one
// count no more. DropLost takes them out of the index.
func (s *Set) FlushFailedLocked(inode uint32) { s.tree.FlushFailed(inode) }

// LosingLocked reports whether there is something for DropLost to do.
func (s *Set) LosingLocked(inode uint32) bool { return s.tree.Losing(inode) }

// HoldingLocked reports whether clean keys of an inode wait for a flush of its backing device.
func (s *Set) HoldingLocked(inode uint32) bool { return s.tree.Holding(inode) }

// JournalHeader fills in the header of an entry.
func (s *Set) JournalHeader(h *journal.Header) {
	root := s.tree.Root()
	h.Root, h.Level, h.UUIDBucket, h.Prio = root.Key(), uint16(root.Level), s.uuids, s.prio
}

// repinLocked makes the journal keep what the tree needs now.
func (s *Set) repinLocked() {
	oldest, _ := s.tree.OldestPin()
	switch {
	case oldest == 0:
		s.journal.UnpinLocked(&s.pin)
	case oldest != s.pin.Seq():
		var p journal.Pin
		s.journal.PinLocked(&p, oldest)
		s.journal.UnpinLocked(&s.pin)
		s.pin = p
	}
}

// noticeLocked tells the table what has become durable.
func (s *Set) noticeLocked() {
	seq, last := s.journal.DurableLocked()
	s.table.SetReplay(s.journal.NeededLocked())
	if seq == s.noted {
		return
	}
	if !s.table.JournalDurable(seq) && !s.table.JournalPassed(last) {
		s.noted = seq // else the rest comes with the next call
	}
}

// errCorrupt says what is wrong with the set and where.
func (s *Set) errCorrupt(structure string, sector uint64, format string, args ...any) error {
	return &ondisk.CorruptError{Structure: structure, Device: s.info.Name, Sector: int64(sector), Reason: fmt.Sprintf(format, args...)}
}

// BindCond binds a condition to the set's lock.
func (s *Set) BindCond(c *rt.Cond) { c.Init(&s.mu) }

// Logger returns where the set logs to.
func (s *Set) Logger() *slog.Logger { return s.log }

// Info is what there is to say about a set at a moment.
type Info struct {
	Stats
	Buckets      bucket.Counts
	Table        bucket.Stats
	Journal      journal.Stats
	NBuckets     uint32
	InUse        int    // percent
	Live, Dirty  uint64 // sectors
	MaxLag       int
	Nodes        int // in memory
	NodeBytes    int
	Root         btree.Ref
	CacheSuper   ondisk.Superblock
	PendingNodes int // with keys that are not on the disk
	Index        IndexSize
}

// Info takes microseconds, whatever the size of the set.
func (s *Set) Info() Info {
	j := s.journal.Stats()
	s.mu.Lock()
	defer s.mu.Unlock()
	return Info{
		Stats: s.stats, Buckets: s.table.Counts(), Table: s.table.Stats(), Journal: j, NBuckets: s.table.NBuckets(), InUse: s.table.InUse(),
		Live: s.table.LiveSectors(), Dirty: s.table.DirtySectors(), MaxLag: s.table.MaxLag(), Nodes: s.tree.Nodes(), NodeBytes: s.tree.Bytes(),
		Root: s.tree.Root(), CacheSuper: s.super, PendingNodes: len(s.aging), Index: s.index,
	}
}

// SetJournalDelay changes how long keys wait for company before their entry is written.
func (s *Set) SetJournalDelay(d time.Duration) {
	s.journal.SetDelay(d)
	s.mu.Lock()
	s.opt.JournalDelay = d
	s.mu.Unlock()
}

// SetPolicy changes what picks among clean buckets, and writes it to the superblock.
func (s *Set) SetPolicy(p ondisk.Replacement) error {
	s.attaching.Lock()
	defer s.attaching.Unlock()
	super := s.super
	super.SetReplacement(p)
	if err := WriteSuperblock(s.io, &super, s.io.Flush); err != nil {
		return err
	}
	s.mu.Lock()
	s.super = super
	s.table.SetPolicy(p)
	s.mu.Unlock()
	return nil
}

// JournalDelay returns how long keys wait for company.
func (s *Set) JournalDelay() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opt.JournalDelay
}
