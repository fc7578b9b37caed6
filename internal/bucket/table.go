package bucket

import (
	"errors"
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// ErrTooLarge is returned for a device whose buckets a Table cannot count: 512 MiB or more each, or 2^32 or
// more of them.
var ErrTooLarge = errors.New("buckets of this cache device are too large or too many")

// ErrNoSpace is returned at start-up when there are not enough unused buckets to begin with.
var ErrNoSpace = errors.New("not enough unused buckets to start")

// Options are what may be chosen. The zero value of each field is its default.
type Options struct {
	// Policy picks among clean buckets. Default: LRU.
	Policy ondisk.Replacement

	// BtreeReserve is how many ready buckets are kept for btree nodes and uuid arrays alone: not less
	// than 32, and 3 x concurrent splits x depth, in a set that is used. Default: one of 128, from 32 to 256.
	BtreeReserve int

	// MovingReserve is how many ready buckets are kept for moving data together. Default: one of 1024, from 4 to
	// 4096.
	MovingReserve int

	// Batch is how many buckets one write of the generations makes ready, as a rule. Default: one of 4096, at
	// least 64, at most one of 32; up to one of 128 while data finds none ready.
	Batch int

	// Ready is how many buckets are kept ready for everybody, beside the reserves. Default: two batches.
	Ready int

	most int // times Batch and Ready, at most

	// Broken are rules not to keep: for tests, see Breakage.
	Broken Breakage
}

func (o Options) withDefaults(g *ondisk.Geometry) Options {
	n := int(g.NBuckets)
	fixed := o.Batch > 0 || o.Ready > 0
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&o.BtreeReserve, min(max(n>>7, 32), 256))
	def(&o.MovingReserve, min(max(n>>10, 4), 4096))
	def(&o.Batch, max(min(max(n>>12, 64), n>>5), 1))
	def(&o.Ready, 2*o.Batch)
	if o.most = 1; !fixed {
		o.most = max(n>>7/o.Batch, 1)
	}
	return o
}

// A Table is what a running set knows of the buckets of its cache device. See the package's comment for what
// may be called when.
type Table struct {
	geo    ondisk.Geometry
	opt    Options
	run    *rt.Runtime
	broken Breakage // tests only: rules not to keep

	entries []entry
	index   [tiers]bitset // of what may be picked; tierNone unused
	sparse  bitset        // see Table.fill
	filled  [fills + 1]int

	fillShift uint
	counts    [categories]int
	rooms     [rooms]int // buckets by what a kernel would find
	lags      [256]int   // buckets per lag
	live      uint64     // sectors, all buckets
	dirty     uint64     // sectors, all buckets
	window    window     // empty_seq
	gates     seqQueue   // metadata that waits for a journal entry
	durable   uint64     // journal entries up to this one are durable
	passed    uint64     // entries before this one are not needed
	sweep     sweepState // of generations
	clock     clock      // ageing
	hand      hand       // of victim selection

	supply  supply
	replay  int // buckets that the head-room has more, see SetReplay
	pools   [3]ring
	batch   batch
	discard discards

	prio  [2][]uint32 // buckets of the two prio sets
	named int         // which of them the newest durable journal entry names
	start bool        // since Load nothing has changed: what is unused is unused on disk

	marks     *Marks   // of a policy of mark and sweep; nil: there is none
	recount   *Recount // kept up by events that zero a bucket
	stats     Stats
	anomalies []Anomaly // not fetched yet, bounded
}

// Stats are totals since the start.
type Stats struct {
	Batches     uint64 // generations made durable
	PickedEmpty uint64 // buckets picked that had no live sectors
	Evicted     uint64 // clean buckets picked, with what was in them
	Examined    uint64 // clean buckets looked at to find those
	Handed      uint64 // buckets handed out
	Refused     uint64 // hand-outs to data refused for the sake of the head-room
	NoReady     uint64 // hand-outs that found no ready bucket
	Anomalies   uint64 // accounting errors: each is a bug, or damage on disk
	OverLag     uint64 // generations raised beyond what the format allows; only sets that came so do that
	Sweeps      uint64 // of generations, finished
}

// Counts are how many buckets are in each category.
type Counts [categories]int

// Counts returns how many buckets are in each category.
func (t *Table) Counts() Counts { return t.counts }

// Stats returns totals since the start.
func (t *Table) Stats() Stats { return t.stats }

// LiveSectors and DirtySectors are sums over all buckets.
func (t *Table) LiveSectors() uint64 { return t.live }

// DirtySectors is the sum of dirty sectors over all buckets.
func (t *Table) DirtySectors() uint64 { return t.dirty }

// InUse returns which part of the buckets is in use, in percent, exactly and at any time: all but those that
// are empty, clean, ready or about to be; what is being discarded is empty.
func (t *Table) InUse() int { return t.Used() * 100 / len(t.entries) }

// Used returns how many buckets these are.
func (t *Table) Used() int {
	return len(t.entries) - t.counts[Empty] - t.counts[Clean] - t.counts[Ready] - t.counts[Inc] - t.discard.busy
}

