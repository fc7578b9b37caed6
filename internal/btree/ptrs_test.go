package btree

import (
	"slices"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// Whatever a node has of each kind and wherever a call ends, each pointer is shown once, in order.
func TestPtrsInParts(t *testing.T) {
	for kids := range 4 {
		for dead := range 3 {
			for stale := range 3 {
				n, at := &Node{ref: Ref{Level: 1, High: MaxPos}}, uint64(0)
				ptr := func() ondisk.Ptr { at += 16; return ondisk.MakePtr(1, at, 0) }
				var keys, others []ondisk.Ptr
				for i := range kids {
					n.kids = append(n.kids, child{inode: 1, end: uint64(i+1) * 8, ptr: ptr()})
					keys = append(keys, n.kids[i].ptr)
				}
				if kids > 0 {
					n.kids[kids-1].inode, n.kids[kids-1].end = MaxPos.Inode, MaxPos.Sector
				}
				for range dead {
					n.dead = append(n.dead, ptr())
				}
				for range stale {
					n.link.stale = append(n.link.stale, ptr())
				}
				others = slices.Concat(n.dead, n.link.stale)
				for limit := 1; limit < 9; limit++ {
					var got []ondisk.Ptr
					part := func(fn func(see func(p ondisk.Ptr)) (more bool)) {
						got = nil
						for more := true; more; {
							before := len(got)
							more = fn(func(p ondisk.Ptr) { got = append(got, p) })
							if len(got)-before > limit {
								t.Fatalf("%d in a call, limit %d", len(got)-before, limit)
							}
						}
					}
					from := 0
					part(func(see func(p ondisk.Ptr)) bool {
						from = n.OtherPtrs(from, limit, see)
						return from > 0
					})
					if !slices.Equal(got, others) {
						t.Fatalf("%d dead, %d stale, %d at a time: %v, want %v", dead, stale, limit, got, others)
					}
					var pos Pos
					part(func(see func(p ondisk.Ptr)) bool {
						pos = n.KeyPtrs(pos, limit, see)
						return pos != n.ref.High
					})
					if !slices.Equal(got, keys) {
						t.Fatalf("%d children, %d at a time: %v, want %v", kids, limit, got, keys)
					}
				}
			}
		}
	}
}

// A pointer that becomes dead between two calls is shown by a call that begins again where the last one ended; one whose list
// has gone leaves none out before it.
func TestPtrsOfANodeThatChanges(t *testing.T) {
	n, at := &Node{ref: Ref{Level: 1, High: MaxPos}}, uint64(0)
	ptr := func() ondisk.Ptr { at += 16; return ondisk.MakePtr(1, at, 0) }
	for range 4 {
		n.dead = append(n.dead, ptr())
		n.link.stale = append(n.link.stale, ptr())
	}
	want := slices.Concat(n.dead, n.link.stale)
	var got []ondisk.Ptr
	see := func(p ondisk.Ptr) { got = append(got, p) }
	from := n.OtherPtrs(0, 5, see)
	n.dead = append(n.dead, ptr())
	for from != 0 {
		from = n.OtherPtrs(from, 2, see)
	}
	for _, p := range want {
		if !slices.Contains(got, p) {
			t.Errorf("%v was left out of %v", p, got)
		}
	}
	from, got = n.OtherPtrs(0, 7, see), nil
	n.link.stale = nil
	if from = n.OtherPtrs(from, 100, see); from != 0 || len(got) != 0 {
		t.Errorf("goes on at %d with %v", from, got)
	}
}
