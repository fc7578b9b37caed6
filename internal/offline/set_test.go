package offline

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// threeLevels is a set with a tree of three levels and eight leaves.
func threeLevels(t testing.TB) *build {
	b := newBuild(t)
	var nodes []ondisk.Key
	for half := range uint64(2) {
		var leaves []ondisk.Key
		for i := range uint64(4) {
			n := 4*half + i
			to := Pos{0, 200 * (n + 1)}
			if n == 7 {
				to = top
			}
			leaves = append(leaves, b.leaf(to, keySet(dirtyKey(200*n+16, 8, dataAt(n, 0)))))
		}
		nodes = append(nodes, b.node(keyPos(&leaves[3]), []bset{keySet(leaves...)}))
	}
	b.root(b.interior(keySet(nodes...)), 2)
	return b
}

// Nodes come level by level, in the order of their keys, and progress goes up to their number.
func TestNodesInOrder(t *testing.T) {
	b := threeLevels(t)
	b.seal()
	var levels []int
	var last NodeRef
	var done, known int64
	s, err := Open(context.Background(), b.cache, Options{
		Parallel: 3,
		EachNode: func(ref NodeRef, n *ondisk.Node) {
			levels = append(levels, ref.Level)
			if len(n.Sets) != 1 || n.Err != nil {
				t.Errorf("%v: %+v", ref, n)
			}
			if last.Level == ref.Level && last.Range.To != ref.Range.From {
				t.Errorf("%v follows %v", ref.Range, last.Range)
			}
			last = ref
		},
		Progress: func(n, of int64) {
			if n != done+1 || of < known || n > of {
				t.Errorf("%d of %d after %d of %d", n, of, done, known)
			}
			done, known = n, of
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if want := []int{2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0}; !slices.Equal(levels, want) || done != 11 || known != 11 || s.Stats.Nodes != 11 || s.Stats.Depth != 3 {
		t.Errorf("levels %v, progress %d of %d, %+v", levels, done, known, s.Stats)
	}
}

// Open and Check end soon after their context, whatever they are at.
func TestOpenEndsWithItsContext(t *testing.T) {
	b := threeLevels(t)
	b.journal(dirtyKey(16, 8, dataAt(9, 0)))
	b.seal()
	b.cache.Add(blockdev.Fault{Hang: 20 * time.Millisecond})
	for _, limit := range []time.Duration{0, 10 * time.Millisecond, 30 * time.Millisecond, 70 * time.Millisecond, 110 * time.Millisecond, 150 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		begin := time.Now()
		s, _, err := Check(ctx, b.cache, nil, CheckOptions{Data: true, Options: Options{Parallel: 1}})
		if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took > limit+5*time.Second {
			t.Errorf("%v: ended after %v with %v", limit, took, err)
		}
		if s == nil || s.Report == nil {
			t.Fatal("no set")
		}
		s.Close()
		cancel()
	}
}

// However much is wrong, the report stays small, and counts all.
func TestReportIsBounded(t *testing.T) {
	var r Report
	if _, found := r.Worst(); found {
		t.Error("an empty report has a worst finding")
	}
	for i := range int64(1000) {
		r.add(KeyBad, "cache", i, 1, "number %d", i)
		r.tally(KeyStale, "cache", i, 1, "number %d", i)
	}
	var bad, stale, count int64
	for _, f := range r.Findings() {
		switch f.Code {
		case KeyBad:
			bad++
			count += f.Count
		case KeyStale:
			stale++
			if f.Count != 1000 || f.Sector != 0 {
				t.Errorf("%+v", f)
			}
		}
	}
	if bad != findingsPerCode || count != 1000 || stale != 1 {
		t.Errorf("%d findings that count %d, and %d", bad, count, stale)
	}
	if worst, found := r.Worst(); !found || worst != AtRisk {
		t.Errorf("worst is %v", worst)
	}
}

// Two pieces of metadata in one bucket: one of them is not what it should be.
func TestMetadataInOneBucket(t *testing.T) {
	for name, tt := range map[string]struct {
		build func(b *build)
		at    func(b *build) uint64
	}{
		"uuid array and prio set": {
			func(b *build) {
				b.header.UUIDBucket.P[0] = ondisk.MakePtr(1, b.geo.BucketStart(b.prios[0]), 0)
				b.disks[0].super.SetState(ondisk.StateNone)
			},
			func(b *build) uint64 { return b.geo.BucketStart(b.prios[0]) },
		},
		"root and journal": {
			func(b *build) {
				b.next = b.super.D[3]
				b.onlyLeaf()
				b.then(func() { // what seal cleared
					raw := b.cache.at(b.geo.BucketStart(b.super.D[3]), 16)
					ondisk.EncodeBSet(raw, b.geo.BSetMagic(), 1, b.header.Root.P[0], nil)
				})
			},
			func(b *build) uint64 { return b.geo.BucketStart(b.super.D[3]) },
		},
	} {
		b := newBuild(t)
		tt.build(b)
		s, _ := b.check()
		i := slices.IndexFunc(s.Report.Findings(), func(f Finding) bool { return f.Code == BucketTwoRoles })
		if i < 0 || s.Report.Findings()[i].Sector != int64(tt.at(b)) {
			t.Errorf("%s: %v", name, s.Report.Findings())
		}
	}
}

// Keys of an entry can be read again, until the device fails.
func TestEntryKeys(t *testing.T) {
	b := newBuild(t)
	list := manyKeys(30, 16, 0)
	b.journal(list...)
	s := b.open()
	got, err := s.EntryKeys(s.Needed[0])
	if err != nil || !slices.Equal(got, list) {
		t.Errorf("%v, %v", got, err)
	}
	b.cache.breaks(s.Needed[0].Sector, 1)
	if _, err := s.EntryKeys(s.Needed[0]); !errors.Is(err, unix.EIO) {
		t.Error(err)
	}
}
