package bucket

import (
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A world is a cache set with nothing in it but what concerns buckets, and what its disk would show after a power
// cut at any moment: leaves of fixed slots under one interior node, a journal, prio sets, a uuid array. The table
// under test is driven as a set would drive it. Everything else is plain maps.
type world struct {
	g   ondisk.Geometry
	t   *Table
	brk Breakage

	// in memory
	mem      []wkey // by slot
	leaves   []wleaf
	open     map[string]*wopen // by class
	flight   []wflight
	entry    wentry // the open journal entry
	openSeq  uint64
	uuid     uint32
	uuidUser int
	uuidFor  uint64 // entry that is to name it; 0: it is named
	version  int
	freeing  []ondisk.Ptr // stale pointers in the interior node: freed children, freeing keys
	batchFor uint64       // entry that names the batch's prio sets; 0: not named yet
	written  bool         // the batch's prio sets are
	encoding int          // set to encode next
	sets     []ondisk.PrioSet
	prioSeq  uint64
	sweepAt  int
	trims    [][2]uint32 // discards under way: first bucket, and how many
	trimmed  int

	// on disk
	journal  []wentry // submitted, in order; [0] has seq 1
	durable  uint64
	header   wheader             // of entries written from now on
	contents map[uint32]*content // by bucket
	expect   func(format string, args ...any)
}

type wkey struct {
	ptr   ondisk.Ptr
	n     uint32
	dirty bool
	some  bool // has a pointer
	ver   int
}

type wleaf struct {
	node  ondisk.Ptr // in memory
	disk  ondisk.Ptr // named by the durable parent
	free  uint32     // old node, waiting for the parent's append; 0: none
	pin   uint64     // oldest entry with keys that the durable leaf lacks
	since uint64     // likewise, for keys since the copy was written
}

type wopen struct {
	bucket uint32
	gen    uint8
	used   uint32
}

type wflight struct {
	slot   int
	key    wkey
	bucket uint32
	move   bool
}

type wentry struct {
	seq  uint64
	keys []wjkey
	head wheader
}

type wjkey struct {
	slot int
	key  wkey
}

type wheader struct {
	lastSeq  uint64
	prio     uint32
	prioSeq  uint64
	uuid     uint32
	uuidUser int
}

// content is what was last written to a bucket.
type content struct {
	gen  uint8
	data map[uint32]int // offset: version
	node []wkey         // a leaf's keys, by slot of the leaf
	prio *ondisk.PrioSet
	uuid int
}

const (
	unit     = 4 // sectors of a slot; four to a bucket
	perLeaf  = 40
	nLeaves  = 6
	nSlots   = perLeaf * nLeaves
	nBuckets = 96
)

func testGeometry(n uint64, bucketSectors uint16) ondisk.Geometry {
	g := ondisk.NewGeometry(&ondisk.Superblock{Version: ondisk.VersionCache, BlockSize: 1, BucketSize16: bucketSectors, Word184: n, FirstBucket: 3})
	return g
}

func worldGeometry() ondisk.Geometry {
	g := testGeometry(nBuckets, 16)
	g.PrioPerBucket, g.NPrio = 40, 3
	g.KernelReserve, g.KernelFreeInc = 2, 3
	return g
}

var worldOptions = Options{BtreeReserve: 3, MovingReserve: 1, Ready: 3, Batch: 3}

func newWorld(brk Breakage, expect func(format string, args ...any)) *world {
	w := &world{g: worldGeometry(), brk: brk, expect: expect, contents: map[uint32]*content{}, open: map[string]*wopen{}, openSeq: 1}
	l, err := NewLoader(nil, &w.g, worldOptions)
	if err != nil {
		panic(err)
	}
	for b := range uint32(4) {
		l.Fixed(b + 3)
	}
	w.t, _ = l.Finish(0, 0)
	w.mem = make([]wkey, nSlots)
	w.leaves = make([]wleaf, nLeaves)
	if err := w.t.AllocatePrioSets(); err != nil {
		panic(err)
	}
	for i := range w.leaves {
		b, gen, _ := w.t.TakeUnused()
		w.leaves[i].node = w.at(b, gen, 0)
		w.leaves[i].disk = w.leaves[i].node
		w.contents[b] = &content{gen: gen, node: make([]wkey, perLeaf)}
	}
	w.uuid, _, _ = w.t.TakeUnused()
	w.contents[w.uuid] = &content{uuid: 1}
	w.header.uuid, w.header.uuidUser = w.uuid, 1
	w.runBatch()
	w.t.broken = brk
	return w
}

func (w *world) at(b uint32, gen uint8, off uint32) ondisk.Ptr {
	return ondisk.MakePtr(gen, w.g.BucketStart(uint64(b))+uint64(off), 0)
}

func (w *world) bucket(p ondisk.Ptr) uint32 { return uint32(w.g.Bucket(p.Sector())) }

func (w *world) allocate(u Use) (uint32, uint8, bool) {
	b, gen, ok := w.t.Allocate(u)
	if ok {
		w.contents[b] = &content{gen: gen, data: map[uint32]int{}}
	}
	return b, gen, ok
}

// write forms a key for a slot, as a request would: the data goes to an open bucket, the key waits.
func (w *world) write(slot int, class string, move bool) bool {
	o := w.open[class]
	if o == nil {
		u := map[string]Use{"dirty": ForDirty, "clean": ForClean, "moving": ForMoving}[class]
		b, gen, ok := w.allocate(u)
		if !ok {
			return false
		}
		o = &wopen{bucket: b, gen: gen}
		w.open[class] = o
	}
	w.version++
	k := wkey{ptr: w.at(o.bucket, o.gen, o.used), n: unit, dirty: class == "dirty", some: true, ver: w.version}
	if move {
		k.dirty = w.mem[slot].dirty
	}
	w.contents[o.bucket].data[o.used] = k.ver
	w.t.Pin(o.bucket)
	w.flight = append(w.flight, wflight{slot: slot, key: k, bucket: o.bucket, move: move})
	if o.used += unit; o.used == w.g.BucketSectors {
		w.close(class)
	}
	return true
}

func (w *world) close(class string) {
	if o := w.open[class]; o != nil {
		w.t.Unpin(o.bucket)
		delete(w.open, class)
	}
}

// land inserts a key that was in flight, or drops it.
func (w *world) land(i int, drop bool) {
	f := w.flight[i]
	w.flight = slices.Delete(w.flight, i, i+1)
	old := w.mem[f.slot]
	live := old.some && w.t.Gen(w.bucket(old.ptr)) == old.ptr.Gen()
	switch {
	case drop:
	case f.move && (!live || old.dirty != f.key.dirty): // replaced meanwhile
	case !f.key.dirty && old.dirty: // a write over dirty data is dirty
	default:
		w.insert(f.slot, f.key, !f.move || f.key.dirty)
	}
	w.t.Unpin(f.bucket)
}

// insert changes the leaf, appends to the journal, and accounts.
func (w *world) insert(slot int, k wkey, journalled bool) {
	var d Deltas
	if old := w.mem[slot]; old.some {
		d.Drop(w.t, old.ptr, old.n, old.dirty)
	}
	if k.some {
		d.Put(w.t, k.ptr, k.n, k.dirty)
	}
	w.mem[slot] = k
	if journalled {
		w.entry.keys = append(w.entry.keys, wjkey{slot, k})
		w.pin(slot/perLeaf, w.openSeq)
	}
	w.t.Apply(&d, w.openSeq, journalled)
}

func (w *world) pin(leaf int, seq uint64) {
	l := &w.leaves[leaf]
	if l.pin == 0 {
		l.pin = seq
	}
	if l.free != 0 && l.since == 0 {
		l.since = seq
	}
}

func (w *world) clean(slot int) {
	if k := w.mem[slot]; k.some && k.dirty {
		k.dirty = false
		w.insert(slot, k, true)
	}
}

// writeLeaf appends to a leaf in place.
func (w *world) writeLeaf(i int) {
	l := &w.leaves[i]
	if l.free != 0 {
		return
	}
	w.contents[w.bucket(l.node)].node = slices.Clone(w.mem[i*perLeaf : (i+1)*perLeaf])
	l.pin = 0
}

// rewrite writes a copy of a leaf to a new node; the parent's append is submitted, not durable.
func (w *world) rewrite(i int) {
	l := &w.leaves[i]
	if l.free != 0 || w.t.unused() <= w.t.spare()+1 {
		return // the model keeps the head-room for the kernel; see TestFullOfMetadata
	}
	b, gen, ok := w.allocate(ForMeta)
	if !ok {
		return
	}
	w.contents[b].node = slices.Clone(w.mem[i*perLeaf : (i+1)*perLeaf])
	l.free, l.since = w.bucket(l.node), 0
	old := l.node
	l.node = w.at(b, gen, 0)
	w.t.FreeNode(l.free)
	w.freeing = append(w.freeing, old, ondisk.MakePtr(old.Gen()+1, old.Sector(), 0))
}

// parentDurable ends a rewrite.
func (w *world) parentDurable(i int) {
	l := &w.leaves[i]
	if l.free == 0 {
		return
	}
	l.disk = l.node
	w.t.Release(l.free)
	l.free, l.pin = 0, l.since
}

func (w *world) newUUIDs() {
	if w.uuidFor != 0 || w.t.unused() <= w.t.spare()+1 {
		return
	}
	b, _, ok := w.allocate(ForMeta)
	if !ok {
		return
	}
	w.version++
	w.contents[b].uuid = w.version
	// The entry after the open one is to name it.
	w.t.FreeAfter(w.uuid, w.openSeq+1)
	w.uuid, w.uuidUser, w.uuidFor = b, w.version, w.openSeq+1
}

func (w *world) submitJournal() {
	w.entry.seq = w.openSeq
	last := w.openSeq
	for _, l := range w.leaves {
		if l.pin != 0 {
			last = min(last, l.pin)
		}
	}
	w.header.lastSeq = last
	if w.uuidFor == w.openSeq {
		w.header.uuid, w.header.uuidUser, w.uuidFor = w.uuid, w.uuidUser, 0
	}
	if w.written && w.batchFor == 0 {
		w.batchFor = w.openSeq
		w.header.prio, w.header.prioSeq = w.t.PrioBuckets()[0], w.prioSeq
	}
	w.entry.head = w.header
	w.journal = append(w.journal, w.entry)
	w.entry = wentry{}
	w.openSeq++
}

func (w *world) journalDone() {
	if w.durable == uint64(len(w.journal)) {
		return
	}
	w.durable++
	for w.t.JournalDurable(w.durable) {
	}
	for w.t.JournalPassed(w.journal[w.durable-1].head.lastSeq) {
	}
}

// batchStep does the next thing that a batch needs, if it is not the journal's turn.
func (w *world) batchStep() {
	t := w.t
	switch t.batch.phase {
	case idle:
		t.BeginBatch()
		w.written, w.batchFor, w.encoding = false, 0, 0
	case filling:
		t.FillBatch(w.openSeq)
	case picked, encoding:
		if w.encoding == 0 {
			w.sets = make([]ondisk.PrioSet, t.PrioSets())
		}
		p := &w.sets[w.encoding]
		p.Data = make([]byte, 3*w.g.PrioPerBucket)
		for from, done := 0, false; !done; {
			from, done = t.SnapshotGens(p, w.encoding, from)
		}
		if w.encoding++; w.brk&breakLate != 0 && w.encoding < t.PrioSets() {
			was := t.batch
			t.batch.want += 2
			t.batch.phase = filling
			t.FillBatch(w.openSeq)
			t.batch.phase, t.batch.next = was.phase, was.next
		}
	case encoded:
		if !w.written {
			w.prioSeq++
			for i, b := range t.PrioBuckets() {
				w.sets[i].Seq = w.prioSeq
				w.contents[b] = &content{prio: &w.sets[i]}
			}
			w.written = true
			if w.durable > 0 {
				w.views(func(uint64, view) {}) // they must not matter yet
			}
		} else if w.batchFor != 0 && w.batchFor <= w.durable {
			for t.BatchDurable(w.durable) {
			}
		}
	}
}

// discard begins a discard; what the buckets held is gone at once.
func (w *world) discard(most int) {
	first, n := w.t.DiscardBegin(most)
	for b := first; b < first+uint32(n); b++ {
		w.contents[b] = &content{data: map[uint32]int{}}
	}
	if n > 0 {
		w.trims = append(w.trims, [2]uint32{first, uint32(n)})
		w.trimmed += n
	}
}

// discarded ends one.
func (w *world) discarded(i int) {
	d := w.trims[i]
	w.trims = slices.Delete(w.trims, i, i+1)
	w.t.DiscardEnd(d[0], int(d[1]))
}

func (w *world) runBatch() {
	for w.t.Wanted() > 0 {
		before := w.t.Stats().Batches
		for w.t.Stats().Batches == before || w.t.batch.phase != idle {
			w.batchStep()
			if w.written && w.batchFor == 0 {
				w.submitJournal()
				for w.durable < uint64(len(w.journal)) {
					w.journalDone()
				}
			}
		}
		if len(w.t.batch.list) == 0 {
			return
		}
	}
}
