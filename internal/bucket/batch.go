package bucket

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A phase is how far the batch under way is.
type phase uint8

const (
	idle     phase = iota
	filling        // buckets are picked
	picked         // all that could be
	encoding       // generations are being copied out
	encoded        // all were: prio sets may be written, and named by a journal entry
	handing        // durable: the buckets go to the pools
)

// A batch is a number of buckets on their way from Empty or Clean to Ready: picked, generation raised, written
// with all generations, named by a durable journal entry.
type batch struct {
	phase phase
	want  int
	marks *Marks // that say what may be picked; nil: the exact counts alone
	list  []uint32
	next  uint64 // when encoding: the next bucket whose generation is to be copied
	given int    // when handing: how many went to the pools
}

const (
	pickSlice   = 32  // buckets picked at most in one call
	lookSlice   = 512 // buckets looked at
	encodeSlice = 2048
	handSlice   = 128
)

// Wanted returns how many buckets a batch would try to get: what the pools lack, or what there should be unused
// and is not, the head-room included. Between batches only.
func (t *Table) Wanted() int {
	if t.marked() {
		return t.wantedMarked()
	}
	c, m, v := &t.pools[poolCommon], &t.pools[poolMeta], &t.pools[poolMoving]
	ready := t.opt.Ready * t.supply.times
	all := ready + len(m.buf) + len(v.buf)
	lack := m.room() + v.room() + max(ready-c.n, 0)
	spare := t.spare() + t.nodeSlack()
	unused := spare + all - t.unused()
	reusable := spare + int(t.geo.KernelFreeInc) + all - t.reusable()
	return max(min(max(lack, unused, reusable), c.room()+m.room()+v.room()), 0)
}

// A supply says how many times what is usual batches are, and what is kept ready. A batch takes a write of all generations and
// a journal entry, milliseconds on a fast device; where data takes more buckets than two usual batches have in that time,
// it would wait for each, and each would cost as much as a larger one. So they grow when less than a quarter of what is kept
// ready is left at the end of one, and shrink when for long more than three quarters were.
type supply struct {
	times int
	short bool // that little was left, or data has found no bucket though there was something to pick, since the last batch began
	calm  int  // batches at whose end there was much left
}

// supplyCalm is how many batches with much left make the next ones smaller again.
const supplyCalm = 64

func (s *supply) adapt(most int) {
	switch {
	case s.short:
		s.times, s.calm = min(2*s.times, most), 0
	case s.calm >= supplyCalm:
		s.times, s.calm = max(s.times/2, 1), 0
	}
	s.short = false
}

// left says how many buckets there were for data when a batch was durable, of how many that should be.
func (s *supply) left(n, of int) {
	switch {
	case 4*n < of:
		s.short = true
	case 4*n >= 3*of:
		s.calm++
	default:
		s.calm = 0
	}
}

// forData is how many buckets dirty data could take, one after the other.
func (t *Table) forData() int {
	left := t.spare() + t.opt.MovingReserve + t.nodeSlack()
	return min(t.pools[poolCommon].n, t.unused()-left, t.reusable()-left-int(t.geo.KernelFreeInc))
}

// Pickable returns how many buckets could be picked, 0 as long as a policy of mark and sweep forbids it.
func (t *Table) Pickable() (n int) {
	if t.marked() && !t.marks.mayPick() {
		return 0
	}
	for i := emptyFree; i < tiers; i++ {
		n += t.index[i].count
	}
	return n
}

// Resting returns how many buckets could be picked if their generations were not so far ahead of what may still be found of
// them: a sweep ends that.
func (t *Table) Resting() int { return t.counts[Empty] + t.counts[Clean] - t.Pickable() }

// NeedBatch reports whether it is time for a batch: half a batch is wanted and can be had, or there is something
// to be had and dirty data is refused, or the common pool or the reserve of metadata is running out.
func (t *Table) NeedBatch() bool {
	if t.batch.phase != idle {
		return false
	}
	if t.marked() {
		return t.needMarked()
	}
	can := min(t.Wanted(), t.Pickable())
	low := !t.roomFor(ForDirty) || t.pools[poolCommon].n == 0 || t.pools[poolMeta].room() > t.pools[poolMeta].n
	return can >= max(t.opt.Batch*t.supply.times/2, 1) || low && can > 0
}

