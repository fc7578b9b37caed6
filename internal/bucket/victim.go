package bucket

import (
	"math"
	"slices"
	"sync/atomic"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A clock ages buckets without touching them: it advances by one for each 1024th of the cache's capacity of
// accepted requests, a hit stores its time, and the priority is what is left of the initial one.
type clock struct {
	now    atomic.Uint32
	budget atomic.Int64 // sectors since the last tick
	per    int64        // sectors a tick
	trim   uint32       // the next bucket to trim
}

func (c *clock) stamp() uint16 { return uint16(c.now.Load()) }

const (
	maxAge   = ondisk.PrioInitial // a bucket that old has priority 0
	maxTicks = 8                  // a call makes up for, at most,
	tickLook = 8192               // and does not begin another one when it has looked at so many buckets
)

// trimPart is the part of all buckets whose stamps a tick looks at: each once in 8192 ticks, before a stamp that
// is 32768 old looks new again, which it does at 65536.
const trimPart = 8192

// Age counts an accepted request's sectors. It needs no lock.
func (t *Table) Age(sectors uint64) { t.clock.budget.Add(int64(sectors)) }

// Tick advances the clock if it is time. Apply and FillBatch do so by themselves; who serves reads alone calls
// it now and then.
func (t *Table) Tick() { t.tick() }

func (t *Table) tick() {
	c := &t.clock
	part := len(t.entries)/trimPart + 1
	for i := 0; i < maxTicks && i*part < tickLook && c.budget.Load() >= c.per; i++ {
		c.budget.Add(-c.per)
		now := uint16(c.now.Add(1))
		for range part {
			e := &t.entries[c.trim]
			if s := side(e.side); now-s.stamp() > maxAge {
				e.side = uint32(s.withStamp(now - maxAge))
			}
			if c.trim++; c.trim == uint32(len(t.entries)) {
				c.trim = 0
			}
		}
	}
}

// Touch notes a hit. The set's lock may be held shared.
func (t *Table) Touch(b uint32) {
	e := &t.entries[b]
	for {
		v := atomic.LoadUint32(&e.side)
		s := side(v).withStamp(t.clock.stamp())
		if uint32(s) == v || atomic.CompareAndSwapUint32(&e.side, v, uint32(s)) {
			return
		}
	}
}

func (t *Table) age(s side) uint16 { return min(t.clock.stamp()-s.stamp(), maxAge) }

// prioOf is the priority as stored on disk.
func (t *Table) prioOf(s side) uint16 {
	switch s.state() {
	case stateFixed, stateMeta, stateGated:
		return ondisk.PrioMetadata
	}
	return ondisk.PrioInitial - t.age(s)
}

// A hand goes round the buckets that may be picked.
//
// LRU is the kernel's score, (prio - lowest + (32768 - lowest)/8) * live sectors, lowest first, but without a
// scan over all buckets. When a batch begins, samples from all over the device say what a low score is: the
// threshold is such that one of eight is no higher. Then the hand goes on from where it was, and takes what it
// finds below the threshold. So a batch costs a few looks for each bucket picked, however many buckets there are,
// and the hand gets past a region that is young all over: neighbours were often filled together. Each time that
// it has come round within one batch the share doubles, so it ends. With the age counted down from 32768, the
// score is (oldest - age + oldest/8) * live, where oldest is the greatest age among the samples.
type hand struct {
	at [tiers]uint32
	by [tiers]criterion // of the tiers of clean buckets

	sampled bool // since FillBatch looked
}

// A criterion is what scores low in one batch.
type criterion struct {
	oldest    uint16
	threshold uint64
	share     int // of the samples, in parts of samples
}

const samples = 64

func (t *Table) score(w word, s side, oldest uint16) uint64 {
	age := min(t.age(s), oldest)
	// One more, so that live sectors count also when all are of one age.
	return uint64(oldest-age+oldest/8+1) * uint64(w.live())
}

// sample sets a tier's criterion, for share of samples, and at least twice as many buckets as are wanted.
func (t *Table) sample(tr tier, share int) {
	set := &t.index[tr]
	if set.count == 0 || t.opt.Policy == ondisk.FIFO || t.opt.Policy == ondisk.Random {
		return
	}
	var found [samples]uint32
	var scores [samples]uint64
	c := criterion{share: max(share, min(2*samples*t.batch.want/set.count, samples))}
	part := uint32(len(t.entries)/samples) + 1
	for i := range found {
		found[i], _, _ = set.around(uint32(i)*part + t.hand.at[tr]%part)
		c.oldest = max(c.oldest, t.age(side(t.entries[found[i]].side)))
	}
	for i, b := range found {
		w, s := t.get(b)
		scores[i] = t.score(w, s, c.oldest)
	}
	slices.Sort(scores[:])
	if c.threshold = scores[min(c.share, samples)-1]; c.share >= samples {
		c.threshold = math.MaxUint64
	}
	t.hand.by[tr] = c
	t.hand.sampled = true
}

// choose looks at one bucket of a tier that is not empty, and says whether to take it.
func (t *Table) choose(tr tier) (b uint32, take bool) {
	h := &t.hand
	at := h.at[tr]
	clean := tr == cleanLow || tr == cleanHigh
	if clean {
		t.stats.Examined++
		if t.opt.Policy == ondisk.Random {
			at = uint32(t.run.Uint64N(uint64(len(t.entries))))
		}
	}
	b, wrapped, _ := t.index[tr].around(at)
	h.at[tr] = b + 1 // past the last one: around begins again
	if !clean || t.opt.Policy == ondisk.FIFO || t.opt.Policy == ondisk.Random {
		return b, true
	}
	if c := &h.by[tr]; wrapped || c.share == 0 {
		t.sample(tr, max(2*c.share, samples/8))
	}
	w, s := t.get(b)
	return b, t.score(w, s, h.by[tr].oldest) <= h.by[tr].threshold
}

// SetPolicy changes what picks among clean buckets.
func (t *Table) SetPolicy(p ondisk.Replacement) { t.opt.Policy = p }
