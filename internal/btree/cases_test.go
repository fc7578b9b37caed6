package btree

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// TestOverlapsAfterReload is case 21: an old extent of 128 sectors and newer ones in its middle, at its start, at
// its end, and over all of it, with a reload after each.
func TestOverlapsAfterReload(t *testing.T) {
	for _, c := range []struct{ old, young bool }{{false, false}, {true, false}, {false, true}, {true, true}} {
		for _, where := range []string{"append each", "one append", "rewrite", "journal"} {
			t.Run(fmt.Sprintf("dirty %v under %v, %s", c.old, c.young, where), func(t *testing.T) {
				r := newRig(t, shape{buckets: 520, bucketSectors: 128, blockSectors: 8, inodes: 1, sectors: 1000})
				r.insert(ondisk.NewExtent(0, 328, 128, r.space(128), c.old), 0)
				reloads := 0
				reload := func() {
					t.Helper()
					r.compare()
					switch where {
					case "append each":
						r.sync()
						r.lastSeq = r.seq
					case "rewrite":
						if o := r.begin(r.node(0, Pos{})); o != Done {
							t.Fatal(o)
						}
						r.settle()
						r.lastSeq = r.seq
					case "one append":
						return
					}
					if reloads++; reloads%3 == 2 {
						r.judge()
					}
					r.crash()
					r.compare()
				}
				reload()
				for _, x := range [][2]uint64{{264, 8}, {200, 8}, {320, 8}, {261, 2}, {269, 5}, {200, 128}, {150, 100}, {210, 128}} {
					r.insert(ondisk.NewExtent(0, x[0]+x[1], uint32(x[1]), r.space(int(x[1])), c.young), 0)
					reload()
				}
				r.sync()
				r.lastSeq = r.seq
				r.crash()
				r.compare()
			})
		}
	}
}

// TestMergedKeysFitInBlocks has the keys that a kernel's memory was seen to overflow with: as many extents as fit
// in a page, then one strictly inside each of them. Source: F 5.7, F 14 #19.
func TestMergedKeysFitInBlocks(t *testing.T) {
	for _, rewriting := range []bool{false, true} {
		r := newRig(t, shape{buckets: 520, bucketSectors: 128, blockSectors: 8, inodes: 1, sectors: 4000})
		for i := range uint64(169) {
			r.insert(ondisk.NewExtent(0, 8+8*i, 8, r.space(8), true), 0)
			r.space(1) // so that neighbours do not join
		}
		r.sync()
		leaf := r.node(0, Pos{})
		if rewriting {
			if o := r.begin(leaf); o != Done {
				t.Fatal(o)
			}
			r.rewrites[0].rw.Copy(1000)
		}
		for i := range uint64(169) {
			r.insert(ondisk.NewExtent(0, 8*i+5, 2, r.space(2), true), 0)
		}
		r.sync()
		leaf = r.node(0, Pos{})
		if leaf.MustRewrite() || leaf.used < 2 {
			t.Fatalf("%d of %d blocks are used", leaf.used, leaf.blocks)
		}
		r.lastSeq = r.seq
		r.compareDisk() // the reader counts
		r.judge()
		r.crash()
		if leaf = r.node(0, Pos{}); leaf.full {
			t.Fatal("the node takes no more appends")
		}
		r.compare()
	}
}

