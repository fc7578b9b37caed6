package journal

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// What the tests keep on a device: a superblock, the ring, and from bucket leafBucket on a sector for each leaf.
const leafBucket = 100

// A layout is a set's shape.
type layout struct {
	buckets      int // of the journal
	bucket       int // sectors
	block        int // sectors
	leaves       int
	logicalBlock int
}

var smallest = layout{buckets: 4, bucket: 16, block: 1, leaves: 6}

func (l layout) superblock() *ondisk.Superblock {
	sb := &ondisk.Superblock{
		Offset: ondisk.SuperblockSector, Version: ondisk.VersionCache, Magic: ondisk.Magic,
		UUID: ondisk.UUID{1}, SetUUID: ondisk.UUID{2, 3}, Flags: ondisk.FlagSync, Seq: 7, Word184: 513,
		BlockSize: uint16(l.block), BucketSize16: uint16(l.bucket), NrInSet: 1, FirstBucket: uint16(23/l.bucket + 1), NJournal: uint16(l.buckets),
	}
	for i := range l.buckets {
		sb.D[i] = uint64(sb.FirstBucket) + uint64(i)
	}
	return sb
}

// A model is what must be true of the keys, whatever happens. A leaf holds keys 1, 2, 3...; the nth key is the extent
// that ends at sector 8n, and its pointer's sector is its number among all keys of all leaves, so that order and
// completeness show in each key.
type model struct {
	l        layout
	appended []uint64        // keys of each leaf that were appended
	acked    []uint64        // of these, acknowledged
	synced   []uint64        // of these, flushed
	total    uint64          // keys of all leaves
	jumps    map[uint64]bool // numbers of first keys of a life, where those before were not all journalled
	super    uint64          // the superblock's seq
	roots    uint64          // root changes begun; the prio bucket of an entry's header says which it has
	rooted   uint64          // and durable
}

func newModel(l layout) *model {
	return &model{l: l, jumps: map[uint64]bool{}, appended: make([]uint64, l.leaves), acked: make([]uint64, l.leaves), synced: make([]uint64, l.leaves)}
}

func (m *model) clone() *model {
	c := *m
	c.appended = append([]uint64(nil), m.appended...)
	c.jumps = maps.Clone(m.jumps)
	c.acked = append([]uint64(nil), m.acked...)
	c.synced = append([]uint64(nil), m.synced...)
	return &c
}

// A tb is a *testing.T or a *rapid.T.
type tb interface {
	Helper()
	Error(args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Failed() bool
	FailNow()
}

// A world is one life of a process that has a journal: a set whose tree is a few numbers.
type world struct {
	t      tb
	r      *rt.Runtime
	m      *model
	sb     *ondisk.Superblock
	geo    ondisk.Geometry
	check  *ringCheck
	io     *blockdev.IO
	shared *Shared
	rng    *rand.Rand

	mu     rt.Mutex // the set's lock
	j      *Journal
	leaves []*leaf
	idle   rt.Cond // a leaf's write has ended
	// structural is how many entries one WriteOldest may cause, as splits and allocations do.
	structural int
	reclaiming bool // meanwhile nobody else begins a structural change
	splitting  bool // someone else has
	replayed   bool
	hold       bool // WriteOldest does nothing
	// stop makes everyone end.
	stop bool
}

type leaf struct {
	pin, writing Pin
	keys         uint64 // appended
	last         uint64 // number of the last key among all
	busy         bool
}

func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf(format, args...)
}

// newWorld prepares a life on dev, which is below the checks.
func newWorld(t tb, dev blockdev.Device, m *model, seed uint64, shared *Shared) *world {
	w := &world{t: t, r: blockdev.RuntimeOf(dev), m: m, sb: m.l.superblock(), shared: shared, rng: rand.New(rand.NewPCG(seed, 99))}
	w.geo = ondisk.NewGeometry(w.sb)
	w.check = newRingCheck(dev, w.geo, w.sb.D[:w.sb.NJournal], w.fatal)
	w.check.lock = &w.mu
	w.mu.Init(w.r)
	w.idle.Init(&w.mu)
	for range m.l.leaves {
		w.leaves = append(w.leaves, &leaf{})
	}
	var err error
	if w.io, err = blockdev.NewIO(w.check, 16); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) source() Source {
	return Source{IO: w.io, Geometry: w.geo, Buckets: w.sb.D[:w.sb.NJournal]}
}

