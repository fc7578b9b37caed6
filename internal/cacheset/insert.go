package cacheset

import (
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Guard says, with the set's lock held, whether an insertion is still wanted.
type Guard interface{ WantedLocked() bool }

// An Insertion is a change of the index: keys that take the place of whatever is there, and what came of it. It
// belongs to one goroutine; one that is used again and again makes insertions free of allocations.
type Insertion struct {
	Keys []ondisk.Key // leaf keys, whatever their order; Insert uses them up
	// Old, if not nil, has for each key what the index must still say of its range: where it lies, and whether as dirty.
	// What the index says otherwise meanwhile stays, and is no error: see Replaced. Source: F 5.9.
	Old   []ondisk.Key
	Epoch uint64 // of clean keys: see btree.Tree.Insert
	// Unjournalled keys are lost in a crash unless their leaf was written: fills of clean data alone may be so.
	Unjournalled bool
	// Pinned says that each key with a pointer comes with a pin of its bucket, as SpaceLocked gives it. Insert lets
	// go of it, whatever comes of the insertion.
	Pinned bool
	Guard  Guard // asked before keys are stored; nil: always
	// Request says that a request waits for it: see Stall.
	Request bool

	// Seq is the newest journal entry that has a part of the insertion, 0 if none has.
	Seq uint64
	// Exposed says that something was covered whose pointer may be on the disk and good after a crash: until entry
	// Seq is durable, a crash brings it back.
	Exposed bool
	// Stopped says that the guard ended the insertion before its end.
	Stopped bool
	// Replaced is how many sectors of the keys were stored.
	Replaced uint64

	next   int
	room   journal.Reservation
	change btree.Change
	one    [1]ondisk.Key
}

const (
	keyWords    = 3
	insertGroup = 16 // keys stored in one hold of the lock
)

// Insert makes the change. On return it is in the index and in the open journal entry: see Acknowledge. It waits for
// what it needs (room in the journal, a node, room in a leaf), the lock not held. An error means that the set has
// failed or is closed.
func (s *Set) Insert(in *Insertion) error {
	in.begin()
	return s.InsertRest(in)
}

// TryInsertLocked begins an insertion, and reports whether it is made: whether nothing had to be waited for. If not,
// InsertRest makes the rest.
func (s *Set) TryInsertLocked(in *Insertion) bool {
	in.begin()
	if s.keptOutLocked() {
		return false
	}
	_, err := s.insertSomeLocked(in)
	return err == nil && in.done()
}

func (in *Insertion) begin() {
	in.next, in.Seq, in.Exposed, in.Stopped, in.Replaced = 0, 0, false, false, 0
}

// InsertRest is Insert for an insertion that TryInsertLocked has begun.
func (s *Set) InsertRest(in *Insertion) error {
	if in.next > 0 && in.done() {
		return nil
	}
	for {
		s.lockFor(in.Request)
		s.passLocked(in.Request)
		o, err := s.insertSomeLocked(in)
		if err == nil && in.done() {
			s.mu.Unlock()
			return nil
		}
		if err != nil {
			s.dropLocked(in)
		}
		s.mu.Unlock()
		if err != nil {
			return err
		}
		if err := s.provide(in, o); err != nil {
			s.mu.Lock()
			s.dropLocked(in)
			s.mu.Unlock()
			return err
		}
	}
}

func (in *Insertion) done() bool { return in.next == len(in.Keys) }

// insertSomeLocked stores keys until the hold of the lock has been long enough, or something is missing, which it
// returns.
func (s *Set) insertSomeLocked(in *Insertion) (btree.Outcome, error) {
	if err := s.errLocked(); err != nil {
		return btree.Done, err
	}
	if in.Guard != nil && !in.Guard.WantedLocked() {
		in.Stopped = true
		s.dropLocked(in)
		return btree.Done, nil
	}
	n := min(len(in.Keys)-in.next, insertGroup)
	if !in.Unjournalled && in.room.Words() == 0 {
		var ok bool
		if in.room, ok = s.journal.TryReserveLocked(keyWords*n, n); !ok {
			return btree.Busy, nil
		}
	}
	o := btree.Done
	for range 2 * n {
		if in.done() || !in.Unjournalled && in.room.Words() < keyWords {
			break
		}
		if o = s.insertOneLocked(in); o != btree.Done {
			break
		}
	}
	s.journal.ReleaseLocked(&in.room)
	s.noticeLocked()
	return o, nil
}

// insertOneLocked stores the next key as far as its leaf goes.
func (s *Set) insertOneLocked(in *Insertion) btree.Outcome {
	k := &in.Keys[in.next]
	epoch := in.Epoch
	if k.Ptrs() == 0 || k.Dirty() {
		epoch = 0
	}
	c := &in.change
	var o btree.Outcome
	if in.Old == nil {
		o = s.tree.Insert(k, epoch, c)
	} else if o = s.tree.Replace(&in.Old[in.next], k, epoch, c); o == btree.NoMatch {
		return s.skipLocked(in)
	}
	if o != btree.Done {
		return o
	}
	x := &c.Stored
	in.Replaced += uint64(x.Size)
	seq := s.journal.OpenLocked()
	if !in.Unjournalled {
		in.one[0] = x.Key()
		if x.Held() {
			in.one[0] = ondisk.NewInvalidation(x.Inode, x.End(), uint32(x.Size))
		}
		seq = s.journal.AppendLocked(&in.room, in.one[:])
		in.Seq = seq
		if x.Dirty() && int(x.Inode) < len(s.dirty) {
			s.dirty[x.Inode].entry = seq
		}
		s.pinLocked(c.Leaf, seq)
	}
	if s.accountLocked(c, seq, !in.Unjournalled) {
		in.Exposed = true
	}
	s.grownLocked(c.Leaf)
	if c.More {
		*k = c.Rest
		return btree.Done
	}
	if in.Old != nil && x.End() < k.End() {
		k.CutFront(x.End()) // what comes next says something else, but perhaps not to the end
		return btree.Done
	}
	s.nextLocked(in)
	return btree.Done
}

// skipLocked passes over the beginning of a key that is not to be stored, since the index does not say any more what it
// takes the place of.
func (s *Set) skipLocked(in *Insertion) btree.Outcome {
	k := &in.Keys[in.next]
	p, miss := s.tree.Lookup(k.Inode(), k.Start(), k.End())
	switch {
	case !miss.IsZero():
		in.change.Miss = miss
		return btree.NeedsNode
	case p.End < k.End():
		k.CutFront(p.End)
	default:
		s.nextLocked(in)
	}
	return btree.Done
}

// nextLocked goes on to the next key.
func (s *Set) nextLocked(in *Insertion) {
	if k := &in.Keys[in.next]; in.Pinned && k.Ptrs() > 0 {
		s.table.Unpin(s.bucketOf(k.P[0]))
	}
	in.next++
}

// pinLocked says that a leaf needs a journal entry.
func (s *Set) pinLocked(leaf *btree.Node, seq uint64) {
	s.tree.Pin(leaf, seq)
	if !s.pin.Held() || seq < s.pin.Seq() {
		s.journal.PinLocked(&s.pin, seq)
	}
}

// accountLocked counts what a change adds and takes away, see bucket.Table.Apply; every change of the index comes by here. It
// reports whether something was covered that a crash would bring back.
func (s *Set) accountLocked(c *btree.Change, open uint64, journalled bool) (exposed bool) {
	if s.verify.walk != nil {
		s.verify.walk.followLocked(c)
	}
	went := 0
	for i := range c.Removed {
		x := &c.Removed[i]
		if !x.HasPtr() {
			continue
		}
		s.deltas.Drop(s.table, x.Ptr, uint32(x.Size), x.Dirty())
		good := s.GoodLocked(x.Ptr)
		if good {
			went++
		}
		if good && x.Dirty() {
			s.countDirtyLocked(x.Inode, x.Start, uint64(x.Size), -1)
		}
		if (good || s.table.Evicting(x.Ptr)) && !s.tree.Blocked(x) {
			exposed = true
		}
	}
	if x := &c.Stored; x.HasPtr() {
		went--
		s.deltas.Put(s.table, x.Ptr, uint32(x.Size), x.Dirty())
		if x.Dirty() && s.GoodLocked(x.Ptr) {
			s.countDirtyLocked(x.Inode, x.Start, uint64(x.Size), 1)
		}
	}
	s.emptied += max(went, 0)
	s.table.Apply(&s.deltas, open, journalled)
	return exposed
}

// provide gets what an insertion lacks. No lock is held.
func (s *Set) provide(in *Insertion, o btree.Outcome) (err error) {
	var cause Stall
	begin := s.rt.Now()
	switch o {
	case btree.NeedsNode:
		cause = StallNode
		err = s.ReadNode(in.change.Miss)
	case btree.NeedsRoom:
		cause = StallSplit
		err = s.makeRoom(in.change.Leaf)
	case btree.Busy:
		cause = StallJournalSpace
		n := min(len(in.Keys)-in.next, insertGroup)
		in.room, err = s.journal.Reserve(forever, keyWords*n, n)
	default:
		return nil // the hold of the lock was long enough
	}
	if in.Request {
		s.stalls.add(cause, s.rt.Now()-begin)
	}
	return err
}

// dropLocked gives up what is left of an insertion.
func (s *Set) dropLocked(in *Insertion) {
	s.journal.ReleaseLocked(&in.room)
	s.DropLocked(in.Keys[in.next:], in.Pinned)
	in.next = len(in.Keys)
}

// DropLocked lets go of the pins of keys that are not inserted after all.
func (s *Set) DropLocked(keys []ondisk.Key, pinned bool) {
	for i := range keys {
		if k := &keys[i]; pinned && k.Ptrs() > 0 {
			s.table.Unpin(s.bucketOf(k.P[0]))
		}
	}
}

// makeRoom waits until a leaf that holds as much as it may was rewritten.
func (s *Set) makeRoom(leaf *btree.Node) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.RoomWaits++
	for {
		if err := s.errLocked(); err != nil {
			return err
		}
		if leaf.Gone() || !s.tree.Crowded(leaf) {
			return nil
		}
		s.queueLocked(leaf, true)
		s.changed.Wait()
	}
}
