package bucket

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Use is what a bucket is wanted for.
type Use uint8

// The uses.
const (
	ForDirty  Use = iota // data, some of which may be dirty
	ForClean             // data that is on the backing device too: no dirty key may point into the bucket
	ForMoving            // data that is moved together, to free the buckets it comes from
	ForMeta              // a btree node or the uuid array
)

// Pools. Every allocation takes from the common one first, then from its own reserve, which is therefore full
// as long as the common one is not empty.
const (
	poolCommon = iota
	poolMeta
	poolMoving
)

// A ring is a queue of ready buckets, of fixed capacity.
type ring struct {
	buf  []uint32
	head int
	n    int
}

func newRing(n int) ring { return ring{buf: make([]uint32, n)} }

func (r *ring) room() int { return len(r.buf) - r.n }

func (r *ring) push(b uint32) {
	if r.n == len(r.buf) {
		panic("bucket: pool overflows")
	}
	r.buf[(r.head+r.n)%len(r.buf)] = b
	r.n++
}

func (r *ring) pop() (uint32, bool) {
	if r.n == 0 {
		return 0, false
	}
	b := r.buf[r.head]
	r.head = (r.head + 1) % len(r.buf)
	r.n--
	return b, true
}

// remove takes a bucket out of the middle; the first comes in its place.
func (r *ring) remove(b uint32) {
	for i := range r.n {
		if at := (r.head + i) % len(r.buf); r.buf[at] == b {
			r.buf[at] = r.buf[r.head]
			r.pop()
			return
		}
	}
}

// The head-room (format 9.6). The kernel that activates this set after us, or after our crash, needs
//
//   - spare unused buckets before it can write generations and replay: nprio for its own prio sets, and
//     KernelReserve for nodes that split meanwhile;
//   - KernelFreeInc buckets besides that it may invalidate before it has collected garbage.
//
// When it starts, it takes for live whatever a pointer with the current generation refers to, in a leaf on disk or
// in any needed journal entry, overwritten later or not, and for dirty whatever such a key says is dirty. So
// what is empty or clean here need not be so there, and the limits must hold for what is there, at each
// hand-out to data, for a crash comes when it likes:
//
//   - What was emptied or cleaned within the journal window counts as nothing.
//   - What is empty, but had keys that left without a journal entry, or with their generation, has residue: it
//     counts as clean.
//   - What a batch picked counts as before until the batch is durable. Then its pointers are stale for everybody
//     and it is unused.
//   - A bucket that somebody holds counts as nothing, though one just handed out is unused on disk.
//   - Our second prio set is metadata here and unused there, which is nprio buckets more than promised.
//
// Counting so little would refuse dirty data where nearly all clean buckets were cleaned within the window. So
// the common pool has room for the whole head-room, and Wanted asks for more where these counts are low: buckets
// in a pool count in full.
//
// The format forbids dirty data to go below the first limit. Here clean data may not either: a cache full of
// clean data with nothing unused would hang the kernel just the same, before it could evict anything. Metadata
// may, that is what the reserve is for; data waits, or goes round the cache, until buckets have come back.
//
// Dirty data leaves MovingReserve buckets above these limits, which moving may take: a cache full of dirty data that is
// spread thinly can make whole buckets of it only if there are some to move it to. What is moved frees more buckets than
// it takes, but not before a journal entry is durable, so the limits hold for moving too.
//
// Metadata takes what it needs from there, too, and the index grows after all is full: overwriting and moving make more
// extents, and leaves that were filled alike are split at about the same time. If that took the last bucket that moving
// could have, nothing could free another. So dirty data leaves half as many buckets besides as metadata has; what the
// index took of them is made up for by what moving frees, before dirty data gets any.
//
// KernelReserve is enough to replay a journal of Geometry.ReplayBytes, and the journal sees to it that no more of it is needed,
// as a rule. Where nodes cannot be written for a while more is, and the head-room grows with it: else the kernel would wait
// for ever in the middle of its replay. See SetReplay.
func (t *Table) spare() int { return int(t.geo.NPrio+t.geo.KernelReserve) + t.replay }

// SetReplay says how many bytes of the journal a start would have to replay.
func (t *Table) SetReplay(bytes int64) {
	enough, most := t.geo.ReplayBytes(), mostReplay*int64(t.geo.KernelReserve)
	t.replay = int(min(max(bytes-enough, 0)*int64(t.geo.KernelReserve)/enough, most))
}

// mostReplay times KernelReserve is what the head-room grows by at most: the journals that are made have no more than one
// bucket for each of those.
const mostReplay = 3

// nodeSlack is how many buckets dirty data leaves for an index that grows.
func (t *Table) nodeSlack() int { return min(t.counts[Meta]/2, mostSlack(len(t.entries))) }

func mostSlack(buckets int) int { return buckets >> 6 }