func (w *world) identity() Identity {
	return Identity{Set: w.sb.SetUUID, Boot: ondisk.UUID{9}, SuperSeq: w.m.super}
}

func (w *world) config() Config {
	id := w.identity()
	id.SuperSeq++
	return Config{Runtime: w.r, Lock: &w.mu, Source: w.source(), Owner: w, Shared: w.shared, Identity: id}
}

func (w *world) leafOffset(i int) int64 {
	return int64(w.geo.BucketStart(leafBucket))*512 + int64(i*w.m.l.block)*512
}

// JournalHeader names the number of the root change.
func (w *world) JournalHeader(h *Header) {
	h.Root = ondisk.NewChild(ondisk.MaxInode, ondisk.MaxOffset, w.geo.NodeSectors, ondisk.MakePtr(1, w.geo.BucketStart(200), 0))
	h.UUIDBucket = ondisk.NewChild(0, 0, w.geo.MetaSectors, ondisk.MakePtr(1, w.geo.BucketStart(201), 0))
	h.Prio = 202 + w.m.roots
}

// format makes the first entry of a set.
func (w *world) format(ctx context.Context) error {
	var err error
	if w.j, err = Open(ctx, w.config(), nil); err != nil {
		return err
	}
	w.m.super++
	if err := w.j.WriteEntry(ctx); err != nil {
		return err
	}
	w.started()
	return nil
}

func (w *world) started() {
	w.mu.Lock()
	w.j.StartedLocked()
	w.check.started, w.replayed = true, true
	w.mu.Unlock()
}

// read reads leaves and journal, and checks them against the model: floor says how many keys of each leaf must be
// there. It leaves the state in w.leaves and in the model.
func (w *world) read(ctx context.Context, floor []uint64) (*Recovery, error) {
	m := w.m
	for i, lf := range w.leaves {
		b := make([]byte, 512*m.l.block)
		if err := w.io.ReadAt(b, w.leafOffset(i)); err != nil {
			return nil, err
		}
		*lf = leaf{keys: binary.LittleEndian.Uint64(b), last: binary.LittleEndian.Uint64(b[8:])}
	}
	rec, err := Read(ctx, w.source())
	if err != nil {
		return nil, err
	}
	if _, err := rec.Shared(w.sharedOrNone(), w.identity()); err != nil {
		return nil, err
	}
	if root := rec.Newest.PrioBucket[0] - 202; root < m.rooted || root > m.roots {
		w.fatal("root %d is the newest entry's; %d was durable, %d begun", root, m.rooted, m.roots)
	} else {
		m.roots, m.rooted = root, root
	}
	keys := make([]uint64, len(w.leaves))
	lastOf := make([]uint64, len(w.leaves))
	for i, lf := range w.leaves {
		keys[i], lastOf[i] = lf.keys, lf.last
	}
	number := uint64(0)
	err = rec.EachKey(ctx, func(seq uint64, k *ondisk.Key) error {
		i, n, g := int(k.Inode()), k.End()/8, k.P[0].Sector()
		if i >= len(keys) || k.Size() != 8 || k.Ptrs() != 1 {
			return fmt.Errorf("entry %d: foreign key %v", seq, k)
		}
		if number != 0 && g != number+1 && !m.jumps[g] {
			return fmt.Errorf("entry %d: key %v is number %d of all, the one before %d", seq, k, g, number)
		}
		number = g
		if n > keys[i]+1 {
			return fmt.Errorf("entry %d: key %d of leaf %d, the one before is %d", seq, n, i, keys[i])
		}
		if n > keys[i] {
			keys[i], lastOf[i] = n, g
		}
		return nil
	})
	if errors.Is(err, blockdev.ErrPowerCut) {
		return nil, err
	}
	if err != nil {
		w.fatal("%v", err)
	}
	m.total = number
	for i, n := range keys {
		if n < floor[i] || n > m.appended[i] {
			w.fatal("leaf %d: %d keys; %d must be there, %d were appended (its own sector has %d, needed are %d-%d)",
				i, n, floor[i], m.appended[i], w.leaves[i].keys, rec.Newest.LastSeq, rec.Newest.Seq)
		}
		m.appended[i], m.acked[i], m.synced[i] = n, n, n // what is there is there
		m.total = max(m.total, lastOf[i])
	}
	if m.total != number {
		m.jumps[m.total+1] = true
	}
	return rec, nil
}

