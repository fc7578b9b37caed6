package bucket

import (
	"fmt"
	"math"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// Marks are what a policy of mark and sweep knows of the buckets: what the last walk over the index has found, and what was
// allocated since. With it victims are chosen as the kernel does, by a look at every bucket. The exact counts go on beside:
// nothing is picked that they do not allow, and each collection's result is held against them. Sources: B 2.1, 2.3 to 2.5, 3.2, 3.3.
//
//	NewMarks, Table.UseMarks, Seed until done     from the exact counts
//	Begin until done; Mark for every key; Finish until done       a collection
//	    GiveUp until done in place of Finish                      where the walk cannot be made
//	Table.DropMarks
//
// They take 4 bytes a bucket, and 16 for each bucket of a batch. Calls are short, and are made with the set's lock
// held, but NewMarks.
type Marks struct {
	t  *Table
	of []marking

	seeded    uint32 // buckets
	valid     bool   // the marks are those of a walk that came to its end
	on        bool   // a collection is under way
	begun     uint32 // its beginning has been over so many buckets
	ended     uint32 // its end
	allocates bool   // what was reclaimable at the beginning may be picked meanwhile
	starved   bool   // nothing was found to pick: only a collection helps
	left      int64  // sectors of data until the next collection

	victims  []victim // a heap, the greatest score first
	looked   uint64   // of the batch under way: buckets
	chosen   bool     // all were
	at       uint32   // where FIFO goes on
	lowest   uint16   // priority that the last look has met
	lowestIn uint16   // that this one has

	stats MarkStats
}

// MarkStats are totals since the marks were made.
type MarkStats struct {
	Looked      uint64 // at buckets, to choose victims
	Differences uint64 // between marks and exact counts that would have lost data: each is a bug
}

// A marking is what is known of one bucket.
type marking struct {
	used   uint16 // live sectors, saturating; what was allocated since counts whole
	oldest uint8  // generation of any pointer that the walk has found
	flags  uint8  // class, and reclaimableBit
}

const (
	markNone  = 0
	markClean = 1
	markDirty = 2
	markMeta  = 3
	markClass = 3

	reclaimableBit = 4 // when the collection began
)

func (m *marking) class() uint8 { return m.flags & markClass }

func (m *marking) set(class uint8, used uint32) {
	m.flags = m.flags&^markClass | class
	m.used = uint16(min(used, math.MaxUint16))
}

// A victim is a bucket that may be picked.
type victim struct {
	score uint64
	b     uint32
}

// MarkSlice is how many buckets are looked at in one call at most, some 10 ns each.
const MarkSlice = 4096

// What else a call that picks may do counts as so many looks at buckets that lie one after the other: the lock is held no
// longer for it.
const (
	offerWork  = 16                    // a victim kept
	randomWork = 16                    // a look at random
	takeWork   = MarkSlice / pickSlice // a pick
)

// collectShare: a collection is due when such a part of the cache was written.
const collectShare = 16

// NewMarks makes marks for a table. The set's lock is not needed, and should not be held.
func (t *Table) NewMarks() *Marks {
	return &Marks{t: t, of: make([]marking, len(t.entries)), victims: make([]victim, 0, cap(t.batch.list)), lowestIn: math.MaxUint16}
}

// freeInc is how many buckets a kernel invalidates at a time.
func (t *Table) freeInc() int { return max(int(t.geo.KernelFreeInc), 1) }

// UseMarks makes victims be chosen by marks as soon as they are seeded.
func (t *Table) UseMarks(m *Marks) { t.marks = m }

// DropMarks ends that.
func (t *Table) DropMarks() { t.marks = nil }

// Seed takes over what the exact counts say of some buckets, and reports whether there are more.
func (m *Marks) Seed() (more bool) {
	end := m.slice(m.seeded)
	for ; m.seeded < end; m.seeded++ {
		m.seed(m.seeded)
	}
	if m.seeded < uint32(len(m.of)) {
		return true
	}
	m.valid = true
	m.rearm()
	return false
}

// seed takes over what the exact counts say of a bucket.
func (m *Marks) seed(b uint32) {
	w, s := m.t.get(b)
	k := &m.of[b]
	k.oldest = s.oldest()
	class, used := uint8(markNone), uint32(0)
	switch s.state() {
	case stateMeta, stateFixed, stateGated:
		class, used = markMeta, m.t.geo.BucketSectors
	case stateData, stateSuspect:
		switch {
		case w.pins() > 0: // who holds it may put dirty data there
			class, used = markDirty, m.t.geo.BucketSectors
		case w.dirty() > 0:
			class, used = markDirty, w.live()
		case w.live() > 0:
			class, used = markClean, w.live()
		}
	}
	k.set(class, used)
}

func (m *Marks) slice(from uint32) (end uint32) {
	return uint32(min(uint64(from)+MarkSlice, uint64(len(m.of))))
}

func (m *Marks) seedDone() bool { return m.seeded == uint32(len(m.of)) }

func (m *Marks) rearm() {
	m.left = int64(len(m.of)) * int64(m.t.geo.BucketSectors) / collectShare
}

// Spend counts sectors of data that were given room.
func (m *Marks) Spend(sectors uint32) { m.left -= int64(sectors) }

// Ask makes a collection due.
func (m *Marks) Ask() { m.left = -1 }

// Due reports whether a collection is: there is nothing to pick, or so much was written since the last one, or it was
// asked for.
func (m *Marks) Due() bool { return m.seedDone() && (m.starved || m.left < 0) }

// Starved reports whether only a collection can find something to pick.
func (m *Marks) Starved() bool { return m.starved }

// Stats returns the marks'.
func (m *Marks) Stats() MarkStats { return m.stats }

// SetAllocates says whether buckets are picked while a collection is on: those that were reclaimable when it began.
func (m *Marks) SetAllocates(yes bool) { m.allocates = yes }

// mayPick reports whether the allocator runs.
func (m *Marks) mayPick() bool { return !m.starved && (!m.on || m.allocates && m.begunAll()) }

func (m *Marks) begunAll() bool { return m.begun == uint32(len(m.of)) }

// reclaimable reports whether a bucket may be picked by its marks.
func (m *Marks) reclaimable(k *marking, gen uint8, pins uint32) bool {
	return (m.valid || m.on && k.flags&reclaimableBit != 0) && k.class() <= markClean && pins == 0 && ondisk.GenAfter(gen, k.oldest) < ondisk.MaxStale
}

// Begin begins a collection, and reports whether it has to be called again. What the last one has found is forgotten,
// but of buckets that somebody holds; if that never came to its end, nothing is.
//
// Order: what is reclaimable is noted before the marks go, and a bucket's lag is judged before its oldest pointer is
// forgotten.
func (m *Marks) Begin() (more bool) {
	if !m.on {
		m.on, m.begun, m.ended = true, 0, 0
		m.rearm()
		if !m.valid {
			m.begun = uint32(len(m.of))
		}
	}
	end := m.slice(m.begun)
	for ; m.begun < end; m.begun++ {
		w, s := m.t.get(m.begun)
		k := &m.of[m.begun]
		if m.reclaimable(k, w.gen(), w.pins()) && s.state() == stateData {
			k.flags |= reclaimableBit
		}
		k.oldest = w.gen()
		if w.pins() == 0 {
			k.flags &^= markClass
			k.used = 0
		}
	}
	if !m.begunAll() {
		return true
	}
	m.valid = false
	return false
}

// Mark sees a pointer of a key of size sectors, stale or not. interior says that the key is one of an interior node, or
// names the root.
func (m *Marks) Mark(p ondisk.Ptr, size uint32, dirty, interior bool) {
	b, ok := m.t.Bucket(p)
	if !ok {
		return
	}
	k := &m.of[b]
	gen := m.t.Gen(b)
	if ondisk.GenAfter(gen, p.Gen()) > ondisk.GenAfter(gen, k.oldest) {
		k.oldest = p.Gen()
	}
	if gen != p.Gen() {
		return // stale
	}
	switch {
	case interior:
		if c := k.class(); c == markClean || c == markDirty {
			m.differ(b)
		}
		k.flags |= markMeta
	case k.class() == markMeta:
		m.differ(b)
	case dirty:
		k.flags = k.flags&^markClass | markDirty
	case k.class() == markNone:
		k.flags |= markClean
	}
	k.used = uint16(min(uint32(k.used)+size, math.MaxUint16))
}

func (m *Marks) differ(b uint32) {
	m.stats.Differences++
	m.t.anomaly(Anomaly{Bucket: b, Gen: m.t.Gen(b), Reason: fmt.Sprintf("a collection has marked it %d", m.of[b].class())})
}

// Finish ends a collection, and reports whether it has to be called again. Marks that would let something be overwritten
// that the exact counts say is there are errors of ours: they are counted, and set right.
func (m *Marks) Finish() (more bool) {
	end := m.slice(m.ended)
	for ; m.ended < end; m.ended++ {
		w, s := m.t.get(m.ended)
		k := &m.of[m.ended]
		k.flags &^= reclaimableBit
		switch s.state() {
		case stateFixed:
			k.set(markMeta, m.t.geo.BucketSectors)
		case stateMeta:
			// Prio sets and the uuid array are in no node.
			k.set(markMeta, m.t.geo.BucketSectors)
		case stateData:
			if w.pins() > 0 {
				continue // as it was
			}
			class, used := k.class(), uint32(k.used)
			switch {
			case w.dirty() > 0 && class != markDirty:
				class = markDirty
			case w.live() > 0 && class == markNone:
				class = markClean
			}
			used = max(used, min(w.live(), math.MaxUint16))
			if class != k.class() || used != uint32(k.used) {
				m.differ(m.ended)
				k.set(class, used)
			}
		}
	}
	if m.ended < uint32(len(m.of)) {
		return true
	}
	m.valid, m.on, m.starved = true, false, false
	m.rearm()
	return false
}

// Abort gives a collection up. The marks are of no use until one comes to its end.
func (m *Marks) Abort() { m.on = false }

// GiveUp ends a collection whose walk cannot come to its end, and reports whether it has to be called again. The marks are
// those of the exact counts then.
func (m *Marks) GiveUp() (more bool) {
	end := m.slice(m.ended)
	for ; m.ended < end; m.ended++ {
		m.of[m.ended].flags &^= reclaimableBit
		m.seed(m.ended)
	}
	if m.ended < uint32(len(m.of)) {
		return true
	}
	m.valid, m.on, m.starved = true, false, false
	m.rearm()
	return false
}

// allocated notes that a bucket was handed out.
func (m *Marks) allocated(b uint32, u Use) {
	class := uint8(markClean)
	switch u {
	case ForMeta:
		class = markMeta
	case ForDirty, ForMoving:
		class = markDirty // as soon as there is a key; nobody can tell the moments apart, since the bucket is held
	}
	m.of[b].set(class, m.t.geo.BucketSectors)
}

// freed notes that a bucket of metadata has nothing any more.
func (m *Marks) freed(b uint32) { m.of[b].set(markNone, 0) }

// fill picks for a batch, as FillBatch. For LRU a look at every bucket finds those with the lowest scores, as many as are
// wanted, which are then taken; for the others buckets are taken as they come.
func (m *Marks) fill(open uint64) (more bool) {
	t := m.t
	a := &t.batch
	switch {
	case m.mayPick() && a.want > 0 && t.opt.Policy != ondisk.LRU:
		if m.inTurn(open) {
			return true
		}
	case m.mayPick() && a.want > 0 && !m.chosen:
		m.look()
		return true
	case m.mayPick() && a.want > 0:
		for n := 0; len(m.victims) > 0; n++ {
			if n == pickSlice {
				return true
			}
			last := len(m.victims) - 1
			m.take(m.victims[last].b, open)
			m.victims = m.victims[:last]
		}
	}
	if m.mayPick() && len(a.list) < a.want {
		m.starved = true
	}
	a.phase = picked
	m.victims, m.looked, m.chosen = m.victims[:0], 0, false
	return false
}

// look looks at some of all buckets. A score is (prio - lowest + (32768 - lowest)/8) x live sectors, lowest being the
// least priority that there was last time. Source: B 2.5.
func (m *Marks) look() {
	t := m.t
	from := uint32(m.looked)
	b := from
	for work := 0; work < MarkSlice && b < uint32(len(m.of)); b++ {
		work++
		w, s := t.get(b)
		k := &m.of[b]
		if !m.reclaimable(k, w.gen(), w.pins()) || tierOf(w, s) == tierNone {
			continue
		}
		prio := t.prioOf(s)
		m.lowestIn = min(m.lowestIn, prio)
		lowest := min(m.lowest, prio)
		if m.offer(victim{uint64(prio-lowest+(ondisk.PrioInitial-lowest)/8) * uint64(k.used), b}, t.batch.want) {
			work += offerWork
		}
	}
	m.looked = uint64(b)
	m.stats.Looked += uint64(b - from)
	if m.chosen = b == uint32(len(m.of)); m.chosen {
		m.lowest, m.lowestIn = m.lowestIn, math.MaxUint16
	}
}

// offer keeps a victim if it is one of the most with the lowest scores, and reports whether it is.
func (m *Marks) offer(v victim, most int) bool {
	h := m.victims
	if len(h) < most {
		h = append(h, v)
		for i := len(h) - 1; i > 0 && h[(i-1)/2].score < h[i].score; i = (i - 1) / 2 {
			h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
		}
		m.victims = h
		return true
	}
	if v.score >= h[0].score {
		return false
	}
	h[0] = v
	for i := 0; ; {
		c := 2*i + 1
		if c+1 < len(h) && h[c+1].score > h[c].score {
			c++
		}
		if c >= len(h) || h[c].score <= h[i].score {
			return true
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
}

// inTurn takes buckets one after the other, or at random, without a look at what is in them. It reports whether there are
// more to look at: all once, or half as many as there are at random.
func (m *Marks) inTurn(open uint64) (more bool) {
	t := m.t
	most, n, step := uint64(len(m.of)), uint64(0), 1
	if t.opt.Policy == ondisk.Random {
		most, step = most/2, randomWork
	}
	for work := 0; work < MarkSlice && m.looked < most && len(t.batch.list) < t.batch.want; work += step {
		if t.opt.Policy == ondisk.Random {
			m.at = uint32(t.run.Uint64N(uint64(len(m.of))))
		}
		if m.take(m.at, open) {
			work += takeWork
		}
		if m.at++; m.at == uint32(len(m.of)) {
			m.at = 0
		}
		m.looked++
		n++
	}
	m.stats.Looked += n
	return m.looked < most && len(t.batch.list) < t.batch.want
}

// take picks a bucket, if that may be: it was looked at some time ago. It reports whether it was.
func (m *Marks) take(b uint32, open uint64) bool {
	w, s := m.t.get(b)
	k := &m.of[b]
	if !m.reclaimable(k, w.gen(), w.pins()) || tierOf(w, s) == tierNone {
		return false
	}
	k.flags &^= reclaimableBit
	m.t.pick(b, open)
	return true
}

// marked reports whether marks say what may be picked.
func (t *Table) marked() bool { return t.marks != nil && t.marks.seedDone() }

// wantedMarked is Wanted: as many as a kernel invalidates at a time, as far as there is room in the pools.
func (t *Table) wantedMarked() int {
	room := 0
	for i := range t.pools {
		room += t.pools[i].room()
	}
	return min(t.freeInc(), room)
}

// needMarked is NeedBatch: what data may take of the common pool (roomFor) is no more than what a kernel keeps in its own, so
// that there is as much to live on during a collection as there is in a kernel.
func (t *Table) needMarked() bool {
	p := &t.pools[poolCommon]
	low := p.n <= t.spare()+t.nodeSlack()+t.opt.MovingReserve+t.freeInc()/4 || !t.roomFor(ForDirty) || t.pools[poolMeta].room() > t.pools[poolMeta].n
	return low && t.marks.mayPick() && t.wantedMarked() > 0 && t.Pickable() > 0
}

// DropEmptyBatch gives a batch up in which nothing was picked, and reports whether it was such: there is nothing to write.
func (t *Table) DropEmptyBatch() bool {
	a := &t.batch
	if a.phase != picked || a.marks == nil || len(a.list) > 0 {
		return false
	}
	a.phase = idle
	return true
}

// Examined returns how many buckets the marks that FillBatch goes by have looked at.
func (t *Table) Examined() uint64 {
	if t.batch.marks == nil {
		return 0
	}
	return t.batch.marks.stats.Looked
}

// Looking reports whether FillBatch goes by marks.
func (t *Table) Looking() bool { return t.batch.marks != nil }
