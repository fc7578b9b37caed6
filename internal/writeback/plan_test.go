package writeback

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// extent returns one whose place in the cache is told by its first sector.
func extent(start, end uint64) Extent { return Extent{start, end, ondisk.MakePtr(7, 1<<20+start, 0)} }

// text returns runs as their pieces, "0-8-16 24-32", and fails the test if a pointer is not that of its piece, or the
// pieces do not fill the run.
func text(t *testing.T, runs ...Run) string {
	t.Helper()
	var all []string
	for _, r := range runs {
		at := r.Start
		s := fmt.Sprint(at)
		for i := range r.Len() {
			p := r.Piece(i)
			if want := extent(at, p.End); p != want || p.End <= at {
				t.Errorf("piece %d of %d-%d is %+v, want %+v", i, r.Start, r.End, p, want)
			}
			at = p.End
			s += fmt.Sprintf("-%d", at)
		}
		if at != r.End {
			t.Errorf("the pieces of %d-%d end at %d", r.Start, r.End, at)
		}
		all = append(all, s)
	}
	return strings.Join(all, " ")
}

func TestGroup(t *testing.T) {
	var p Plan
	for _, c := range []struct {
		name    string
		extents []Extent
		want    string
	}{
		{"none", nil, ""},
		{"one", []Extent{extent(8, 16)}, "8-16"},
		{"neighbours", []Extent{extent(8, 16), extent(16, 24), extent(24, 25)}, "8-16-24-25"},
		{"a gap", []Extent{extent(8, 16), extent(17, 24), extent(24, 32)}, "8-16 17-24-32"},
		{"as much as fits", []Extent{extent(0, 40), extent(40, 64)}, "0-40-64"},
		{"more", []Extent{extent(0, 40), extent(40, 65)}, "0-40 40-65"},
		{"more, and then again", []Extent{extent(0, 40), extent(40, 80), extent(80, 104)}, "0-40 40-80-104"},
		{"as long as a run", []Extent{extent(8, 72)}, "8-72"},
		{"longer", []Extent{extent(8, 73)}, "8-72 72-73"},
		{"twice as long", []Extent{extent(8, 136)}, "8-72 72-136"},
		{
			"longer, with neighbours",
			[]Extent{extent(0, 8), extent(8, 168), extent(168, 200), extent(200, 208)},
			"0-8 8-72 72-136 136-168-200 200-208",
		},
		{"longer, then a gap", []Extent{extent(8, 80), extent(88, 96)}, "8-72 72-80 88-96"},
	} {
		if got := text(t, p.Group(c.extents, 64)...); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestMaxRun(t *testing.T) {
	for _, c := range []struct {
		transfer, block int
		want            uint64
	}{
		{1 << 20, 512, 2048},
		{1 << 30, 4096, 2048},
		{64 << 10, 512, 128},
		{65<<10 + 511, 512, 130},
		{65 << 10, 4096, 128},
		{2048, 4096, 8},
	} {
		if got := MaxRun(c.transfer, c.block); got != c.want {
			t.Errorf("transfers of %d, blocks of %d: %d sectors, want %d", c.transfer, c.block, got, c.want)
		}
	}
}

func TestBisect(t *testing.T) {
	for _, c := range []struct {
		name    string
		extents []Extent
		block   int
		want    string // "" if there are no halves
	}{
		{"in the middle", []Extent{extent(0, 64)}, 512, "0-32 32-64"},
		{"between extents", []Extent{extent(0, 32), extent(32, 64)}, 512, "0-32 32-64"},
		{"in one of them", []Extent{extent(0, 8), extent(8, 56), extent(56, 64)}, 512, "0-8-32 32-56-64"},
		{"where a piece begins", []Extent{extent(3, 40)}, 512, "3-16 16-40"},
		{"two pieces", []Extent{extent(8, 24)}, 512, "8-16 16-24"},
		{"one piece", []Extent{extent(8, 12), extent(12, 16)}, 512, ""},
		{"part of a piece", []Extent{extent(9, 15)}, 512, ""},
		{"parts of two", []Extent{extent(7, 9)}, 512, "7-8 8-9"},
		{"a large block", []Extent{extent(0, 64)}, 16 << 10, "0-32 32-64"},
		{"one large block", []Extent{extent(32, 64)}, 16 << 10, ""},
		{"two", []Extent{extent(32, 96)}, 16 << 10, "32-64 64-96"},
	} {
		var p Plan
		runs := p.Group(c.extents, 2048)
		var got string
		if lo, hi, ok := runs[0].Bisect(c.block); ok {
			got = text(t, lo, hi)
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// write writes a run to a device that takes no more than so many sectors at once, and none of bad; it returns what was
// left and how many writes there were.
func write(r Run, most uint64, bad []uint64, block int) (left []Run, writes int) {
	if r.End-r.Start <= most && !slices.ContainsFunc(bad, func(s uint64) bool { return r.Start <= s && s < r.End }) {
		return nil, 1
	}
	lo, hi, ok := r.Bisect(block)
	if !ok {
		return []Run{r}, 1
	}
	a, n := write(lo, most, bad, block)
	b, m := write(hi, most, bad, block)
	return append(a, b...), 1 + n + m
}

// Case 13: a device that takes only short writes gets all, and of one with bad sectors only their 4 KiB are left.
func TestBisectLeavesTheBadPieces(t *testing.T) {
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var extents []Extent
		for at := rng.Uint64N(64); at < 4096; {
			end := at + 1 + rng.Uint64N(300)
			extents = append(extents, extent(at, end))
			at = end + rng.Uint64N(2)*rng.Uint64N(64)
		}
		var p Plan
		runs := p.Group(extents, 1024)
		bad := []uint64{rng.Uint64N(4096), rng.Uint64N(4096)}
		covered, refused := map[uint64]bool{}, map[uint64]bool{}
		for _, r := range runs {
			text(t, r)
			left, _ := write(r, 128, bad, 512)
			text(t, left...)
			if all, _ := write(r, 0, nil, 512); len(all) > 0 {
				text(t, all...) // every half there is
			}
			for s := r.Start; s < r.End; s++ {
				if covered[s] {
					t.Fatalf("seed %d: sector %d is in two runs", seed, s)
				}
				covered[s] = true
			}
			for _, l := range left {
				for s := l.Start; s < l.End; s++ {
					refused[s] = true
				}
			}
		}
		n := 0
		for _, e := range extents {
			for s := e.Start; s < e.End; s++ {
				n++
				atBad := slices.ContainsFunc(bad, func(b uint64) bool { return b/8 == s/8 && covered[b] })
				// A bad sector that is not dirty is never written; one in another run of the same piece is.
				if !covered[s] || refused[s] && !atBad {
					t.Fatalf("seed %d: sector %d: in a run %v, refused %v, bad %v", seed, s, covered[s], refused[s], bad)
				}
			}
		}
		for _, b := range bad {
			if covered[b] && !refused[b] {
				t.Fatalf("seed %d: bad sector %d was written", seed, b)
			}
		}
		if n != len(covered) {
			t.Fatalf("seed %d: runs of %d sectors, the extents have %d", seed, len(covered), n)
		}
	}
}

// A device that takes nothing costs two writes for each piece, less one.
func TestBisectEnds(t *testing.T) {
	var p Plan
	r := p.Group([]Extent{extent(0, 2048)}, 2048)[0]
	if left, writes := write(r, 0, nil, 512); len(left) != 256 || writes != 511 {
		t.Errorf("%d pieces left after %d writes, want 256 after 511", len(left), writes)
	}
}

func TestPlanDoesNotAllocate(t *testing.T) {
	var extents []Extent
	for i := range uint64(500) {
		extents = append(extents, extent(i*8, i*8+8-i%2))
	}
	var p Plan
	p.Group(extents, 2048)
	var sectors uint64
	n := testing.AllocsPerRun(10, func() {
		for _, r := range p.Group(extents, 2048) {
			for i := range r.Len() {
				e := r.Piece(i)
				sectors += e.End - e.Start
			}
			if lo, hi, ok := r.Bisect(512); ok {
				sectors += uint64(lo.Len() + hi.Len())
			}
		}
	})
	if n != 0 || sectors == 0 {
		t.Errorf("%v allocations", n)
	}
}
