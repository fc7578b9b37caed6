package journal

import "fmt"

// maxSpan bounds newest.seq - last_seq: the kernel's table of pins has 32767 places (F 6.6). spanKept of them are
// left to entries without reserved keys.
const (
	maxSpan  = 32766
	spanKept = 1024

	pinTableSize = 1 << 16 // a power of two, larger than maxSpan: so many more amendments can be made
)

// A Pin keeps the entry Seq, and all behind it, in the journal: last_seq does not pass it. Whatever holds keys
// that are journalled and not yet durable elsewhere embeds one: a leaf, the root, a node being written. The zero
// value holds nothing. A Pin is a plain number; it belongs to whoever embeds it and is guarded by the set's lock.
//
// How a leaf uses its pins, all under the lock:
//
//	insert   seq := AppendLocked(...); PinLocked(&leaf.pin, seq)     keeps the older of the two
//	write    MovePinLocked(&leaf.writing, &leaf.pin)                 then, off the lock, the append
//	written  UnpinLocked(&leaf.writing)
//	replaced MovePinLocked(&copy.pin, &leaf.pin)                     until copy and its parent's pointer are durable
//
// A leaf that was written has its next pin from a later entry than any leaf pinned before it, so whoever keeps
// dirty leaves in a list in the order in which they became dirty has the oldest pin at its head.
type Pin struct{ seq uint64 }

// Seq returns the entry that is pinned, 0 if none.
func (p *Pin) Seq() uint64 { return p.seq }

// Held reports whether p pins anything.
func (p *Pin) Held() bool { return p.seq != 0 }

// A pinTable counts the pins of each entry from tail to the open one.
type pinTable struct {
	count [pinTableSize]uint32
	tail  uint64 // no older entry is pinned; never decreases
}

func (t *pinTable) at(seq uint64) *uint32 { return &t.count[seq%pinTableSize] }

// advance moves the tail to the oldest pinned entry, at most to open.
func (t *pinTable) advance(open uint64) {
	for t.tail < open && *t.at(t.tail) == 0 {
		t.tail++
	}
}

// PinLocked makes p hold entry seq, or go on holding what it holds if that is older. The entry must be the open
// one, or pinned by another Pin, or, during replay, one of those being replayed. The set's lock is held.
func (j *Journal) PinLocked(p *Pin, seq uint64) {
	if p.seq != 0 && p.seq <= seq {
		return
	}
	if seq < j.pins.tail || seq > j.seq {
		panic(fmt.Sprintf("journal: pin of entry %d, but %d is the oldest that is kept and %d is open", seq, j.pins.tail, j.seq))
	}
	*j.pins.at(seq)++
	old := p.seq
	p.seq = seq
	j.unpinLocked(old)
}

// UnpinLocked lets go of what p holds, if anything. The set's lock is held.
func (j *Journal) UnpinLocked(p *Pin) {
	old := p.seq
	p.seq = 0
	j.unpinLocked(old)
}

// MovePinLocked gives what from holds to the Pin to, which keeps the older of both. The set's lock is held.
func (j *Journal) MovePinLocked(to, from *Pin) {
	if from.seq != 0 {
		j.PinLocked(to, from.seq)
		j.UnpinLocked(from)
	}
}

func (j *Journal) unpinLocked(seq uint64) {
	if seq == 0 {
		return
	}
	n := j.pins.at(seq)
	if *n == 0 || seq < j.pins.tail {
		panic(fmt.Sprintf("journal: entry %d is unpinned more often than pinned", seq))
	}
	*n--
	if *n == 0 && j.blocked {
		j.work.Signal()
	}
}

// OldestPinLocked returns the oldest entry that is pinned, or the open one. The set's lock is held.
func (j *Journal) OldestPinLocked() uint64 {
	j.pins.advance(j.seq)
	return j.pins.tail
}

// ReplayedLocked says that the keys of all entries up to seq have been inserted again, and are pinned by the leaves
// that hold them where that is still needed. The set's lock is held.
func (j *Journal) ReplayedLocked(seq uint64) {
	if !j.replay.Held() || seq < j.replay.seq {
		return
	}
	old := j.replay
	j.replay = Pin{}
	if seq < j.replayEnd {
		j.PinLocked(&j.replay, seq+1)
	}
	j.UnpinLocked(&old)
}
