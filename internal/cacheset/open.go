package cacheset

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Open starts the set on a cache device, whoever ran it before and however that ended, and initialises one that was
// only formatted. When it returns, all that was flushed, and with the mapping of a process that died all that was
// acknowledged, is in the index. The device stays the caller's: close it after the set.
//
// Order (B 9.9): superblock, journal, mapping, generations, slots; one walk of the tree, which counts; the needed
// journal entries pin their buckets; the superblock's seq is raised, which ends the mapping's validity; the entries are
// inserted again, and a first batch of buckets is made durable; then the set serves.
func Open(ctx context.Context, dev blockdev.Device, o Options) (_ *Set, err error) {
	s := newSet(dev, o)
	defer func() {
		if err != nil {
			s.abandon()
		}
	}()
	if s.io, err = blockdev.NewIO(dev, ioDepth); err != nil {
		return nil, err
	}
	s.io = s.io.WithPurpose(blockdev.ForBtree)
	if s.jio, err = blockdev.NewIO(dev, 2); err != nil {
		return nil, err
	}
	syncs := blockdev.NewSyncs(dev)
	s.io.Join(syncs)
	s.jio.Join(syncs)
	sb, err := ReadSuperblock(s.io)
	if err != nil {
		return nil, err
	}
	if !sb.IsCache() {
		return nil, fmt.Errorf("%s: version %d is that of a backing device; a cache device is wanted here", s.info.Name, sb.Version)
	}
	s.super = *sb
	s.geo = ondisk.NewGeometry(sb)
	for i := range s.open {
		s.open[i].list = make([]openBucket, openBuckets(s.geo.NBuckets))
	}
	s.open[bucket.ForMoving].list = s.open[bucket.ForMoving].list[:1]
	s.dirty = make([]dirtyMap, s.geo.NrUUIDs)
	if s.opt.Buckets.Policy == 0 {
		s.opt.Buckets.Policy = sb.Replacement()
	}
	if sb.Sync() {
		err = s.recover(ctx)
	} else {
		err = s.create(ctx)
	}
	if err == nil {
		err = s.openDiscards()
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func newSet(dev blockdev.Device, o Options) *Set {
	if o.NodeCache == 0 {
		o.NodeCache = defaultNodeCache
	}
	if o.JournalDelay == 0 {
		o.JournalDelay = journal.DefaultDelay
	}
	if o.VerifyEvery == 0 {
		o.VerifyEvery = verifyEvery
	}
	if o.verifyWindow == 0 {
		o.verifyWindow = verifyMemory / bucket.RecountBytes
	}
	if o.markKeys == 0 {
		o.markKeys = markSlice
	}
	if o.verifyKeys == 0 {
		o.verifyKeys = verifyKeys
		if o.Restless {
			o.verifyKeys = verifyKeys / 32 // much is to happen in the middle of a walk
		}
	}
	o.Buckets.Broken |= o.Broken.buckets()
	s := &Set{
		rt: blockdev.RuntimeOf(dev), log: o.Logger, dev: dev, info: dev.Info(), opt: o,
		pool: blockdev.NewPool(blockdev.PoolOptions{}), loading: map[uint32]bool{}, torn: map[ondisk.Ptr]bool{},
		noMove: o.noMove, claimed: map[ondisk.UUID]bool{}, backed: map[uint32]uint64{},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.idleMax.Store(true)
	s.attaching.Init(s.rt)
	s.mu.Init(s.rt)
	s.work.Init(&s.mu)
	s.chore.Init(&s.mu)
	s.lagging.Init(&s.mu)
	s.lane.Init(s.rt, 1)
	s.changed.Init(&s.mu)
	s.refill.Init(&s.mu)
	s.ready.Init(&s.mu)
	s.dead.Init(&s.mu)
	s.slotFreed.Init(&s.mu)
	s.discards.Init(&s.mu)
	s.move.Init(&s.mu)
	s.verify.wake.Init(&s.mu)
	s.gcChange.Init(s.rt)
	s.gc.name = Exact
	s.gc.wake.Init(&s.mu)
	s.gc.over.Init(&s.mu)
	s.gc.free.Init(&s.mu)
	s.running.Init(s.rt)
	s.stop, s.cancel = context.WithCancel(context.Background())
	return s
}

// abandon ends a set that could not be opened, or has failed.
func (s *Set) abandon() {
	s.cancel()
	s.mu.Lock()
	s.closed = true
	s.wakeAllLocked()
	s.mu.Unlock()
	if s.journal != nil {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = s.journal.Close(ctx)
	}
	s.running.Wait()
	if s.jio != nil {
		_ = s.jio.Close()
	}
	if s.io != nil {
		_ = s.io.Close()
	}
	if s.dio != nil {
		_ = s.dio.Close()
	}
	s.pool.Trim(0)
}

func (s *Set) source() journal.Source {
	return journal.Source{IO: s.jio, Geometry: s.geo, Buckets: s.super.D[:s.super.NJournal], Discard: s.super.Discard()}
}

// openJournal starts the journal and raises the superblock's seq, in this order.
func (s *Set) openJournal(ctx context.Context, rec *journal.Recovery) error {
	super := s.super
	super.Seq++
	super.LastMount = uint32(s.rt.WallTime().Unix())
	j, err := journal.Open(ctx, journal.Config{
		Runtime: s.rt, Lock: &s.mu, Source: s.source(), Dev: int(super.NrThisDev), Owner: s, Shared: s.opt.Shared,
		Identity: journal.Identity{Set: super.SetUUID, Boot: s.opt.Boot, SuperSeq: super.Seq}, Delay: s.opt.JournalDelay,
	}, rec)
	if err != nil {
		return err
	}
	s.journal = j
	if rec != nil {
		if err := WriteSuperblock(s.io, &super, s.io.Flush); err != nil {
			return err
		}
	}
	s.super = super
	return nil
}

// startWriters starts the goroutines.
func (s *Set) startWriters() {
	for range writers {
		s.running.Go("node writer", s.write)
	}
	for range tidiers {
		s.running.Go("index tidier", s.tidy)
	}
	s.running.Go("bucket refiller", s.refillLoop)
	s.running.Go("set ticker", s.tickLoop)
	s.running.Go("generation sweeper", s.sweepLoop)
	s.running.Go("dead inodes", s.dropDead)
	s.running.Go("mover", s.moveLoop)
	s.running.Go("verifier", s.verifyLoop)
	s.running.Go("collector", s.collectLoop)
}

// recover opens a set that has contents.
func (s *Set) recover(ctx context.Context) error {
	rec, err := journal.Read(ctx, s.source())
	if err != nil {
		return fmt.Errorf("%s: journal: %w", s.info.Name, err)
	}
	if s.opt.Shared != nil {
		n, err := rec.Shared(s.opt.Shared, journal.Identity{Set: s.super.SetUUID, Boot: s.opt.Boot, SuperSeq: s.super.Seq})
		if err != nil {
			return fmt.Errorf("%s: the mapped journal entries of the last process: %w", s.info.Name, err)
		}
		s.stats.MappedEntries = uint64(n)
	}
	l, err := bucket.NewLoader(s.rt, &s.geo, s.opt.Buckets)
	if err != nil {
		return fmt.Errorf("%s: %w", s.info.Name, err)
	}
	for _, b := range s.super.D[:s.super.NJournal] {
		l.Fixed(uint32(b))
	}
	if err := s.readPrios(l, rec); err != nil {
		return err
	}
	if err := s.readSlots(l, rec); err != nil {
		return err
	}
	if err := s.scan(ctx, l, rec); err != nil {
		return err
	}
	err = rec.EachKey(ctx, func(seq uint64, k *ondisk.Key) error {
		if f := s.geo.LeafFault(k); f != ondisk.FaultNone && f != ondisk.FaultEmpty {
			return fmt.Errorf("%s: journal entry %d: key %v: %v: %w", s.info.Name, seq, k, f, ondisk.ErrCorrupt)
		}
		if k.Size() > 0 {
			for i := range k.Ptrs() {
				l.Journal(k.P[i])
			}
		}
		s.stats.ReplayedKeys++
		return nil
	})
	if err != nil {
		return err
	}
	table, report := l.Finish(rec.Newest.Seq, rec.Newest.LastSeq)
	s.table = table
	s.log.Debug("the index was read", "set", s.UUID().String(), "nodes", report.Nodes, "extents", report.Extents, "stale", report.Stale, "raised", report.Raised)
	if report.Conflicts > 0 {
		return fmt.Errorf("%s: %d buckets hold nodes and data at the same time: %w", s.info.Name, report.Conflicts, ondisk.ErrCorrupt)
	}
	if report.DirtyDropped {
		if err := s.recountDirty(); err != nil {
			return err
		}
	}
	if err := s.table.AllocatePrioSets(); err != nil {
		return fmt.Errorf("%s: %w", s.info.Name, err)
	}
	s.table.ReadyUnused(startBuckets)
	if err := s.openJournal(ctx, rec); err != nil {
		return fmt.Errorf("%s: %w", s.info.Name, err)
	}
	s.noted = rec.Newest.Seq
	if rec.Newest.Version == 0 {
		// The first entry of the new version must name an array of the new form.
		if err := s.convertSlots(); err != nil {
			return err
		}
	}
	// The refiller makes the first buckets ready beside the replay.
	s.start.under = true
	s.startWriters()
	if err := s.replay(ctx, rec); err != nil {
		return fmt.Errorf("%s: replay: %w", s.info.Name, err)
	}
	s.mu.Lock()
	s.journal.StartedLocked()
	s.startedLocked()
	s.started = s.journal.NewestLocked()
	s.start.under = false
	s.repinLocked()
	s.mu.Unlock()
	return nil
}

// readPrios reads the chain of prio sets.
func (s *Set) readPrios(l *bucket.Loader, rec *journal.Recovery) error {
	at := rec.Newest.PrioBucket[s.super.NrThisDev]
	s.prio = at
	buf := s.pool.Get(s.geo.MetaBytes())
	defer buf.Release()
	seen := map[uint64]bool{}
	for i := range int(s.geo.NPrio) {
		if !s.geo.ValidBucket(at) || seen[at] {
			return s.errCorrupt("prio_set", 0, "set %d of %d would be in bucket %d", i, s.geo.NPrio, at)
		}
		seen[at] = true
		sector := s.geo.BucketStart(at)
		if err := s.io.WithPurpose(blockdev.ForPrio).ReadAt(buf.Data, int64(sector)*ondisk.SectorSize); err != nil {
			return err
		}
		p, err := ondisk.DecodePrioSet(buf.Data, &s.geo)
		if err != nil {
			return ondisk.At(err, s.info.Name, int64(sector))
		}
		l.PrioSet(i, uint32(at), &p)
		s.prioNo = max(s.prioNo, p.Seq)
		at = p.NextBucket
	}
	for b := range seen {
		l.Meta(uint32(b))
	}
	return nil
}

// readSlots reads the uuid array.
func (s *Set) readSlots(l *bucket.Loader, rec *journal.Recovery) error {
	k := rec.Newest.UUIDBucket
	if f := s.geo.NodeFault(&k); f != ondisk.FaultNone || !k.P[0].Available() || s.geo.Remainder(k.P[0].Sector()) != 0 || k.Size() != s.geo.MetaSectors {
		return s.errCorrupt("uuid", 0, "uuid_bucket of journal entry %d is %v", rec.Newest.Seq, k)
	}
	buf := s.pool.Get(s.geo.MetaBytes())
	defer buf.Release()
	if err := s.io.WithPurpose(blockdev.ForUUID).ReadAt(buf.Data, int64(k.P[0].Sector())*ondisk.SectorSize); err != nil {
		return err
	}
	s.slots = make([]ondisk.UUIDEntry, s.geo.NrUUIDs)
	for i := range s.slots {
		e, err := ondisk.DecodeUUIDEntry(buf.Data, i, rec.Newest.Version == 0)
		if err != nil {
			return err
		}
		s.slots[i] = e
	}
	s.uuids = k
	l.Meta(uint32(s.geo.Bucket(k.P[0].Sector())))
	return nil
}

// convertSlots writes an array of the old form in the new one, for the next entry to name.
func (s *Set) convertSlots() error {
	s.mu.Lock()
	b, gen, ok := s.table.TakeUnused()
	s.mu.Unlock()
	if !ok {
		return ErrNoSpace
	}
	p := ondisk.MakePtr(gen, s.geo.BucketStart(uint64(b)), s.super.NrThisDev)
	if err := s.putSlots(s.slots, p); err != nil {
		return err
	}
	s.mu.Lock()
	old := s.uuids
	s.uuids = ondisk.NewChild(0, 0, s.geo.MetaSectors, p)
	s.table.FreeAfter(s.bucketOf(old.P[0]), s.journal.OpenLocked())
	s.mu.Unlock()
	return nil
}

// replay inserts the keys of the needed journal entries again: in order, all of them, stale or not, since a stale one
// still hides what is older (J2).
func (s *Set) replay(ctx context.Context, rec *journal.Recovery) error {
	last := uint64(0)
	err := rec.EachKey(ctx, func(seq uint64, k *ondisk.Key) error {
		if seq != last && last != 0 {
			s.mu.Lock()
			s.journal.ReplayedLocked(last)
			s.mu.Unlock()
		}
		last = seq
		return s.replayKey(seq, k)
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	if last != 0 {
		s.journal.ReplayedLocked(last)
	}
	s.mu.Unlock()
	return s.mend()
}

// replayKey inserts a key of entry seq.
func (s *Set) replayKey(seq uint64, k *ondisk.Key) error {
	if k.Size() == 0 {
		return nil
	}
	if s.opt.Broken&SkipJ2 != 0 && s.skipStale(k) {
		return nil
	}
	key := *k
	switch {
	case k.Ptrs() == 0 || !k.P[0].Available():
		key = ondisk.NewInvalidation(k.Inode(), k.End(), k.Size())
	case k.Ptrs() > 1:
		key = ondisk.NewExtent(k.Inode(), k.End(), k.Size(), k.P[0], k.Dirty())
	}
	var c btree.Change
	for {
		s.mu.Lock()
		if err := s.errLocked(); err != nil {
			s.mu.Unlock()
			return err
		}
		o := s.tree.Insert(&key, 0, &c)
		if o == btree.Done {
			s.start.keys++
			s.pinLocked(c.Leaf, seq)
			s.accountLocked(&c, s.journal.OpenLocked(), true)
			s.grownLocked(c.Leaf)
			if !c.More {
				for i := range k.Ptrs() {
					if b, ok := s.table.Bucket(k.P[i]); ok {
						s.table.Unpin(b)
					}
				}
				s.mu.Unlock()
				return nil
			}
			key = c.Rest
		}
		s.mu.Unlock()
		var err error
		switch o {
		case btree.NeedsNode:
			err = s.ReadNode(c.Miss)
		case btree.NeedsRoom:
			err = s.makeRoom(c.Leaf)
		}
		if err != nil {
			return err
		}
	}
}

// mend rewrites the nodes whose last append was torn: a kernel would refuse them.
func (s *Set) mend() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.torn) > 0 {
		if err := s.errLocked(); err != nil {
			return err
		}
		if miss := s.queueTornLocked(); !miss.IsZero() {
			s.mu.Unlock()
			err := s.ReadNode(miss)
			s.mu.Lock()
			if err != nil {
				return err
			}
			continue
		}
		if len(s.torn) > 0 {
			s.changed.Wait()
		}
	}
	return nil
}

// A progress says how far a start has come.
type progress struct {
	under bool   // it is under way
	keys  uint64 // replayed, and parts of keys
	steps uint64 // when it was looked at last
	since time.Duration
}

// stuckLocked returns an error if a start is under way in which nothing has happened for startLimit. There is no wait of a
// start that has no end by itself: this is for what is not as we think, so that it shows.
func (s *Set) stuckLocked() error {
	p := &s.start
	if !p.under {
		return nil
	}
	entry, _ := s.journal.DurableLocked()
	steps := p.keys + entry + s.stats.NodeReads + s.stats.NodeAppends + s.stats.NodeRewrites + s.table.Stats().Batches
	now := s.rt.Now()
	if steps != p.steps || p.since == 0 {
		p.steps, p.since = steps, now
	}
	if now-p.since < startLimit {
		return nil
	}
	c := s.table.Counts()
	return fmt.Errorf("%s: %w: for %v no key was replayed, and no node, journal entry or bucket written; %d nodes wait to be written, %d for a bucket; buckets: %+v",
		s.info.Name, ErrStuck, startLimit, len(s.jobs)+len(s.crowded)+s.busy, s.needMeta, c)
}

// queueTornLocked hands the leaves that are to be mended to the writers. It returns the node that it needs for that.
func (s *Set) queueTornLocked() (miss btree.Ref) {
	for p := (btree.Pos{}); ; {
		n, miss := s.tree.NodeAt(0, p)
		if n == nil {
			return miss
		}
		if s.torn[n.Ref().Ptr] {
			s.queueLocked(n, true)
		}
		p = n.Ref().High
	}
}

// create initialises a set that was only formatted.
//
// Order (F 18): the journal's buckets are cleared; root, uuid array and prio sets are written; an entry names them;
// then the superblock says that there are contents. A crash before that leaves a set that was only formatted.
func (s *Set) create(ctx context.Context) error {
	super := s.super
	n := ondisk.JournalBuckets(s.geo.NBuckets)
	super.NJournal = uint16(n)
	for i := range n {
		super.D[i] = s.geo.FirstBucket + uint64(i)
	}
	super.Flags |= ondisk.FlagSync
	if super.Version == ondisk.VersionCache0 {
		super.Version = ondisk.VersionCache
	}
	s.super = super
	l, err := bucket.NewLoader(s.rt, &s.geo, s.opt.Buckets)
	if err != nil {
		return fmt.Errorf("%s: %w", s.info.Name, err)
	}
	for _, b := range super.D[:n] {
		l.Fixed(uint32(b))
	}
	s.table, _ = l.Finish(0, 0)
	if err := s.table.AllocatePrioSets(); err != nil {
		return fmt.Errorf("%s: %w", s.info.Name, err)
	}
	var places [2]ondisk.Ptr
	for i := range places {
		b, gen, ok := s.table.TakeUnused()
		if !ok {
			return fmt.Errorf("%s: %w", s.info.Name, ErrNoSpace)
		}
		places[i] = ondisk.MakePtr(gen, s.geo.BucketStart(uint64(b)), super.NrThisDev)
	}
	if err := journal.Erase(ctx, s.source()); err != nil {
		return err
	}
	s.slots = make([]ondisk.UUIDEntry, s.geo.NrUUIDs)
	if err := s.putSlots(s.slots, places[0]); err != nil {
		return err
	}
	s.uuids = ondisk.NewChild(0, 0, s.geo.MetaSectors, places[0])
	root := btree.Ref{Sectors: s.geo.NodeSectors, Ptr: places[1], High: btree.MaxPos}
	buf := s.pool.Get(s.geo.BlockBytes())
	defer buf.Release()
	clear(buf.Data)
	ondisk.EncodeBSet(buf.Data, s.geo.BSetMagic(), s.rt.Uint64()|1<<63|1<<50, root.Ptr, nil)
	if err := s.io.WriteAt(buf.Data, int64(root.Ptr.Sector())*ondisk.SectorSize, 0); err != nil {
		return err
	}
	s.tree = btree.New(&s.geo, root, s.gen)
	if err := s.openJournal(ctx, nil); err != nil {
		return fmt.Errorf("%s: %w", s.info.Name, err)
	}
	if err := s.batch(); err != nil { // its entry is the first
		return fmt.Errorf("%s: first buckets: %w", s.info.Name, err)
	}
	if err := WriteSuperblock(s.io, &s.super, s.io.Flush); err != nil {
		return err
	}
	s.startWriters()
	s.mu.Lock()
	s.journal.StartedLocked()
	s.startedLocked()
	s.mu.Unlock()
	return nil
}

// startedLocked lets what runs in the background begin that must not meet the replay.
func (s *Set) startedLocked() {
	s.serving = true
	s.lagging.Signal()
	s.dead.Signal()
	s.discards.Signal()
	s.move.Signal()
}

// Close stops the set: what is in memory is brought to the disk, so that the next start has nothing to replay. ctx
// bounds that: when it ends, only the open journal entry is written still, for ten seconds at most, and the next start
// replays. An error says what could not be written; nothing acknowledged is lost even so, if there is a mapping.
//
// Nobody may be using the set any more.
func (s *Set) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.closed = true
	s.table.DropMarks() // no collection comes that would say what may be picked
	s.refill.Signal()
	s.gc.wake.Broadcast()
	err := s.writeAllLocked(ctx)
	s.mu.Unlock()
	if err == nil {
		err = s.journal.Sync(ctx)
	}
	if err == nil && ctx.Err() == nil {
		// Generations and priorities as they are; the entry that names them needs no older one.
		s.running.Add(1)
		err = s.within(ctx, func() error {
			defer s.running.Done()
			return s.batch()
		})
	}
	if err == nil {
		err = s.journal.WriteEntry(ctx) // where a batch was under way
	}
	s.cancel() // a batch of buckets under way is given up, a sweep too
	last, cancel := s.rt.WithTimeout(context.Background(), 2*closeLimit)
	defer cancel()
	var jerr error
	ended := s.within(last, func() error {
		entry, cancel := s.rt.WithTimeout(context.Background(), closeLimit)
		jerr = s.journal.Close(entry) // the open entry always has a place
		cancel()
		s.mu.Lock()
		s.wakeAllLocked()
		s.mu.Unlock()
		s.running.Wait()
		return nil
	})
	if ended != nil {
		return fmt.Errorf("%s: %w", s.info.Name, ErrHangs)
	}
	jerr = errors.Join(jerr, s.jio.Close(), s.io.Close())
	if s.dio != nil {
		jerr = errors.Join(jerr, s.dio.Close())
	}
	s.pool.Trim(0)
	if f := s.failed.Load(); f != nil {
		return f
	}
	if err != nil && ctx.Err() != nil {
		err = nil // out of time, and the journal has it
	}
	return errors.Join(err, jerr)
}

// within runs fn, and leaves it alone when ctx ends.
func (s *Set) within(ctx context.Context, fn func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	e := s.begin(fn)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.awaitLocked(ctx, e)
}

// Bound runs fn, which ends the use of a device, and returns what it says; if the device has not answered when ctx ends,
// and some seconds later, ErrHangs. Then fn goes on by itself.
func (s *Set) Bound(ctx context.Context, fn func() error) error {
	e := s.begin(fn)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.awaitLocked(ctx, e); e.over {
		return e.err
	}
	grace, cancel := s.rt.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	if s.awaitLocked(grace, e); e.over {
		return e.err
	}
	return ErrHangs
}

// An ending is something that runs in the background. It is guarded by the set's lock.
type ending struct {
	over bool
	err  error
}

func (s *Set) begin(fn func() error) *ending {
	e := new(ending)
	s.rt.Go("end of the set", func() {
		err := fn()
		s.mu.Lock()
		e.over, e.err = true, err
		s.changed.Broadcast()
		s.mu.Unlock()
	})
	return e
}

// awaitLocked waits until it is over, or ctx ends, whose error it returns then.
func (s *Set) awaitLocked(ctx context.Context, e *ending) error {
	for !e.over {
		if err := s.changed.WaitContext(ctx); err != nil {
			return err
		}
	}
	return e.err
}

// writeAllLocked has all nodes written that can be.
func (s *Set) writeAllLocked(ctx context.Context) error {
	for _, a := range s.aging {
		if !a.node.Gone() && a.node.Dirty() {
			s.queueLocked(a.node, false) // extents that were held, too
		}
	}
	for {
		if err := s.Err(); err != nil {
			return err
		}
		some := s.busy > 0 || len(s.jobs)+len(s.crowded) > 0
		for _, a := range s.aging {
			if !a.node.Gone() && a.node.OpenBytes() > 0 {
				s.queueLocked(a.node, false)
				some = true
			}
		}
		if !some {
			return nil
		}
		if err := s.changed.WaitContext(ctx); err != nil {
			return err
		}
	}
}