// TestChangeOfEachOverlap lists what an insertion says it removed and stored.
func TestChangeOfEachOverlap(t *testing.T) {
	for _, c := range []struct {
		start, end uint64
		removed    string
		tree       string
	}{
		{0, 10, "", "0:0+10 0:100+50 0:150+20p0 0:200+10p50d"},
		{90, 100, "", "0:90+10 0:100+50 0:150+20p0 0:200+10p50d"},
		{100, 110, "0:100+10", "0:100+10 0:110+40 0:150+20p0 0:200+10p50d"},
		{155, 160, "0:155+5p5", "0:100+50 0:150+5p0 0:155+5 0:160+10p10 0:200+10p50d"},
		{140, 205, "0:140+10 0:150+20p0 0:200+5p50d", "0:100+40 0:140+65 0:205+5p55d"},
		{200, 210, "0:200+10p50d", "0:100+50 0:150+20p0 0:200+10"},
		{205, 220, "0:205+5p55d", "0:100+50 0:150+20p0 0:200+5p50d 0:205+15"},
		{170, 200, "", "0:100+50 0:150+20p0 0:170+30 0:200+10p50d"},
	} {
		r := newRig(t, shape{buckets: 256, bucketSectors: 256, blockSectors: 8, inodes: 1, sectors: 1000})
		base := r.space(100)
		r.insert(ondisk.NewInvalidation(0, 150, 50), 0)
		r.insert(ondisk.NewExtent(0, 170, 20, base, false), 0)
		r.insert(ondisk.NewExtent(0, 210, 10, base.Advance(50), true), 0)
		r.sync() // so that nothing joins
		text := func(list []Extent) (s string) {
			for i := range list {
				x := &list[i]
				if i > 0 {
					s += " "
				}
				s += fmt.Sprintf("%v+%d", x.Pos(), x.Size)
				if x.HasPtr() {
					s += fmt.Sprintf("p%d", x.Ptr.Sector()-base.Sector())
				}
				if x.Dirty() {
					s += "d"
				}
			}
			return s
		}
		r.insert(ondisk.NewInvalidation(0, c.end, uint32(c.end-c.start)), 0)
		if got := text(r.change.Removed); got != c.removed {
			t.Errorf("[%d,%d): removed %s, want %s", c.start, c.end, got, c.removed)
		}
		if x := r.change.Stored; x.Start != c.start || x.End() != c.end || r.change.More {
			t.Errorf("[%d,%d): stored %v", c.start, c.end, x)
		}
		var all []Extent
		r.each(func(x Extent) bool { all = append(all, x); return true })
		if got := text(all); got != c.tree {
			t.Errorf("[%d,%d): tree %s, want %s", c.start, c.end, got, c.tree)
		}
	}
}

func TestReplaceTakesThePrefixThatMatches(t *testing.T) {
	for _, c := range []struct {
		name string
		over func(r *rig, p ondisk.Ptr) // what comes between
		want int
	}{
		{"all of it", func(*rig, ondisk.Ptr) {}, 20},
		{"overwritten behind", func(r *rig, _ ondisk.Ptr) { r.insert(ondisk.NewInvalidation(0, 120, 4), 0) }, 16},
		{"overwritten within", func(r *rig, _ ondisk.Ptr) { r.insert(ondisk.NewExtent(0, 108, 2, r.space(2), true), 0) }, 6},
		{"overwritten in front", func(r *rig, _ ondisk.Ptr) { r.insert(ondisk.NewInvalidation(0, 101, 1), 0) }, 0},
		{"cleaned in part", func(r *rig, p ondisk.Ptr) { r.insert(ondisk.NewExtent(0, 110, 5, p.Advance(5), false), 0) }, 5},
		{"same data again", func(r *rig, p ondisk.Ptr) { r.insert(ondisk.NewExtent(0, 110, 5, p.Advance(5), true), 0) }, 20},
		{"joined with more", func(r *rig, p ondisk.Ptr) { r.insert(ondisk.NewExtent(0, 130, 10, p.Advance(20), true), 0) }, 20},
		{"reused", func(r *rig, p ondisk.Ptr) {
			r.insert(ondisk.NewExtent(0, 120, 20, ondisk.MakePtr(p.Gen()+1, p.Sector(), 0), true), 0)
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, shape{buckets: 256, bucketSectors: 256, blockSectors: 8, inodes: 1, sectors: 1000})
			p := r.space(100)
			old := ondisk.NewExtent(0, 120, 20, p, true)
			r.insert(old, 0)
			c.over(r, p)
			if got := r.replace(old, ondisk.NewExtent(0, 120, 20, p, false)); got != c.want {
				t.Errorf("replaced %d sectors, want %d", got, c.want)
			}
			if c.name != "reused" {
				r.compare()
			}
		})
	}
}

