package bucket

import (
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
	maxTicks = 8                  // a call makes up for
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
	for i := 0; i < maxTicks && c.budget.Load() >= c.per; i++ {
		c.budget.Add(-c.per)
		now := uint16(c.now.Add(1))
		for range len(t.entries)/trimPart + 1 {
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
// scan over all buckets: the hand takes what scores no more than a threshold, a part of the greatest possible
// score. The threshold follows what the hand meets: too few takes in a stretch, and it rises, too many, and it
// sinks. So a bucket is taken when the hand comes by and finds it among the lower ones, and a batch costs a few
// looks for each bucket picked, however many buckets there are. With the age counted down from 32768, the score
// is (oldest - age + oldest/8) * live, where oldest is the greatest age the hand met in this turn or the last.
type hand struct {
	at     [tiers]uint32
	oldest [2]uint16 // greatest age met in the last turn, and in this one
	level  uint32    // threshold, in parts of levels
	looked uint32    // in this stretch
	taken  uint32
}

const (
	levels  = 64
	stretch = 256
)

// choose looks at one bucket of a tier that is not empty, and says whether to take it.
func (t *Table) choose(tr tier) (b uint32, take bool) {
	h := &t.hand
	set := &t.index[tr]
	at := h.at[tr]
	clean := tr == cleanLow || tr == cleanHigh
	if clean {
		t.stats.Examined++
		if t.opt.Policy == ondisk.Random {
			at = uint32(t.run.Uint64N(uint64(len(t.entries))))
		}
	}
	b, wrapped, _ := set.around(at)
	h.at[tr] = b + 1 // past the last one: around begins again
	if !clean || t.opt.Policy == ondisk.FIFO || t.opt.Policy == ondisk.Random {
		return b, true
	}
	w, s := t.get(b)
	age := t.age(s)
	if wrapped {
		h.oldest = [2]uint16{h.oldest[1], 0}
	}
	h.oldest[1] = max(h.oldest[1], age)
	oldest := uint32(max(h.oldest[0], h.oldest[1]))
	base := oldest/8 + 1 // one more, so that live counts also when all are of one age
	score := uint64(oldest-uint32(age)+base) * uint64(min(w.live(), t.geo.BucketSectors))
	top := uint64(oldest+base) * uint64(t.geo.BucketSectors)
	take = score*levels <= top*uint64(h.level)

	h.looked++
	if take {
		h.taken++
	}
	// A small set is over before a stretch is.
	if n := min(stretch, uint32(set.count/4)+1); h.looked >= n {
		switch {
		case h.taken*16 < h.looked:
			h.level = min(h.level+1+h.level/8, levels)
		case h.taken*4 > h.looked && h.level > 0:
			h.level--
		}
		h.looked, h.taken = 0, 0
	}
	return b, take
}

// SetPolicy changes what picks among clean buckets.
func (t *Table) SetPolicy(p ondisk.Replacement) { t.opt.Policy = p }
