package btree

import (
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// TestNothingJoinsAcrossTheCopy inserts, between two slices of a copy, what could join what is copied already.
func TestNothingJoinsAcrossTheCopy(t *testing.T) {
	r := newRig(t, shape{buckets: 520, bucketSectors: 128, blockSectors: 8, inodes: 1, sectors: 1000})
	p := r.space(40)
	r.insert(ondisk.NewExtent(0, 8, 8, p, true), 0)
	r.insert(ondisk.NewExtent(0, 16, 8, p.Advance(20), true), 0)
	if o := r.begin(r.node(0, Pos{})); o != Done {
		t.Fatal(o)
	}
	if r.rewrites[0].rw.Copy(1) {
		t.Fatal("the copy is complete")
	}
	r.insert(ondisk.NewExtent(0, 16, 8, p.Advance(8), true), 0)
	r.settle()
	r.compare()
	r.sync()
	r.lastSeq = r.seq
	r.compareDisk()
}

// TestChildOfNewParentWaitsForItsOwnKey links a parent while the key of one of its children has not been appended
// to it: the child is not linked by that.
func TestChildOfNewParentWaitsForItsOwnKey(t *testing.T) {
	r := newRig(t, shapes[1])
	r.fill(1500)
	r.sync()
	if o := r.begin(r.node(1, Pos{})); o != Done {
		t.Fatal(o)
	}
	for len(r.rewrites) > 0 {
		r.install(0) // a new root, that no journal entry names
	}
	leaf := r.node(0, Pos{})
	r.insert(ondisk.NewExtent(0, 3, 2, r.space(2), true), 0)
	if o := r.begin(leaf); o != Done {
		t.Fatal(o)
	}
	for len(r.rewrites) > 0 {
		r.install(0)
	}
	if !r.rootDurable() {
		t.Fatal("no new root")
	}
	if root, leaf := r.node(1, Pos{}), r.node(0, Pos{}); !root.linked || leaf.linked || !leaf.listed {
		t.Errorf("root linked %v, leaf linked %v, listed %v", root.linked, leaf.linked, leaf.listed)
	}
	r.compareDisk()
	r.settle()
	if !r.node(0, Pos{}).linked {
		t.Error("the leaf is not linked after its parent's append")
	}
	r.compareDisk()
}

// TestWithoutHoldNoPointer inserts what must wait, where nothing can make it wait.
func TestWithoutHoldNoPointer(t *testing.T) {
	r := newRig(t, shapes[1])
	for i := range maxHolds {
		r.tree.mem.holds.ref(r.tree.mem.holds.take(uint32(100+i), 1), 1)
	}
	k := ondisk.NewExtent(0, 8, 2, r.space(2), false)
	for r.tree.Insert(&k, 5, &r.change) == NeedsNode {
		r.load(r.change.Miss)
	}
	if x := r.change.Stored; x.HasPtr() || x.Size != 2 {
		t.Errorf("stored %v", x)
	}
}

// TestRewriteOfParentTakesItsOpenKeys rewrites a parent that has keys to append: they go with the copy, and what
// they replaced is free when the copy is linked, not before.
func TestRewriteOfParentTakesItsOpenKeys(t *testing.T) {
	r := newRig(t, shapes[1])
	r.fill(1500)
	r.sync()
	r.begin(r.node(1, Pos{})) // so that it has room
	r.settle()
	if o := r.begin(r.node(0, Pos{})); o != Done {
		t.Fatal(o)
	}
	for len(r.rewrites) > 0 {
		r.install(0)
	}
	leaf, free := r.node(0, Pos{}), len(r.meta)
	r.parents = nil // the append is never made
	if !leaf.listed {
		t.Fatal("the leaf's key is not in its parent's open set")
	}
	root := r.node(1, Pos{})
	if o := r.begin(root); o != Done {
		t.Fatal(o)
	}
	if _, o := r.tree.Freeze(root); o != Busy {
		t.Errorf("append to an interior node under a rewrite: %v", o)
	}
	for len(r.rewrites) > 0 {
		r.install(0)
	}
	r.compareDisk()
	if leaf.linked || len(r.meta) >= free {
		t.Errorf("leaf linked: %v; %d buckets free, %d before", leaf.linked, len(r.meta), free)
	}
	r.rootDurable()
	if !leaf.linked || len(r.meta) != free+1 { // the old root and the old leaf, less the new root
		t.Errorf("leaf linked: %v; %d buckets free, %d before", leaf.linked, len(r.meta), free)
	}
	r.compare()
	r.compareDisk()
	r.rest()
}