func (w *world) sharedOrNone() *Shared {
	if w.shared == nil {
		return NewShared()
	}
	return w.shared
}

// open starts the journal and replays.
func (w *world) open(ctx context.Context, rec *Recovery) error {
	var err error
	if w.j, err = Open(ctx, w.config(), rec); err != nil {
		return err
	}
	w.m.super++ // now written to the superblock
	return w.replay(ctx, rec)
}

// replay inserts the keys again.
func (w *world) replay(ctx context.Context, rec *Recovery) error {
	at := uint64(0)
	err := rec.EachKey(ctx, func(seq uint64, k *ondisk.Key) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if at != 0 && seq != at {
			w.j.ReplayedLocked(seq - 1)
		}
		at = seq
		lf := w.leaves[k.Inode()]
		if n := k.End() / 8; n > lf.keys {
			lf.keys, lf.last = n, k.P[0].Sector()
			w.j.PinLocked(&lf.pin, seq)
		}
		return nil
	})
	if err == nil {
		w.started()
	}
	return err
}

// WriteOldest writes the leaves that pin entries up to upTo, and sometimes changes the root meanwhile, as splits
// would.
func (w *world) WriteOldest(ctx context.Context, upTo, ahead uint64) error {
	w.mu.Lock()
	structural := w.structural
	w.reclaiming = true
	if w.splitting {
		w.j.RequestEntryLocked(true) // it may be waiting for room
	}
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		w.reclaiming = false
		w.mu.Unlock()
	}()
	for i, lf := range w.leaves {
		w.mu.Lock()
		for lf.busy {
			w.idle.Wait()
		}
		pinned := lf.pin.Held() && lf.pin.Seq() <= upTo && w.replayed && !w.hold
		w.mu.Unlock()
		if !pinned {
			continue
		}
		change := structural > 0 && w.rng.IntN(2) == 0
		if change {
			structural--
		}
		if err := w.writeLeaf(ctx, i, change, true); err != nil {
			return err
		}
	}
	return nil
}

// writeLeaf makes a leaf durable; with split, an entry that changes the root must be too before its pins go (M1).
func (w *world) writeLeaf(ctx context.Context, i int, split, urgent bool) error {
	lf := w.leaves[i]
	w.mu.Lock()
	for lf.busy {
		w.idle.Wait()
	}
	lf.busy = true
	if !urgent { // one at a time, as a tree's maintainer does them
		split = split && !w.reclaiming && !w.splitting
		w.splitting = w.splitting || split
	}
	w.j.MovePinLocked(&lf.writing, &lf.pin)
	b := make([]byte, 512*w.m.l.block)
	binary.LittleEndian.PutUint64(b, lf.keys)
	binary.LittleEndian.PutUint64(b[8:], lf.last)
	w.mu.Unlock()
	err := w.io.WithPurpose(blockdev.ForBtree).WriteAt(b, w.leafOffset(i), blockdev.FUA)
	if err == nil && split {
		err = w.changeRoot(ctx, true, urgent)
	}
	w.mu.Lock()
	if err == nil {
		w.j.UnpinLocked(&lf.writing)
	} else {
		w.j.MovePinLocked(&lf.pin, &lf.writing)
	}
	lf.busy = false
	if split && !urgent {
		w.splitting = false
	}
	w.idle.Broadcast()
	w.mu.Unlock()
	return err
}

func (w *world) changeRoot(ctx context.Context, split, urgent bool) error {
	w.mu.Lock()
	w.m.roots++
	root := w.m.roots
	seq := w.j.RequestEntryLocked(urgent || split && w.reclaiming)
	w.mu.Unlock()
	err := w.j.WaitDurable(ctx, seq)
	w.mu.Lock()
	w.placedLocked()
	w.mu.Unlock()
	if err == nil {
		w.m.rooted = max(w.m.rooted, root)
	}
	return err
}

