package btree

import (
	"slices"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// OtherPtrsFrom shows what OtherPtrs does, in the same order, whatever there is of each kind and wherever a call ends.
func TestOtherPtrsInParts(t *testing.T) {
	for kids := range 4 {
		for dead := range 3 {
			for stale := range 3 {
				n, at := &Node{}, uint64(0)
				ptr := func() ondisk.Ptr { at += 16; return ondisk.MakePtr(1, at, 0) }
				for range kids {
					n.kids = append(n.kids, child{ptr: ptr()})
				}
				for range dead {
					n.dead = append(n.dead, ptr())
				}
				for range stale {
					n.link.stale = append(n.link.stale, ptr())
				}
				var want []ondisk.Ptr
				n.OtherPtrs(func(p ondisk.Ptr) { want = append(want, p) })
				for limit := 1; limit < 9; limit++ {
					var got []ondisk.Ptr
					for from, more := 0, true; more; more = from > 0 {
						before := len(got)
						from = n.OtherPtrsFrom(from, limit, func(p ondisk.Ptr) { got = append(got, p) })
						if len(got)-before > limit {
							t.Fatalf("%d in a call, limit %d", len(got)-before, limit)
						}
					}
					if !slices.Equal(got, want) {
						t.Fatalf("%d children, %d dead, %d stale, %d at a time: %v, want %v", kids, dead, stale, limit, got, want)
					}
				}
			}
		}
	}
}
