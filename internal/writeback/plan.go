package writeback

import (
	"sort"

	"github.com/ubcache/ubcache/internal/ondisk"
)

const (
	maxRun   = 1 << 20 / ondisk.SectorSize // sectors of one write to the backing device
	minPiece = 4096 / ondisk.SectorSize    // sectors; halves get no smaller
)

// An Extent is a dirty range [Start, End) of a volume, in sectors of its backing device, and its place in the cache.
type Extent struct {
	Start, End uint64
	Ptr        ondisk.Ptr
}

// A Run is the range [Start, End) of one write to the backing device: neighbouring extents, all of which it covers,
// except perhaps the front of the first and the back of the last.
type Run struct {
	Start, End uint64
	extents    []Extent
}

// Len returns the number of pieces.
func (r *Run) Len() int { return len(r.extents) }

// Piece returns the part of extent i that lies in the run, its pointer moved along.
func (r *Run) Piece(i int) Extent {
	e := r.extents[i]
	if e.Start < r.Start {
		e.Ptr = e.Ptr.Advance(r.Start - e.Start)
		e.Start = r.Start
	}
	e.End = min(e.End, r.End)
	return e
}

// MaxRun returns the most sectors that one write has, for a backing device's MaxTransfer and block in bytes: a multiple
// of the block.
func MaxRun(maxTransfer, block int) uint64 {
	n := min(maxRun, maxTransfer/ondisk.SectorSize)
	b := block / ondisk.SectorSize
	return uint64(max(n/b, 1) * b)
}

// A Plan groups extents into runs. Its zero value is ready, and used again it does not allocate.
type Plan struct{ runs []Run }

// Group returns the runs of extents that are in key order and do not overlap, each of at most limit sectors. An extent
// is in one run if it fits in one, so that one write makes its key clean; a longer one is cut every limit sectors. The
// runs refer to extents, and are valid until the next call.
func (p *Plan) Group(extents []Extent, limit uint64) []Run {
	p.runs = p.runs[:0]
	if len(extents) == 0 {
		return nil
	}
	from, start := 0, extents[0].Start // of the run that is being made: first extent, first sector
	for i := range extents {
		e := &extents[i]
		if i > from && (e.Start != extents[i-1].End || e.End-start > limit) {
			p.runs = append(p.runs, Run{start, extents[i-1].End, extents[from:i]})
			from, start = i, e.Start
		}
		for ; e.End-start > limit; start += limit {
			p.runs = append(p.runs, Run{start, start + limit, extents[i : i+1]})
		}
	}
	last := len(extents) - 1
	p.runs = append(p.runs, Run{start, extents[last].End, extents[from:]})
	return p.runs
}

// Bisect returns the two halves of a run that the backing device refused, whose block is given in bytes. They meet
// where a piece of 4 KiB, or a block if that is more, begins; ok is false if the run lies in one such piece. So a write
// that is too large becomes small enough, and of a range with a bad place no more than its piece is left. It does not
// allocate.
func (r *Run) Bisect(block int) (lo, hi Run, ok bool) {
	piece := uint64(max(minPiece, block/ondisk.SectorSize))
	mid := (r.Start + r.End) / 2 / piece * piece
	if mid <= r.Start {
		mid += piece
	}
	if mid >= r.End {
		return Run{}, Run{}, false
	}
	n := sort.Search(len(r.extents), func(i int) bool { return r.extents[i].End > mid }) // has the first sector of hi
	hi = Run{mid, r.End, r.extents[n:]}
	if r.extents[n].Start < mid {
		n++
	}
	return Run{r.Start, mid, r.extents[:n]}, hi, true
}
