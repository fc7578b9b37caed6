package btree

import (
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// emptied returns a rig whose tree of two levels has next to nothing in it.
func emptied(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, shapes[1])
	r.fill(1500)
	r.sync()
	for i := range r.inodes {
		r.insert(ondisk.NewInvalidation(uint32(i), r.sectors, uint32(r.sectors)), 0)
	}
	for i := range 20 {
		s := uint64(i+1) * r.sectors / 21
		r.insert(ondisk.NewExtent(0, s+1, 1, r.space(1), true), 0)
	}
	r.sync()
	if r.tree.Root().Level == 0 {
		t.Fatal("the root is a leaf from the beginning")
	}
	return r
}

// coalesce makes fewer of each level's nodes, and reports whether there are fewer now.
func (r *rig) coalesce() (fewer bool) {
	r.Helper()
	for level := range int(r.tree.Root().Level) {
		for p := (Pos{}); p != MaxPos; {
			n := r.node(level, p)
			p = n.ref.High
			for q := p; q != MaxPos && len(r.tree.Siblings(nil, n, 4)) < 4; q = r.node(level, q).ref.High {
				r.node(level, q)
			}
			list := r.tree.Siblings(nil, n, 4)
			p = list[len(list)-1].ref.High
			if len(list) > 1 && r.begin(list...) == Done {
				before := len(list)
				r.settle()
				fewer = fewer || len(r.tree.Siblings(nil, r.node(level, list[0].ref.Low), before)) < before
			}
		}
	}
	return fewer
}

// TestTreeBecomesLower coalesces all that can be, until the root is a leaf again; at each step the disk says the same.
func TestTreeBecomesLower(t *testing.T) {
	r := emptied(t)
	for range 50 {
		if r.tree.Root().Level == 0 {
			break
		}
		r.coalesce()
		r.compare()
		r.compareDisk()
		if !r.lower() {
			continue
		}
		r.compareDisk() // no entry names the new root
		leaf := r.node(0, Pos{})
		r.insert(ondisk.NewExtent(0, 5, 2, r.space(2), true), 0)
		if r.freeze(leaf) == Done { // an append to what is not linked
			r.finish(0)
		}
		r.compareDisk()
		r.settle()
		r.compare()
		r.compareDisk()
	}
	if r.tree.Root().Level != 0 {
		t.Errorf("the tree is still as high as %v", r.tree.Root())
	}
	if r.lowered == 0 {
		t.Error("it was never made lower")
	}
}

// TestLowerWaits asks for a lower tree where that has to wait.
func TestLowerWaits(t *testing.T) {
	r := emptied(t)
	if _, o := r.tree.Lower(); o != Nothing {
		t.Fatalf("with more children: %v", o)
	}
	for r.coalesce() {
	}
	root := r.node(int(r.tree.Root().Level), Pos{})
	if len(root.kids) != 1 {
		t.Fatalf("the root has %d children", len(root.kids))
	}
	child := r.node(root.Level()-1, Pos{})
	rw, o := r.tree.Begin(child)
	if o != Done {
		t.Fatal(o)
	}
	if _, o := r.tree.Lower(); o != Busy {
		t.Errorf("with a child that is rewritten: %v", o)
	}
	rw.Abort()
	if !r.lower() {
		t.Fatal("not made lower")
	}
	if _, o := r.tree.Begin(child); o != Busy {
		t.Errorf("rewrite of a root that no entry names: %v", o)
	}
	free := len(r.meta)
	r.rootDurable()
	if len(r.meta) != free+1 {
		t.Errorf("%d buckets free, %d before", len(r.meta), free)
	}
	r.compare()
	r.compareDisk()
}

// TestForget lets go of what was read to be looked at once, and of nothing that is needed.
func TestForget(t *testing.T) {
	r := newRig(t, shapes[1])
	r.fill(1500)
	r.sync()
	leaf := r.node(0, Pos{})
	r.tree.Forget(leaf)
	if !leaf.Gone() {
		t.Error("a leaf that can be read again is still there")
	}
	r.tree.Forget(leaf)
	r.insert(ondisk.NewExtent(0, 3, 2, r.space(2), true), 0)
	leaf = r.node(0, Pos{})
	root := r.node(int(r.tree.Root().Level), Pos{})
	r.tree.Forget(leaf)
	r.tree.Forget(root)
	if leaf.Gone() || root.Gone() {
		t.Error("what has to be written, or the root, is gone")
	}
	r.compare()
}

// TestCopiesShareWhatTheyLeaveOut coalesces leaves with stale extents: whoever walks the leaves and has passed the first
// of the copies still sees, in the others, what is on the disk.
func TestCopiesShareWhatTheyLeaveOut(t *testing.T) {
	r := newRig(t, shapes[1])
	r.fill(1500)
	r.sync()
	r.begin(r.node(1, Pos{})) // so that it has room
	r.settle()
	victims := r.tree.Siblings(nil, r.node(0, Pos{}), 3)
	if len(victims) < 3 {
		t.Fatalf("%d siblings", len(victims))
	}
	var stale ondisk.Ptr
	victims[2].EachPtr(func(p ondisk.Ptr) { stale = p })
	r.invalidate(r.geo.Bucket(stale.Sector()))
	rw, o := r.tree.Begin(victims...)
	if o != Done {
		t.Fatal(o)
	}
	r.rewrites = append(r.rewrites, &remake{rw: rw})
	for !rw.Copy(1 << 30) {
	}
	if rw.Nodes() < 2 {
		t.Fatal("one copy")
	}
	r.make(r.rewrites[0])
	in, o := rw.Install()
	if o != Done {
		t.Fatal(o)
	}
	for i, n := range in.New {
		found := false
		n.EachPtr(func(p ondisk.Ptr) { found = found || p == stale })
		if !found {
			t.Errorf("copy %d of %d does not tell of what the third node has on the disk", i, len(in.New))
		}
	}
}

// TestCopiesKeepAllPins coalesces leaves, the last of which needs the oldest journal entry: that is needed until the copy
// is linked (M1).
func TestCopiesKeepAllPins(t *testing.T) {
	r := emptied(t)
	r.begin(r.node(1, Pos{})) // so that it has room
	r.settle()
	r.node(0, r.node(0, Pos{}).ref.High)
	victims := r.tree.Siblings(nil, r.node(0, Pos{}), 2)
	if len(victims) < 2 {
		t.Fatal("one leaf")
	}
	want := r.seq
	for _, n := range []*Node{victims[1], victims[0]} {
		p := n.ref.Low
		r.insert(ondisk.NewExtent(p.Inode, p.Sector+1, 1, r.space(1), true), 0)
	}
	if o := r.begin(victims...); o != Done {
		t.Fatal(o)
	}
	for len(r.rewrites) > 0 {
		r.install(0)
	}
	if !victims[0].Gone() || !victims[1].Gone() {
		t.Fatal("not coalesced")
	}
	if got, _ := r.tree.OldestPin(); got != want {
		t.Errorf("the oldest pin is %d, want %d", got, want)
	}
	r.compareDisk()
	r.settle()
	if got, _ := r.tree.OldestPin(); got != 0 {
		t.Errorf("the oldest pin is %d when all is linked", got)
	}
	r.compareDisk()
}