func TestKeyIsCutAtTheLeaf(t *testing.T) {
	r := newRig(t, shapes[0])
	r.fill(2000)
	r.settle()
	high := r.node(0, Pos{}).Ref().High
	if high.Inode != 0 || high.Sector < 2 {
		t.Fatalf("the first leaf ends at %v", high)
	}
	k := ondisk.NewInvalidation(0, high.Sector+2, 4)
	for r.tree.Insert(&k, 0, &r.change) == NeedsNode {
		r.load(r.change.Miss)
	}
	if c := &r.change; !c.More || c.Stored.End() != high.Sector || c.Rest.Start() != high.Sector || c.Rest.Size() != 2 {
		t.Errorf("%+v", c)
	}
}

// TestHeldPointersWait follows one extent that may not be durable before its backing device was flushed.
func TestHeldPointersWait(t *testing.T) {
	onDisk := func(r *rig) (ptr, known bool) {
		r.lastSeq = r.seq // without the journal
		d := r.read()
		return d.cells[0][20].ptr != 0, true
	}
	r := newRig(t, shape{buckets: 256, bucketSectors: 256, blockSectors: 8, inodes: 1, sectors: 1000})
	r.insert(ondisk.NewExtent(0, 30, 20, r.space(20), false), 0)
	r.sync()
	if ptr, _ := onDisk(r); !ptr {
		t.Fatal("the extent of no epoch is not on the disk")
	}
	r.insert(ondisk.NewExtent(0, 30, 20, r.space(20), false), 7)
	r.space(1)
	r.insert(ondisk.NewExtent(0, 34, 8, r.space(8), false), 8) // over its end
	leaf := r.node(0, Pos{})
	r.sync()
	if ptr, _ := onDisk(r); ptr || !leaf.Dirty() {
		t.Fatalf("pointer on the disk: %v; leaf dirty: %v", ptr, leaf.Dirty())
	}
	r.compare()
	if r.tree.Evict(0, 100); leaf.Gone() {
		t.Fatal("the leaf was evicted")
	}
	r.flushes[0] = 7
	r.tree.FlushDone(0, 7) // begun before the data was there
	r.sync()
	if ptr, _ := onDisk(r); ptr {
		t.Fatal("on the disk after a flush that did not cover it")
	}
	r.flushes[0] = 8
	r.tree.FlushDone(0, 8)
	r.sync()
	if ptr, _ := onDisk(r); !ptr {
		t.Fatal("not on the disk after the flush")
	}
	if d := r.read(); d.cells[0][30].ptr != 0 || !leaf.Dirty() {
		t.Fatal("what is of epoch 8 is on the disk")
	}
	// A rewrite leaves out what must wait; what may go while it is under way is not lost.
	if o := r.begin(leaf); o != Done {
		t.Fatal(o)
	}
	r.rewrites[0].rw.Copy(1000)
	r.flushes[0] = 9
	r.tree.FlushDone(0, 9)
	r.freeze(leaf)
	r.settle()
	r.compare()
	if r.node(0, Pos{}) == leaf || !r.node(0, Pos{}).Dirty() {
		t.Fatal("the new leaf has nothing to write")
	}
	r.sync()
	if d := r.read(); d.cells[0][30].ptr == 0 || r.node(0, Pos{}).Dirty() {
		t.Fatal("not on the disk after the last flush")
	}
}