// BeginBatch begins a batch; false if one is under way. It then goes
//
//	FillBatch until done        picks buckets and raises their generations
//	SnapshotGens, all sets      copies the generations out, with no picking in between
//	                            (caller: write the prio sets, all at once; flush; append PrioBuckets to the
//	                            journal; wait until that entry is durable)
//	BatchDurable until done     the buckets are ready
//
// Each call is short. There may be a batch without buckets, to have generations and priorities stored. If
// writing fails, the batch stays as it is: begin again with SnapshotGens, as often as it takes.
func (t *Table) BeginBatch() bool {
	if t.batch.phase != idle {
		return false
	}
	t.supply.adapt(t.opt.most)
	t.batch = batch{phase: filling, want: t.Wanted(), list: t.batch.list[:0]}
	if t.marked() {
		t.batch.marks = t.marks
	}
	t.hand.by = [tiers]criterion{}
	return true
}

// FillBatch picks a bounded number of buckets; call it until more is false. open is the open journal entry.
//
// Empty buckets come first, those whose reuse costs no generation, then those that lag by less than 32; then
// clean ones that lag by less than 64; then what is left below the limit. Within clean, the policy chooses.
func (t *Table) FillBatch(open uint64) (more bool) {
	a := &t.batch
	if a.phase != filling {
		panic("bucket: FillBatch without BeginBatch")
	}
	t.tick()
	t.start = false
	if a.marks != nil {
		return a.marks.fill(open)
	}
	full := len(a.list) + pickSlice
	look := lookSlice
	for tr := emptyFree; tr < tiers && look > 0; tr++ {
		for look > 0 && len(a.list) < min(a.want, full) && t.index[tr].count > 0 {
			b, ok := t.choose(tr)
			if look--; t.hand.sampled {
				look, t.hand.sampled = 0, false // that was enough for one call
			}
			if !ok {
				continue // looked at and left
			}
			t.pick(b, open)
		}
	}
	if len(a.list) < a.want && (look == 0 || len(a.list) == full) {
		return true
	}
	a.phase = picked
	return false
}

// pick takes a bucket of data that nobody holds, and that has nothing dirty, into the batch.
func (t *Table) pick(b uint32, open uint64) {
	w, s := t.get(b)
	if tierOf(w, s) == tierNone && t.broken == 0 {
		panic(fmt.Sprintf("bucket: picked %v", t.Info(b)))
	}
	evict := w.live() > 0
	s = s.withRoom(roomOf(w, s))
	if evict {
		t.stats.Evicted++
		t.sweep.evicted += uint64(w.live())
		t.window.put(b, open) // entries up to this one may hold pointers into it
		s |= windowBit
	} else {
		t.stats.PickedEmpty++
	}
	w, s = t.raise(b, w, s, evict)
	if evict && t.broken&BreakV4 != 0 || !evict && t.broken&BreakV1 != 0 {
		t.set(b, w, s.withState(stateReady))
		t.toPool(b)
		t.batch.want--
		return
	}
	t.set(b, w, s.withState(stateInc))
	t.batch.list = append(t.batch.list, b)
}

// PrioSets returns how many prio sets there are.
func (t *Table) PrioSets() int { return int(t.geo.NPrio) }

// PrioBuckets returns the buckets that the prio sets of this batch go to, in order; the first is what the
// journal entry names. They are not those that the newest durable entry names.
func (t *Table) PrioBuckets() []uint32 {
	if t.broken&breakPrioSet != 0 {
		return t.prio[t.named]
	}
	return t.prio[1-t.named]
}

// NamedPrioBuckets returns the buckets of the prio sets that are durable.
func (t *Table) NamedPrioBuckets() []uint32 { return t.prio[t.named] }