// Bucket returns the bucket that a pointer names, and whether it is one of this device.
func (t *Table) Bucket(p ondisk.Ptr) (uint32, bool) {
	if p.Dev() != 0 { // check keys, devices that the set does not have
		return 0, false
	}
	b := t.geo.Bucket(p.Sector())
	return uint32(b), t.geo.ValidBucket(b)
}

// Gen returns a bucket's generation. The set's lock may be held shared.
func (t *Table) Gen(b uint32) uint8 { return uint8(t.entries[b].lo) }

// Stale returns by how many generations a pointer is older than its bucket: 0 is a pointer that is good. The
// set's lock may be held shared. The pointer's bucket must be one of this device.
func (t *Table) Stale(p ondisk.Ptr) uint8 {
	return ondisk.GenAfter(t.Gen(uint32(t.geo.Bucket(p.Sector()))), p.Gen())
}

// SafeGen returns the generation that a bucket has after a crash, whenever that comes: not yet the new one while a batch
// is not durable. What is stale by it can be forgotten.
func (t *Table) SafeGen(b uint32) uint8 {
	w, s := t.get(b)
	if s.state() == stateInc {
		return w.gen() - 1
	}
	return w.gen()
}

// Evicting reports whether a pointer is stale in memory only: the bucket's new generation is not durable yet, so
// that a crash would make the pointer good again. Its data is then what it was: nothing has been written over it.
func (t *Table) Evicting(p ondisk.Ptr) bool {
	b, ok := t.Bucket(p)
	if !ok {
		return false
	}
	w, s := t.get(b)
	return s.state() == stateInc && ondisk.GenAfter(w.gen(), p.Gen()) == 1
}

// Info returns what is known of a bucket.
func (t *Table) Info(b uint32) Info {
	w, s := t.get(b)
	i := Info{
		Bucket: b, Gen: w.gen(), Oldest: s.oldest(), Category: categoryOf(w, s), Pins: w.pins(), Live: w.live(), Dirty: w.dirty(),
		Prio: t.prioOf(s), Residue: s.residue(), Gated: s.state() == stateGated,
	}
	if s.inWindow() {
		i.EmptySeq = t.window.seq[b]
	}
	return i
}

// NBuckets returns how many buckets there are, bucket 0 included.
func (t *Table) NBuckets() uint32 { return uint32(len(t.entries)) }

func (t *Table) get(b uint32) (word, side) {
	e := &t.entries[b]
	return e.word(), side(e.side)
}

// set is the only way in which a running table changes an entry: index, counters and totals go along.
func (t *Table) set(b uint32, w word, s side) {
	e := &t.entries[b]
	ow, os := e.word(), side(e.side)
	e.lo, e.hi, e.side = uint32(w), uint32(w>>32), uint32(s)

	t.live += uint64(w.live()) - uint64(ow.live())
	t.dirty += uint64(w.dirty()) - uint64(ow.dirty())
	oc, nc := categoryOf(ow, os), categoryOf(w, s)
	if oc != nc {
		t.counts[oc]--
		t.counts[nc]++
	}
	if or, nr := roomOf(ow, os), roomOf(w, s); or != nr {
		t.rooms[or]--
		t.rooms[nr]++
	}
	if ol, nl := ow.gen()-os.oldest(), w.gen()-s.oldest(); ol != nl {
		t.lags[ol]--
		t.lags[nl]++
	}
	t.setFill(b, t.fill(ow, os), t.fill(w, s))
	if ot, nt := tierOf(ow, os), tierOf(w, s); ot != nt {
		if ot != tierNone {
			t.index[ot].remove(b)
		}
		if nt != tierNone {
			t.index[nt].add(b)
		}
		t.retier(b, ot, nt)
	}
}

// unused is how many buckets a kernel would find without live contents now, at least.
func (t *Table) unused() int { return t.rooms[roomUnused] }

// reusable is how many it would find unused or clean, at least.
func (t *Table) reusable() int { return t.rooms[roomUnused] + t.rooms[roomReusable] }

// An Anomaly is a change that does not fit what was counted: a bug, or damage on disk. The bucket is then
// SUSPECT and keeps the higher counts, for too high only leaks, and too low destroys data.
type Anomaly struct {
	Bucket      uint32
	Gen         uint8 // that the change was for
	Live, Dirty int32 // the change
	Was         Info  // the bucket before it
	Reason      string
}

func (a Anomaly) String() string {
	return fmt.Sprintf("%s: change (%+d live, %+d dirty) for gen %d of %v", a.Reason, a.Live, a.Dirty, a.Gen, a.Was)
}

const maxAnomalies = 64 // kept for who fetches them; all are counted

func (t *Table) anomaly(a Anomaly) {
	t.stats.Anomalies++
	if len(t.anomalies) < maxAnomalies {
		a.Was = t.Info(a.Bucket)
		t.anomalies = append(t.anomalies, a)
	}
}

// Anomalies returns those that it has not returned before, the first 64 since.
func (t *Table) Anomalies() []Anomaly {
	a := t.anomalies
	t.anomalies = nil
	return a
}