// append appends n keys to a leaf and up to n to the next one, and acknowledges them.
func (w *world) append(ctx context.Context, i, n int, both bool) error {
	res, err := w.j.Reserve(ctx, 3*n, 1)
	if err != nil {
		return err
	}
	if w.rng.IntN(3) == 0 {
		w.r.Sleep(time.Duration(w.rng.IntN(300)) * time.Microsecond) // finding the leaf
	}
	w.mu.Lock()
	seq := w.appendLocked(&res, i, n)
	w.mu.Unlock()
	if both {
		w.mu.Lock()
		seq = w.appendLocked(&res, (i+1)%len(w.leaves), 1)
		w.mu.Unlock()
	}
	w.j.Release(&res)
	appended := append([]uint64(nil), w.m.appended...)
	if err := w.j.Acknowledge(ctx, seq); err != nil {
		return err
	}
	w.m.acked[i] = max(w.m.acked[i], appended[i])
	return nil
}

func (w *world) appendLocked(res *Reservation, i, n int) uint64 {
	lf := w.leaves[i]
	var keys []ondisk.Key
	for range n {
		w.m.total++
		w.m.appended[i]++
		lf.keys++
		lf.last = w.m.total
		keys = append(keys, ondisk.NewExtent(uint32(i), lf.keys*8, 8, ondisk.MakePtr(1, w.m.total, 0), true))
	}
	seq := w.j.AppendLocked(res, keys)
	w.j.PinLocked(&lf.pin, seq)
	w.placedLocked()
	return seq
}

// placedLocked checks that the open entry, with all that is reserved, can be closed.
func (w *world) placedLocked() {
	j := w.j
	if _, ok := j.ring.put(j.ring.space(j.pos), j.words+j.reserved); !ok && j.words+j.reserved > 0 {
		w.fatal("%d words in the open entry and %d reserved have no place: %+v", j.words, j.reserved, j.ring.space(j.pos))
	}
}

// sync flushes, and notes what is flushed by that.
func (w *world) sync(ctx context.Context) error {
	acked := append([]uint64(nil), w.m.acked...)
	if err := w.j.Sync(ctx); err != nil {
		return err
	}
	for i := range acked {
		w.m.synced[i] = max(w.m.synced[i], acked[i])
	}
	return nil
}

// load has writers do ops operations each, of all kinds; it returns when they have ended, at the latest when the
// journal has failed.
func (w *world) load(ctx context.Context, writers, ops, most int) {
	var g rt.WaitGroup
	g.Init(w.r)
	for n := range writers {
		g.Go(fmt.Sprintf("client %d", n), func() {
			for range ops {
				if w.stop {
					return
				}
				i := w.rng.IntN(len(w.leaves))
				var err error
				switch k := w.rng.IntN(20); {
				case k < 10:
					err = w.append(ctx, i, 1+w.rng.IntN(most), w.rng.IntN(4) == 0)
				case k < 15:
					err = w.sync(ctx)
				case k < 17:
					err = w.writeLeaf(ctx, i, w.rng.IntN(4) == 0, false)
				case k < 18:
					err = w.changeRoot(ctx, false, false)
				default:
					w.r.Sleep(time.Duration(w.rng.IntN(2000)) * time.Microsecond)
				}
				if err != nil {
					if !errors.Is(err, ErrFailed) && !errors.Is(err, blockdev.ErrPowerCut) {
						w.fatal("client %d: %v", n, err)
					}
					return
				}
			}
		})
	}
	g.Wait()
}

// close ends the life; the device stays.
func (w *world) close(ctx context.Context) error {
	var err error
	if w.j != nil {
		err = w.j.Close(ctx)
	}
	return errors.Join(err, w.io.Close())
}

// newDisk makes the device of a set that has its superblock and nothing else.
func newDisk(t tb, l layout, r *rt.Runtime) *blockdev.MemoryDevice {
	t.Helper()
	sb := l.superblock()
	d, err := blockdev.Memory(513*int64(l.bucket)*512, blockdev.MemoryOptions{Runtime: r, Name: "cache", LogicalBlock: max(512, l.logicalBlock)})
	if err != nil {
		t.Fatal(err)
	}
	sb.SetChecksum()
	sb.Encode(d.Bytes()[ondisk.SuperblockOffset:])
	return d
}

// simulate runs fn in a simulation.
func simulate(t tb, seed uint64, fn func(r *rt.Runtime)) {
	t.Helper()
	s := rt.NewSim(seed)
	s.Limit = 2 * time.Hour
	if err := s.Run(func() { fn(s.Runtime()) }); err != nil {
		t.Fatal(err)
	}
}

func must(t tb, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
