package bucket

import "math/bits"

// Buckets with dirty data are known by how much of them is dirty, in eighths, rounded up: what is nearly empty of it can
// be moved together with others', which makes whole buckets of the rest. What is clean in such a bucket need not be moved:
// it can be evicted. Those of up to seven eighths have a bit each, and all are counted.
const fills = 8

// fill returns how many eighths of a bucket are dirty, rounded up: 0 where nothing is, and where somebody holds the bucket.
func (t *Table) fill(w word, s side) int {
	if w.dirty() == 0 || w.pins() != 0 || s.state() != stateData {
		return 0
	}
	return t.eighths(w.dirty())
}

func (t *Table) eighths(dirty uint32) int { return int(min((dirty-1)>>t.fillShift+1, fills)) }

// fillShift is such that an eighth of a bucket has 1 << fillShift sectors; buckets are powers of two.
func fillShift(bucketSectors uint32) uint { return uint(max(bits.Len32(bucketSectors)-1-3, 0)) }

func (t *Table) setFill(b uint32, from, to int) {
	if from == to {
		return
	}
	t.filled[from]--
	t.filled[to]++
	if was, is := 0 < from && from < fills, 0 < to && to < fills; was && !is {
		t.sparse.remove(b)
	} else if is && !was {
		t.sparse.add(b)
	}
}

// Sparse returns how many buckets have exactly that many eighths of dirty data, rounded up, 1 to 8, and nobody holds them.
func (t *Table) Sparse(eighths int) int { return t.filled[eighths] }

// EachSparse calls fn with buckets from bucket from on that have at most that many eighths of dirty data, 1 to 7, until it
// returns false. It looks at a bounded number, and returns where to go on, and whether it has come to the end.
func (t *Table) EachSparse(from uint32, eighths int, fn func(b, dirty uint32) bool) (next uint32, done bool) {
	for range lookSlice {
		b, ok := t.sparse.next(from)
		if !ok {
			return 0, true
		}
		from = b + 1
		if w, s := t.get(b); t.fill(w, s) <= eighths && !fn(b, w.dirty()) {
			return from, false
		}
	}
	return from, false
}

// Movable returns how many buckets Allocate would hand out for moving, one after the other.
func (t *Table) Movable() int {
	n := min(t.unused()-t.spare(), t.reusable()-t.spare()-int(t.geo.KernelFreeInc), t.pools[poolCommon].n+t.pools[poolMoving].n)
	return max(n, 0)
}
