package offline

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// drawExtents makes extents that overlap a lot, on two inodes of 64 sectors.
func drawExtents(t *rapid.T, label string) []Extent {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Extent {
		e := Extent{
			Inode: rapid.Uint32Range(0, 1).Draw(t, "inode"), Start: rapid.Uint64Range(0, 60).Draw(t, "start"),
			Size: rapid.Uint16Range(1, 16).Draw(t, "size"),
		}
		if rapid.Bool().Draw(t, "pointer") {
			e.flags = extPtr
			e.P = ondisk.MakePtr(1, rapid.Uint64Range(0, 1<<20).Draw(t, "sector"), 0)
		}
		return e
	}), 0, 40).Draw(t, label)
}

type sectorMap [2][80]struct {
	p   ondisk.Ptr
	has bool
}

// paint is the model: a map of sectors, written one after the other.
func (m *sectorMap) paint(list []Extent) {
	for _, e := range list {
		for s := e.Start; s < e.End(); s++ {
			c := &m[e.Inode][s]
			c.has, c.p = true, 0
			if e.flags&extPtr != 0 {
				c.p = e.P.Advance(s - e.Start)
			}
		}
	}
}

func sortedDisjoint(in []Extent) bool {
	for i := 1; i < len(in); i++ {
		if in[i-1].end().Compare(in[i].pos()) > 0 {
			return false
		}
	}
	return true
}

func sameAs(t *rapid.T, want *sectorMap, got []Extent) {
	if !sortedDisjoint(got) {
		t.Fatalf("overlap or disorder: %v", got)
	}
	for _, e := range got {
		if e.Size == 0 {
			t.Fatalf("empty extent in %v", got)
		}
	}
	var m sectorMap
	m.paint(got)
	if m != *want {
		t.Fatalf("sectors differ: %v", got)
	}
}

func TestNewestWins(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := drawExtents(t, "in")
		var want sectorMap
		want.paint(in)
		sameAs(t, &want, newestWins(nil, in))
	})
}

func TestOverlay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		base, newer := newestWins(nil, drawExtents(t, "base")), newestWins(nil, drawExtents(t, "newer"))
		var want sectorMap
		want.paint(base)
		want.paint(newer)
		got := overlay(nil, base, newer)
		sameAs(t, &want, got)

		pos := Pos{rapid.Uint32Range(0, 1).Draw(t, "inode"), rapid.Uint64Range(0, 80).Draw(t, "sector")}
		i := search(got, pos)
		for j := range got {
			if after := got[j].end().Compare(pos) > 0; after != (j >= i) {
				t.Fatalf("search %v gave %d of %v", pos, i, got)
			}
		}
	})
}

// Case 21: an older extent of 128 sectors under newer ones, at each place where they can lie.
func TestOverlappingExtents(t *testing.T) {
	old := Extent{Start: 1000, Size: 128, P: ondisk.MakePtr(1, 5000, 0), flags: extPtr}
	for _, tt := range []struct {
		name  string
		newer Extent
		want  []uint64 // start, end, cache sector, of each extent
	}{
		{"in the middle", Extent{Start: 1060, Size: 8, P: ondisk.MakePtr(1, 9000, 0), flags: extPtr}, []uint64{1000, 1060, 5000, 1060, 1068, 9000, 1068, 1128, 5068}},
		{"at the start", Extent{Start: 1000, Size: 8, P: ondisk.MakePtr(1, 9000, 0), flags: extPtr}, []uint64{1000, 1008, 9000, 1008, 1128, 5008}},
		{"at the end", Extent{Start: 1120, Size: 8, P: ondisk.MakePtr(1, 9000, 0), flags: extPtr}, []uint64{1000, 1120, 5000, 1120, 1128, 9000}},
		{"whole", Extent{Start: 990, Size: 200, P: ondisk.MakePtr(1, 9000, 0), flags: extPtr}, []uint64{990, 1190, 9000}},
	} {
		for _, dirty := range []uint8{0, extDirty} {
			o, n := old, tt.newer
			o.flags |= dirty
			n.flags |= dirty ^ extDirty
			for how, got := range [][]Extent{newestWins(nil, []Extent{o, n}), overlay(nil, []Extent{o}, []Extent{n})} {
				if len(got) != len(tt.want)/3 {
					t.Fatalf("%s: %v", tt.name, got)
				}
				for i, e := range got {
					w := tt.want[3*i:]
					fromNew := e.P.Sector() >= 9000
					if e.Start != w[0] || e.End() != w[1] || e.P.Sector() != w[2] || e.Dirty() != (fromNew == (dirty == 0)) {
						t.Errorf("%s (%d): %d: %+v, want %v", tt.name, how, i, e, w[:3])
					}
				}
			}
		}
	}
}

func BenchmarkNewestWins(b *testing.B) {
	// A node of 256 KiB as it is before its next rewrite: one large set and 40 small ones.
	var in []Extent
	for i := range 8000 {
		in = append(in, Extent{Start: uint64(i) * 16, Size: 8, flags: extPtr})
	}
	for s := range 40 {
		for i := range 60 {
			in = append(in, Extent{Start: uint64(i*133*16 + s*32), Size: 16, flags: extPtr})
		}
	}
	var out []Extent
	for b.Loop() {
		out = newestWins(out[:0], in)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(in)), "ns/key")
}
