package btree

import (
	"errors"
	"slices"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A content is what a node says.
func content(n *Node) (list []string) {
	for c := range n.body.chunks {
		for i := range n.body.chunks[c].e {
			list = append(list, n.body.chunks[c].at(i).String())
		}
	}
	for i := range n.all {
		list = append(list, n.all[i].String())
	}
	return list
}

// cuts calls fn with the disk as a power cut in each place of the writes may leave it: writes in front of a flush
// done in part, in each way that loses one sector, of unit bytes, or keeps those up to one, and the rest not done.
func cuts(disk []byte, ws []Write, unit int, fn func(disk []byte, done bool)) {
	base := slices.Clone(disk)
	for i, w := range ws {
		sectors := len(w.Data) / unit
		for cut := range sectors {
			for _, lose := range []bool{false, true} {
				d := slices.Clone(base)
				for s := range sectors {
					if lose == (s != cut) && (lose || s < cut) {
						copy(d[w.Off+int64(s*unit):], w.Data[s*unit:][:unit])
					}
				}
				fn(d, false)
			}
		}
		copy(base[w.Off:], w.Data)
		fn(base, i == len(ws)-1)
	}
}

// TestTornAppends cuts the power in every place of appends of all lengths, to leaves and interior nodes. What is
// read again is the node as it was, or as it should be, and never damage.
func TestTornAppends(t *testing.T) {
	for _, blockSectors := range []int{1, 2, 8} {
		for _, atomic := range []int{512, 4096} {
			if atomic > blockSectors*512 {
				continue
			}
			for _, keys := range []int{1, 2, 19, 20, 21, 40, 100, 168, 170, 230} {
				r := newRig(t, shape{buckets: 520, bucketSectors: 32, blockSectors: blockSectors, inodes: 1, sectors: 4000})
				r.tear(keys, atomic)
			}
		}
	}
}

// tear fills a node and appends so many keys to it, torn in all places.
func (r *rig) tear(keys, atomic int) {
	r.Helper()
	r.insert(ondisk.NewExtent(0, 3000, 8, r.space(8), true), 0)
	r.sync()
	leaf := r.node(0, Pos{})
	for i := range keys {
		r.insert(ondisk.NewExtent(0, uint64(3*i+2), 1, r.space(1), true), 0)
		r.space(1)
	}
	a, o := r.tree.Freeze(leaf)
	if o != Done {
		r.Fatalf("%d keys: %v", keys, o)
	}
	r.torn(a, atomic)
}

// torn tries all ways to tear an append, and then makes it.
func (r *rig) torn(a *Append, atomic int) {
	r.Helper()
	ref := a.Node().Ref()
	parse := func(disk []byte) []string {
		n, err := Parse(&r.geo, ref, disk[ref.Ptr.Sector()*512:][:ref.Sectors*512])
		if err != nil {
			r.Fatalf("%v", err)
		}
		return content(n)
	}
	ws := a.Encode(make([]byte, a.Bytes()), atomic)
	if last := ws[len(ws)-1]; !last.FUA || len(ws) > 2 || len(ws) == 2 && (!last.Flush || len(last.Data) != atomic) {
		r.Fatalf("%d writes, the last with flush %v, FUA %v, %d bytes", len(ws), last.Flush, last.FUA, len(last.Data))
	}
	old := parse(r.disk)
	end := slices.Clone(r.disk)
	for _, w := range ws {
		copy(end[w.Off:], w.Data)
	}
	young := parse(end)
	if slices.Equal(old, young) {
		r.Fatalf("the append says nothing")
	}
	cuts(r.disk, ws, atomic, func(disk []byte, done bool) {
		switch got := parse(disk); {
		case slices.Equal(got, young):
		case slices.Equal(got, old) && !done:
		default:
			r.Fatalf("neither as before nor as after: %d entries, %d before, %d after", len(got), len(old), len(young))
		}
	})
	r.write(ws)
	r.release(r.tree.Finish(a, nil))
}

// TestTornParents splits leaves and tears each append to their parent: with the journal, all is there.
func TestTornParents(t *testing.T) {
	r := newRig(t, shape{buckets: 1024, bucketSectors: 16, blockSectors: 1, inodes: 1, sectors: 4000})
	r.rand = 7
	appends := 0
	for i := range 3000 {
		s := r.random() % 3990
		r.insert(ondisk.NewExtent(0, s+1, 1, r.space(1), i%2 == 0), 0)
		if i%100 != 99 {
			continue
		}
		for p := (Pos{}); p != MaxPos; {
			leaf := r.node(0, p)
			p = leaf.Ref().High
			if r.freeze(leaf) == NeedsRewrite {
				r.begin(leaf)
			}
		}
		for len(r.appends) > 0 {
			r.finish(0)
		}
		r.rootDurable()
		for i := len(r.rewrites) - 1; i >= 0; i-- {
			for range 100 {
				if i < len(r.rewrites) && !r.install(i) {
					break
				}
			}
		}
		r.rootDurable()
		for _, p := range r.parents {
			a, o := r.tree.Freeze(p)
			if o != Done {
				continue
			}
			appends++
			ws := a.Encode(make([]byte, a.Bytes()), 512)
			disk := r.disk
			cuts(disk, ws, 512, func(d []byte, _ bool) {
				r.disk = d
				r.compareDisk()
			})
			r.disk = disk
			r.write(ws)
			r.release(r.tree.Finish(a, nil))
			r.advance()
			r.compareDisk()
		}
		r.parents = nil
		r.settle()
	}
	if appends < 5 {
		t.Errorf("%d appends to parents", appends)
	}
	r.compare()
}

// TestTornNodeIsNotAppendedTo reads what a kernel's torn append leaves.
func TestTornNodeIsNotAppendedTo(t *testing.T) {
	r := newRig(t, shape{buckets: 1024, bucketSectors: 16, blockSectors: 1, inodes: 1, sectors: 4000})
	r.insert(ondisk.NewExtent(0, 3000, 8, r.space(8), true), 0)
	r.sync()
	for i := range uint64(60) {
		r.insert(ondisk.NewInvalidation(0, 3*i+2, 1), 0)
	}
	a, o := r.tree.Freeze(r.node(0, Pos{}))
	if o != Done {
		t.Fatal(o)
	}
	ws := a.Encode(make([]byte, a.Bytes()), 512)
	r.write(ws[1:]) // the beginning alone
	ref := r.tree.Root()
	n, err := Parse(&r.geo, ref, r.disk[ref.Ptr.Sector()*512:][:ref.Sectors*512])
	if !errors.Is(err, ondisk.ErrCorrupt) || n == nil || n.body.n != 1 || !n.MustRewrite() {
		t.Fatalf("%v, %v", n, err)
	}
	// The set decides that the journal has what was lost: the node comes into the tree, and is rewritten.
	r.appends, r.tree = nil, New(&r.geo, ref, r.gen)
	if o, err := r.tree.Attach(n); o != Done || err != nil {
		t.Fatal(o, err)
	}
	k := ondisk.NewInvalidation(0, 10, 5)
	if o := r.tree.Insert(&k, 0, &r.change); o != Done {
		t.Fatal(o)
	}
	if _, o := r.tree.Freeze(n); o != NeedsRewrite {
		t.Fatal(o)
	}
	if o := r.begin(n); o != Done {
		t.Fatal(o)
	}
	for len(r.rewrites) > 0 {
		r.install(0)
	}
	r.durableRoot = r.tree.Root()
	r.tree.RootDurable(r.durableRoot, nil)
	r.read() // the reader finds no damage
}

// TestNewNodesAreNeverSeenTorn cuts writes of copies: nothing refers to them yet.
func TestNewNodesAreNeverSeenTorn(t *testing.T) {
	r := newRig(t, shapes[1])
	r.fill(800)
	r.settle()
	if o := r.begin(r.node(0, Pos{})); o != Done {
		t.Fatal(o)
	}
	rw := r.rewrites[0].rw
	rw.Copy(1 << 30)
	for i := range rw.Nodes() {
		rw.Assign(i, r.newBucket(), r.random())
	}
	for i := range rw.Nodes() {
		ws := rw.Encode(i, make([]byte, rw.Bytes(i)))
		disk := r.disk
		cuts(disk, ws, 512, func(d []byte, _ bool) {
			r.disk = d
			r.compareDisk()
		})
		r.disk = disk
		r.write(ws)
	}
	r.rewrites[0].written = true
	r.settle()
	r.compare()
	r.compareDisk()
}