func TestHoldsAreFew(t *testing.T) {
	r := newRig(t, shape{buckets: 1024, bucketSectors: 256, blockSectors: 8, inodes: 2, sectors: 4000})
	for i := range uint64(100) {
		r.insert(ondisk.NewExtent(uint32(i%2), 8*i+8, 8, r.space(8), false), i+1)
	}
	if n := len(r.tree.mem.holds.list); n > 2*holdsPerInode {
		t.Errorf("%d holds", n)
	}
	// The oldest ones are not held up by what came later.
	r.flushes[0], r.flushes[1] = 4, 4
	r.tree.FlushDone(0, 4)
	r.tree.FlushDone(1, 4)
	r.sync()
	r.lastSeq = r.seq
	d := r.read()
	if d.cells[0][0].ptr == 0 || d.cells[1][8].ptr == 0 {
		t.Error("the first extents are still held")
	}
	r.compare()
	r.compareDisk()
}

func TestManyVolumesRunOutOfHolds(t *testing.T) {
	var s holds
	for i := range uint32(maxHolds) {
		id := s.take(i, 1)
		if id == 0 {
			t.Fatalf("no hold for inode %d", i)
		}
		s.ref(id, 1)
	}
	if id := s.take(maxHolds, 1); id != 0 {
		t.Errorf("hold %d", id)
	}
	if id := s.take(3, 1); id == 0 {
		t.Error("a hold that is there is not found")
	}
	s.done(3, 2)
	s.ref(4, -1)
	if id := s.take(maxHolds, 1); id != 4 {
		t.Errorf("hold %d, want the one that is free", id)
	}
}

// TestWhatMayNotBeDone asks for what has to wait.
func TestWhatMayNotBeDone(t *testing.T) {
	r := newRig(t, shapes[1])
	r.fill(1500)
	r.settle()
	r.begin(r.node(1, Pos{})) // so that it has room
	r.settle()
	leaf := r.node(0, Pos{})
	is := func(what string, got, want Outcome) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	r.insert(ondisk.NewInvalidation(0, 1, 1), 0)
	a, o := r.tree.Freeze(leaf)
	if o == NeedsRewrite {
		r.begin(leaf)
		r.settle()
		leaf = r.node(0, Pos{})
		r.insert(ondisk.NewInvalidation(0, 1, 1), 0)
		a, o = r.tree.Freeze(leaf)
	}
	is("append", o, Done)
	_, o = r.tree.Freeze(leaf)
	is("a second append", o, Busy)
	rw, o := r.tree.Begin(leaf)
	is("rewrite", o, Done)
	_, o = r.tree.Begin(leaf)
	is("a second rewrite", o, Busy)
	rw.Copy(1 << 30)
	for i := range rw.Nodes() {
		rw.Assign(i, r.newBucket(), 1)
		r.write(rw.Encode(i, make([]byte, rw.Bytes(i))))
	}
	_, o = rw.Install()
	is("install under an append", o, Busy)
	r.tree.Finish(a, nil)
	in, o := rw.Install()
	is("install", o, Done)
	for _, old := range in.Old {
		r.gens[r.geo.Bucket(old.Ptr.Sector())]++
	}
	_, o = rw.Install()
	is("install again", o, Gone)
	_, o = r.tree.Freeze(leaf)
	is("append to what was replaced", o, Gone)
	_, o = r.tree.Begin(in.New[0])
	is("rewrite of what is not linked", o, Busy)
	_, o = r.tree.Begin(in.New[0], in.Parent)
	is("rewrite of different levels", o, Busy)
	if got := r.tree.Siblings(nil, in.New[0], 3); len(got) == 0 || got[0] != in.New[0] {
		t.Errorf("siblings %v", got)
	}
	if r.tree.Parent(in.New[0]) != in.Parent || r.tree.Parent(leaf) != nil {
		t.Error("wrong parent")
	}
	r.parents = append(r.parents, in.Parent)
	r.settle()
	_, o = r.tree.Freeze(in.Parent)
	is("append of nothing", o, Nothing)
	r.compare()
	r.compareDisk()
}