func (t *Table) roomFor(u Use) bool {
	if t.broken&breakHeadroom != 0 {
		return true
	}
	switch u {
	case ForMeta:
		return true
	case ForClean:
		return t.unused() > t.spare()
	}
	left := 0
	if u == ForDirty {
		left = t.opt.MovingReserve + t.nodeSlack()
	}
	return t.unused() > t.spare()+left && t.reusable() > t.spare()+int(t.geo.KernelFreeInc)+left
}

// Allocate hands out a ready bucket, and the generation that pointers into it must have. For data it comes with
// one pin, its owner's; for metadata it is Meta until it is freed. ok is false if nothing is ready, or if what is
// left is not for that use: wait for a batch (see NeedBatch), or do without.
//
// The bucket may be written at once (I4): nothing that a crash could bring back needs its old contents.
func (t *Table) Allocate(u Use) (b uint32, gen uint8, ok bool) {
	if !t.roomFor(u) {
		t.stats.Refused++
		t.noteShort()
		return 0, 0, false
	}
	b, ok = t.pop(poolCommon)
	switch {
	case ok:
	case u == ForMeta:
		b, ok = t.pop(poolMeta)
	case u == ForMoving:
		b, ok = t.pop(poolMoving)
	}
	if !ok {
		t.stats.NoReady++
		t.noteShort()
		return 0, 0, false
	}
	t.start = false
	w, s := t.get(b)
	if s.inWindow() && t.window.seq[b] > t.durable && t.broken == 0 {
		panic(fmt.Sprintf("bucket: handing out %v while the journal is durable up to %d only (V1)", t.Info(b), t.durable))
	}
	t.stats.Handed++
	if u == ForMeta {
		s = s.withState(stateMeta)
	} else {
		s = s.withState(stateData)
		if t.broken&breakPins == 0 {
			w = w.withPins(1)
		}
	}
	t.set(b, w, s.withStamp(t.clock.stamp()))
	t.discard.written(b)
	if t.marks != nil {
		t.marks.allocated(b, u)
	}
	return b, w.gen(), true
}

func (t *Table) noteShort() {
	if !t.supply.short && t.Pickable() > 0 {
		t.supply.short = true
	}
}

// Available reports whether Allocate would hand out a bucket for data of that kind.
func (t *Table) Available(u Use) bool {
	return t.roomFor(u) && (t.pools[poolCommon].n > 0 || u == ForMoving && t.pools[poolMoving].n > 0)
}

// CanAllocate returns how many buckets Allocate could hand out for metadata now: a split checks this before it
// begins. Only the common pool and the reserve of metadata count.
func (t *Table) CanAllocate() int { return t.pools[poolCommon].n + t.pools[poolMeta].n }

// CanSpare reports whether n buckets may go to metadata that could do without, such as the copies of nodes that are
// coalesced: neither the head-room nor the second half of the reserve is touched by that.
func (t *Table) CanSpare(n int) bool {
	return t.unused() > t.spare()+n && t.CanAllocate() >= n+len(t.pools[poolMeta].buf)/2
}

func (t *Table) pop(pool int) (uint32, bool) {
	for {
		b, ok := t.pools[pool].pop()
		if !ok || side(t.entries[b].side).state() == stateReady {
			return b, ok // others were found to be in doubt
		}
	}
}

// Pin holds a bucket of data against reuse: for a key in flight, whose data is being written or which is not in
// the index yet. The caller knows that the bucket is held by someone already, as its owner.
func (t *Table) Pin(b uint32) {
	w, s := t.get(b)
	if w.pins() < maxPins && t.broken&breakPins == 0 {
		w = w.withPins(w.pins() + 1)
	}
	t.set(b, w, s)
}

// PinIf pins a bucket if the pointer is still good: for reading what a key points to.
func (t *Table) PinIf(p ondisk.Ptr) bool {
	b, ok := t.Bucket(p)
	if !ok || t.Gen(b) != p.Gen() {
		return false
	}
	switch side(t.entries[b].side).state() {
	case stateData, stateSuspect:
		t.Pin(b)
		return true
	}
	return false
}

// Unpin ends one hold: an open bucket closed or given up, a key consumed by the index (after Apply, in the same
// critical section) or dropped, a read done.
func (t *Table) Unpin(b uint32) {
	w, s := t.get(b)
	switch w.pins() {
	case 0:
		if t.broken&breakPins != 0 {
			return
		}
		panic(fmt.Sprintf("bucket: unpin of %v, which nobody holds", t.Info(b)))
	case maxPins: // so many that nobody knows
	default:
		t.set(b, w.withPins(w.pins()-1), s)
	}
}

func (t *Table) meta(b uint32, what string) (word, side) {
	w, s := t.get(b)
	if s.state() != stateMeta {
		panic(fmt.Sprintf("bucket: %s %v", what, t.Info(b)))
	}
	t.start = false
	if t.marks != nil {
		t.marks.freed(b)
	}
	return w, s
}