// SnapshotGens copies generations and priorities into prio set number set, from its entry from on, and returns
// the entry to go on with; done says that the set is complete. A call copies a bounded number. The sets come in
// order, each from entry 0: set 0 from 0 begins anew. p has all of a set's data as its Data and is kept by the
// caller; when it is done, its other fields are set as well, but for Seq, and nothing is left but to encode it,
// for which no lock is needed.
//
// The snapshot need not be of one moment. Each generation that the batch raised is in it, as picking ended
// before. Others may be newer than some other's, which does no harm: a generation raised by freeing a node is
// stored only after its release. Of a gated bucket the one before is stored (I6).
func (t *Table) SnapshotGens(p *ondisk.PrioSet, set, from int) (next int, done bool) {
	a := &t.batch
	per := t.geo.PrioPerBucket
	first := uint64(set) * per
	if a.phase < picked || a.phase > encoded {
		panic("bucket: SnapshotGens of a batch that is not filled")
	}
	if set == 0 && from == 0 {
		a.phase, a.next = encoding, 0
	}
	if a.next != first+uint64(from) {
		panic(fmt.Sprintf("bucket: SnapshotGens at %d, expected %d", first+uint64(from), a.next))
	}
	end := min(a.next+encodeSlice, first+per, uint64(len(t.entries)))
	for b := a.next; b < end; b++ {
		w, s := t.get(uint32(b))
		gen, prio := w.gen(), t.prioOf(s)
		if s.state() == stateGated && t.broken&breakStoredGen == 0 {
			gen--
		}
		p.SetEntry(int(b-first), prio, gen)
	}
	a.next = end
	next = int(end - first)
	if end < first+per && end < uint64(len(t.entries)) {
		return next, false
	}
	for i := next; i < int(per); i++ {
		p.SetEntry(i, 0, 0)
	}
	to := t.PrioBuckets()
	p.Magic, p.Version, p.Pad = t.geo.PrioMagic(), 0, 0
	if set+1 < len(to) {
		p.NextBucket = uint64(to[set+1])
	} else if len(t.prio[t.named]) > 0 { // without meaning: what the kernel has here
		p.NextBucket = uint64(t.prio[t.named][0])
	}
	if end == uint64(len(t.entries)) {
		a.phase = encoded
	}
	return next, true
}

// BatchDurable says that the journal is durable up to seq, and that this entry, or an older one, names the
// batch's prio sets. A bounded number of its buckets goes to the pools, the reserves first; call it until more
// is false. From now on the other prio sets are the ones to write.
func (t *Table) BatchDurable(seq uint64) (more bool) {
	a := &t.batch
	t.durable = max(t.durable, seq)
	switch a.phase {
	case encoded:
		t.named = 1 - t.named
		a.phase = handing
		if t.Pickable() > 0 {
			t.supply.left(t.forData(), t.opt.Ready*t.supply.times)
		}
		t.stats.Batches++
	case handing:
	default:
		panic("bucket: BatchDurable of a batch whose generations were not all copied")
	}
	end := min(a.given+handSlice, len(a.list))
	for ; a.given < end; a.given++ {
		b := a.list[a.given]
		w, s := t.get(b)
		if s.state() != stateInc {
			continue // found to be in doubt
		}
		// V1. The entry that names the prio sets was written after everything that emptied these buckets.
		if e := t.window.seq[b]; s.inWindow() && e > t.durable && t.broken == 0 {
			panic(fmt.Sprintf("bucket: batch of entry %d has %v (V1)", seq, t.Info(b)))
		}
		t.set(b, w, s.withState(stateReady))
		t.toPool(b)
	}
	if a.given < len(a.list) {
		return true
	}
	a.phase = idle
	return false
}

func (t *Table) toPool(b uint32) {
	for _, p := range [...]int{poolMeta, poolMoving} {
		if t.pools[p].room() > 0 {
			t.pools[p].push(b)
			return
		}
	}
	t.pools[poolCommon].push(b)
}