// TestStalePointersCountUntilUnlinked holds that what a rewrite leaves out is still counted while it is on disk.
func TestStalePointersCountUntilUnlinked(t *testing.T) {
	r := newRig(t, shapes[1])
	r.fill(1500)
	r.sync()
	r.begin(r.node(1, Pos{})) // so that it has room
	r.settle()
	leaf := r.node(0, Pos{})
	var p ondisk.Ptr
	leaf.EachPtr(func(q ondisk.Ptr) {
		if r.live(&cell{ptr: q}) {
			p = q
		}
	})
	has := func(n *Node) (found bool) {
		n.EachPtr(func(q ondisk.Ptr) {
			found = found || q.Gen() == p.Gen() && r.geo.Bucket(q.Sector()) == r.geo.Bucket(p.Sector())
		})
		return found
	}
	r.invalidate(r.geo.Bucket(p.Sector()))
	if s := leaf.Stats(&r.geo, r.gen); s.StaleWords == 0 || s.MaxAge == 0 || !has(leaf) {
		t.Fatalf("%+v", s)
	}
	if o := r.begin(leaf); o != Done {
		t.Fatal(o)
	}
	for range 100 {
		if len(r.rewrites) > 0 {
			r.install(0)
		}
	}
	leaf = r.node(0, Pos{})
	if !has(leaf) {
		t.Error("not counted, and still on the disk")
	}
	r.settle()
	if has(leaf) {
		t.Error("counted, and no longer on the disk")
	}
	root := r.node(1, Pos{})
	if s := root.Stats(&r.geo, r.gen); s.MaxAge == 0 || s.StaleWords == 0 || s.LiveWords != 3*len(root.kids) {
		t.Errorf("%+v", s)
	}
	r.crash()
	root = r.node(1, Pos{})
	r.node(0, Pos{})
	if s := root.Stats(&r.geo, r.gen); s.MaxAge == 0 || s.StaleWords == 0 || s.LiveWords != 3*len(root.kids) {
		t.Errorf("read again: %+v", s)
	}
}

