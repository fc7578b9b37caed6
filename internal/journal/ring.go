package journal

import (
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A ring knows which bucket holds which entries, and decides where the next one goes.
//
//	          oldest needed            newest          hold: not entered
//	              v                      v                   v
//	+-------+-------+-------+-------+-------+-------+-------+
//	| free  | 70-75 | 76-80 | 81-88 | 89-91 | free  | free  |   last[i]: 75, 80, 88, 91
//	+-------+-------+-------+-------+-------+-------+-------+
//	                                  ^used   distance 4, more = 4 - hold
//
// Source: F 6.2, 6.6.
type ring struct {
	buckets   []uint64 // of the cache device, in ring order
	blocks    int      // in a bucket
	blockSize int      // bytes
	mostWords int      // keys of one entry: jset_max and the bucket bound it
	last      []uint64 // by ring index: greatest seq that the bucket holds, 0 for none
	hold      int      // distance that must be left after entering a bucket: 2 at run time, 1 during start
	kept      int      // blocks that only entries without reserved keys may take
	startKept int      // blocks that must be left for the next start, too, for keys to be admitted
}

// maxUrgent is how many urgent entries have places of their own in what is kept.
const maxUrgent = 4

// Values of hold.
const (
	holdStart = 1
	holdRun   = 2
)

func newRing(g *ondisk.Geometry, buckets []uint64) ring {
	r := ring{
		buckets: buckets, blockSize: g.BlockBytes(), last: make([]uint64, len(buckets)), hold: holdStart,
		blocks:    int(g.BucketSectors / g.BlockSectors),
		mostWords: (int(min(int64(ondisk.MaxJSetBytes), g.BucketBytes())) - ondisk.JSetHeaderBytes) / 8,
	}
	// What is kept has room for maxUrgent entries, also where reserved keys come in between and are spread over all of
	// them: each costs 240 bytes and a broken block, and there are 8 blocks of 512 bytes in the smallest usual
	// geometry. A larger ring keeps whole buckets. So does one with hardly any blocks in a
	// bucket, as far as it has buckets at all. Urgent entries beyond that number amend the newest.
	n := len(buckets)
	switch {
	case r.blocks < 16:
		r.kept = max(1, n/8, min(n-3, (maxUrgent+r.blocks-1)/r.blocks)) * r.blocks
		r.startKept = r.blocks
	case n < 8:
		r.kept, r.startKept = r.blocks/2, r.blocks/2
	default:
		r.kept, r.startKept = n/8*r.blocks, r.blocks/2
	}
	return r
}

// maxReserved is how many words may be reserved at once: they must fit into one fresh bucket beside what is kept.
func (r *ring) maxReserved() int {
	if r.kept >= r.blocks {
		return r.mostWords
	}
	return min(r.mostWords, ((r.blocks-r.kept)*r.blockSize-ondisk.JSetHeaderBytes)/8)
}

// blocksFor returns how many blocks an entry with that many words of keys takes.
func (r *ring) blocksFor(words int) int {
	return (ondisk.JSetHeaderBytes + 8*words + r.blockSize - 1) / r.blockSize
}

func (r *ring) next(i int) int { return (i + 1) % len(r.buckets) }

// A position is where the ring stands after some entry.
type position struct {
	cur    int // index of the bucket that holds the newest entry
	used   int // blocks of it that are taken
	oldest int // index of the oldest bucket with an entry that this one needs
}

// distance is the number of ring steps from the newest bucket to the oldest one needed.
func (r *ring) distance(p position) int {
	if p.cur == p.oldest {
		return len(r.buckets)
	}
	return (p.oldest - p.cur + len(r.buckets)) % len(r.buckets)
}

// A space is what is left to write to: blocks in the current bucket, and buckets that may be entered after it.
type space struct{ rest, more int }

func (r *ring) space(p position) space {
	return space{rest: r.blocks - p.used, more: max(0, r.distance(p)-r.hold)}
}

func (r *ring) free(s space) int { return s.rest + s.more*r.blocks }

// put takes from s what an entry of that many words takes.
func (r *ring) put(s space, words int) (space, bool) {
	need := r.blocksFor(words)
	switch {
	case need <= s.rest:
		s.rest -= need
	case s.more > 0:
		s = space{rest: r.blocks - need, more: s.more - 1}
	default:
		return s, false
	}
	return s, true
}

// after returns where the ring stands once an entry with that many words of keys and that last_seq has been
// written behind p; false if it cannot be written now.
//
// A bucket that is entered holds nothing that the last durable entry needs. How far it is to the oldest bucket needed
// is counted, as the kernel does, with what the entry itself needs: so where two steps are left, one that needs
// fewer buckets can always be written, and leaves two steps again. In the result, too, the buckets that lastSeq frees
// count as free: the entry behind this one is written only when this one is durable.
func (r *ring) after(p position, words int, lastSeq uint64) (position, bool) {
	need := r.blocksFor(words)
	own := p
	own.oldest = r.oldestNeeded(p, lastSeq)
	switch {
	case need <= r.blocks-p.used:
		p.used += need
	case r.distance(p) > 1 && r.distance(own) > r.hold:
		p.cur, p.used = r.next(p.cur), need
	default:
		return p, false
	}
	p.oldest = r.oldestNeeded(p, lastSeq)
	return p, true
}

// oldestNeeded moves p.oldest past the buckets whose entries are all older than seq.
func (r *ring) oldestNeeded(p position, seq uint64) int {
	for p.oldest != p.cur && r.last[p.oldest] < seq {
		p.oldest = r.next(p.oldest)
	}
	return p.oldest
}

// used returns how many blocks lie from the beginning of the oldest bucket to the newest entry's end.
func (r *ring) used(p position) int {
	return (p.cur-p.oldest+len(r.buckets))%len(r.buckets)*r.blocks + p.used
}

// capacity is what used would be if the ring were full but for the bucket that is left for the next start.
func (r *ring) capacity() int { return (len(r.buckets) - 1) * r.blocks }

// offset returns where on the device block of the ring's bucket i lies, in bytes.
func (r *ring) offset(g *ondisk.Geometry, i, block int) int64 {
	return int64(g.BucketStart(r.buckets[i]))*ondisk.SectorSize + int64(block)*int64(r.blockSize)
}

// restart returns what the next start finds left if the process dies while p is the durable position, once it has
// written what is not on disk: the keys of the entry in flight (flying words, negative if there is none) and those of the
// open entry. false: they have no place.
//
// This is the reserve of a start. It is the same whether it is the first start after that death or the hundredth: each
// goes on behind the newest entry, in the same bucket, and writes the mapping's entries one for one. So a start that is
// killed half way leaves the next one the rest of the same entries for the same places; once they are there, it leaves
// none. Whatever else a start writes has no keys, and needs no place at all if there is none: see Journal.amendLocked.
func (r *ring) restart(p position, flying, open int) (space, bool) {
	s, ok := space{rest: r.blocks - p.used, more: max(0, r.distance(p)-holdStart)}, true
	if flying >= 0 {
		s, ok = r.put(s, flying)
	}
	if ok && open > 0 {
		s, ok = r.put(s, open)
	}
	return s, ok
}