// FreeNode frees a btree node that the tree does not use any more, when its parent has got the pointers to its
// successors and its freeing key. Its generation is raised, and the old one is stored until Release says that
// this append of the parent is durable (V5, I6): till then a crash brings the node back.
func (t *Table) FreeNode(b uint32) {
	w, s := t.meta(b, "freeing node")
	w, s = t.raise(b, w, s, true) // the child key and the freeing key stay until the parent is rewritten
	s = s.withState(stateGated)
	if t.broken&BreakV5 != 0 {
		s = s.withState(stateData)
	}
	t.set(b, w, s)
}

// Release ends the wait of a node freed by FreeNode.
func (t *Table) Release(b uint32) {
	w, s := t.get(b)
	if s.state() == stateGated {
		t.set(b, w, s.withState(stateData))
	} else if t.broken == 0 {
		panic(fmt.Sprintf("bucket: release of %v", t.Info(b)))
	}
}

// FreeAfter frees metadata that only headers of journal entries refer to, an old root or uuid array, when entry
// seq, which names its successor, is durable (see JournalDurable). Sequence numbers of successive calls do not
// fall.
func (t *Table) FreeAfter(b uint32, seq uint64) {
	w, s := t.meta(b, "freeing metadata")
	w, s = t.raise(b, w, s, false)
	s = s.withState(stateGated)
	if t.broken&breakSeqGate != 0 {
		s = s.withState(stateData)
	}
	t.set(b, w, s)
	if t.broken&breakSeqGate == 0 {
		t.gates.push(mark{seq, b})
	}
}

// Return gives back a bucket of metadata that nothing ever referred to: a node that was not linked after all.
func (t *Table) Return(b uint32) {
	w, s := t.meta(b, "returning")
	t.set(b, w, s.withState(stateData))
}

// JournalDurable says that all journal entries up to seq are durable. It does a bounded part of what that lets
// go and reports whether there is more; call it until there is not.
func (t *Table) JournalDurable(seq uint64) (more bool) {
	t.durable = max(t.durable, seq)
	for range expireSlice {
		m, ok := t.gates.first()
		if !ok || m.seq > t.durable {
			return false
		}
		t.gates.pop()
		t.Release(m.bucket)
	}
	return true
}

// TakeUnused gives an unused bucket to metadata without a batch: at start-up only, before anything was changed,
// when a bucket without a pointer in the scan is one without a pointer on disk. Its generation goes up in memory
// alone, so a pointer may be newer than what is stored; whoever loads the set next adopts that (format 9.1). ok
// is false if there is none.
func (t *Table) TakeUnused() (b uint32, gen uint8, ok bool) {
	if !t.start {
		panic("bucket: TakeUnused is for start-up only")
	}
	for _, tr := range []tier{emptyFree, emptyLow, emptyHigh} {
		if b, ok = t.index[tr].next(0); ok {
			w, s := t.get(b)
			w, s = t.raise(b, w, s, false)
			t.set(b, w, s.withState(stateMeta).withStamp(t.clock.stamp()))
			t.discard.written(b)
			return b, w.gen(), true
		}
	}
	return 0, 0, false
}

// ReadyUnused makes up to n unused buckets ready for metadata without a batch, as TakeUnused takes one, and under the
// same condition. Nodes that are rewritten during replay find a bucket so, though the journal may have no room for a
// batch's entry until they are. It returns how many.
func (t *Table) ReadyUnused(n int) (ready int) {
	for ; ready < n && t.pools[poolMeta].room() > 0; ready++ {
		b, _, ok := t.TakeUnused()
		if !ok {
			break
		}
		w, s := t.get(b)
		t.set(b, w, s.withState(stateReady))
		t.pools[poolMeta].push(b)
	}
	return ready
}

// Breakage are rules that tests leave out, to see that they are found out. Those with a name of their own outside are
// for tests of whole sets too. Assertions of rules are off where any is left out.
type Breakage uint16

const (
	BreakV1        Breakage = 1 << iota // V1: empty buckets are ready at once
	BreakV4                             // V4: evicted ones are ready at once
	BreakV5                             // freed nodes do not wait for their parent's append, nor do their new generations
	BreakDiscard                        // empty buckets are discarded that the disk or the journal may need
	breakSeqGate                        // an old root or uuid array does not wait for the journal
	breakStoredGen                      // I6: of a gated bucket the new generation is stored
	breakLag                            // J3: raising a generation always forgets older pointers
	breakEmptySeq                       // the journal window is not kept
	breakPins                           // buckets that somebody holds are picked
	breakLate                           // picking goes on while generations are encoded
	breakPrioSet                        // the prio set that is named is overwritten
	breakHeadroom                       // data takes what the next activation needs
	breakDirty                          // dirty data is evicted
)