// TestParseRefuses gives Parse nodes that a kernel would refuse, or that break the format.
func TestParseRefuses(t *testing.T) {
	r := newRig(t, shapes[2])
	at := r.geo.BucketStart(900)
	good := ondisk.NewExtent(0, 100, 8, ondisk.MakePtr(1, at, 0), false)
	child := ondisk.NewChild(0, 500, r.geo.NodeSectors, ondisk.MakePtr(1, r.geo.BucketStart(100), 0))
	check := ondisk.NewExtent(0, 100, 8, ondisk.MakePtr(9, 77, ondisk.CheckDev), false)
	for _, c := range []struct {
		name  string
		level uint8
		keys  []ondisk.Key
		ok    bool
		full  bool
	}{
		{name: "nothing", ok: true},
		{name: "one extent", keys: []ondisk.Key{good}, ok: true},
		{name: "a check key", keys: []ondisk.Key{check}, ok: true, full: true},
		{name: "size 0", keys: []ondisk.Key{ondisk.NewInvalidation(0, 50, 0), good}, ok: true},
		{name: "disorder", keys: []ondisk.Key{good, ondisk.NewInvalidation(0, 50, 8)}},
		{name: "overlap", keys: []ondisk.Key{good, ondisk.NewInvalidation(0, 104, 8)}},
		{name: "behind the end", keys: []ondisk.Key{ondisk.NewInvalidation(3, 204, 8)}},
		{name: "before the start", keys: []ondisk.Key{ondisk.NewInvalidation(0, 14, 8)}},
		{name: "size above end", keys: []ondisk.Key{ondisk.NewInvalidation(0, 7, 8)}},
		{name: "no such slot", keys: []ondisk.Key{ondisk.NewInvalidation(100000, 50, 8)}},
		{name: "over the bucket's end", keys: []ondisk.Key{ondisk.NewExtent(0, 100, 8, ondisk.MakePtr(1, at+10, 0), false)}},
		{name: "no such bucket", keys: []ondisk.Key{ondisk.NewExtent(0, 100, 8, ondisk.MakePtr(1, 1<<40, 0), false)}},
		{name: "child", level: 1, keys: []ondisk.Key{child}, ok: true},
		{name: "child without pointer", level: 1, keys: []ondisk.Key{ondisk.NewInvalidation(0, 500, 16)}},
		{name: "child in the middle of a bucket", level: 1, keys: []ondisk.Key{ondisk.NewChild(0, 500, 4, ondisk.MakePtr(1, at+4, 0))}},
		{name: "child before the start", level: 1, keys: []ondisk.Key{ondisk.NewChild(0, 5, 16, ondisk.MakePtr(1, at, 0))}},
	} {
		ref := Ref{Level: c.level, Sectors: r.geo.NodeSectors, Ptr: ondisk.MakePtr(1, r.geo.BucketStart(60), 0), Low: Pos{0, 10}, High: Pos{3, 200}}
		b := make([]byte, ref.Sectors*512)
		var keys []byte
		for i := range c.keys {
			keys = ondisk.AppendKey(keys, &c.keys[i])
		}
		ondisk.EncodeBSet(b, r.geo.BSetMagic(), 5, ref.Ptr, keys)
		n, err := Parse(&r.geo, ref, b)
		if c.ok != (err == nil) || err != nil && (n != nil || !errors.Is(err, ondisk.ErrCorrupt)) {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.ok && n.full != c.full {
			t.Errorf("%s: takes no appends: %v", c.name, n.full)
		}
	}
}

// When a flush fails, what waits for one is gone from memory at once, and never gets to the disk; what comes later waits for
// a later one.
func TestFlushFailed(t *testing.T) {
	r := newRig(t, shape{buckets: 1024, bucketSectors: 256, blockSectors: 8, inodes: 2, sectors: 4000})
	ptrs := make([]ondisk.Ptr, 3)
	for i := range ptrs {
		ptrs[i] = r.space(8)
	}
	key := func(i int) ondisk.Key {
		return ondisk.NewExtent(uint32(i%2), uint64(i)*8+8, 8, ptrs[i], false)
	}
	put := func(i int, epoch uint64) { r.insert(key(i), epoch) }
	cached := func(i int) bool {
		p, miss := r.tree.Lookup(uint32(i%2), uint64(i)*8, uint64(i)*8+8)
		return miss.IsZero() && p.Cached
	}
	onDisk := func(i int) bool { return r.read().cells[i%2][i*8].ptr != 0 }
	put(0, 7)
	put(1, 7) // of another inode
	put(2, 0) // does not wait
	r.tree.FlushFailed(0)
	if cached(0) || !cached(1) || !cached(2) || !r.tree.Losing(0) || r.tree.Losing(1) || r.tree.Holding(0) {
		t.Fatal(cached(0), cached(1), cached(2), r.tree.Losing(0), r.tree.Losing(1), r.tree.Holding(0))
	}
	if list, next := r.tree.Lost(nil, 0, 0); len(list) != 1 || list[0] != key(0) || next != 0 {
		t.Fatal(list, next)
	}
	r.tree.FlushDone(0, 100)
	r.tree.FlushDone(1, 100)
	r.sync()
	if cached(0) || onDisk(0) || !onDisk(1) || !onDisk(2) {
		t.Fatal("on the disk:", onDisk(0), onDisk(1), onDisk(2))
	}
	put(0, 7) // the number of the flush that has failed
	if !cached(0) || !r.tree.Holding(0) || r.tree.Losing(0) {
		t.Fatal("what was put in the place of it:", cached(0), r.tree.Holding(0), r.tree.Losing(0))
	}
	r.tree.FlushDone(0, 101)
	r.sync()
	if !onDisk(0) {
		t.Fatal("not on the disk")
	}
}
