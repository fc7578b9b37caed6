package journal

import (
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// An entry without keys says only where the roots are and what is needed. When the ring has no place for it, the newest
// entry is amended instead: its header is written anew, with its seq and its keys as they are. The header has 240 bytes
// and lies at the beginning of a sector, and all else in the entry stays: so it is one sector that is written, which a power
// cut leaves old or new and never torn. Either is a whole entry, and the set is as it was, or as it is to be.
//
// So neither roots nor gens ever wait for room, however full the ring is and whoever left it so: starts that are cut
// short, one after the other, take no more room than the first one does, and what pins the oldest entries can
// always be written.
//
// In memory an amendment is an entry like any other, with a seq of its own, that of the open entry: who waits
// for it waits for that. On disk its seq is that of the entry that it amends.

// A place is where the newest entry lies.
type place struct {
	seq   uint64 // in memory; later ones have amended it
	off   int64  // bytes on the device
	bytes int    // header and keys
}

// A numbering says what the seqs in memory are on disk. At the beginning they are the same.
type numbering struct {
	amended []uint64 // seqs in memory of amendments, in order
	before  uint64   // how many there were before these
}

// disk returns the seq on disk of the entry seq, which none that was forgotten may follow.
func (n *numbering) disk(seq uint64) uint64 {
	i, found := slices.BinarySearch(n.amended, seq)
	if found {
		i++
	}
	return seq - n.before - uint64(i)
}

// forget drops what is not needed for entries from seq on.
func (n *numbering) forget(seq uint64) {
	i := 0
	for i < len(n.amended) && n.amended[i] <= seq {
		i++
	}
	n.before += uint64(i)
	n.amended = slices.Delete(n.amended, 0, i)
}

// amendableLocked reports whether the newest entry can be amended now: nothing is in flight. last is the oldest pin.
func (j *Journal) amendableLocked(last uint64) bool {
	return j.words == 0 && j.placed.seq != 0 && j.seq-min(last, j.placed.seq) < pinTableSize-1
}

// amendedLastLocked returns the last_seq that an amendment has: what stands in its place is replayed in any case.
func (j *Journal) amendedLastLocked(last uint64) uint64 { return min(last, j.placed.seq) }

// amendLocked closes the open entry, which has no keys, in the place of the newest, and opens the next.
func (j *Journal) amendLocked() {
	last := j.amendedLastLocked(j.OldestPinLocked())
	j.renum.forget(last)
	j.renum.amended = append(j.renum.amended, j.seq)
	f := &j.flight
	f.seq, f.set = j.seq, j.headLocked(last)
	f.set.Seq = j.number - 1
	f.set.Data = j.buf.Data[ondisk.JSetHeaderBytes:j.placed.bytes]
	f.pos, f.off, f.amends = j.pos, j.placed.off, true
	f.pos.oldest = j.ring.oldestNeeded(j.pos, last)
	f.lastDurable = j.lastSeq
	j.flying = true

	j.pos, j.lastSeq = f.pos, last
	j.seq++ // in the same slot of the mapping, which has no keys
	j.grantLocked()
}
