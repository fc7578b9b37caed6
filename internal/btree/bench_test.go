package btree

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

const million = 1 << 20

// A grower is a tree of real size, of buckets of 512 KiB and nodes of 256, whose writes go nowhere.
type grower struct {
	testing.TB
	geo    ondisk.Geometry
	tree   *Tree
	next   uint64 // bucket for a node
	change Change
	nodes  map[ondisk.Ptr][]byte // as written, if kept
}

func newGrower(t testing.TB, keep bool) *grower {
	sb := ondisk.Superblock{
		Offset: ondisk.SuperblockSector, Version: ondisk.VersionCache, Magic: ondisk.Magic, Flags: ondisk.FlagSync,
		Word184: 65000, BlockSize: 8, BucketSize16: 1024, NrInSet: 1, FirstBucket: 1,
	}
	g := &grower{TB: t, geo: ondisk.NewGeometry(&sb), next: 60000}
	p := g.bucket()
	g.tree = New(&g.geo, Ref{Sectors: g.geo.NodeSectors, Ptr: p}, func(uint64) uint8 { return 1 })
	root := make([]byte, g.geo.NodeSectors*512)
	ondisk.EncodeBSet(root, g.geo.BSetMagic(), 5, p, nil)
	if keep {
		g.nodes = map[ondisk.Ptr][]byte{}
	}
	n, err := Parse(&g.geo, g.tree.Root(), root)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.tree.Attach(n); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *grower) bucket() ondisk.Ptr {
	g.next++
	return ondisk.MakePtr(1, g.geo.BucketStart(g.next), 0)
}

func (g *grower) rewrite(n *Node) {
	rw, o := g.tree.Begin(n)
	if o != Done {
		g.Fatal(o)
	}
	rw.Copy(1 << 30)
	for i := range rw.Nodes() {
		p := g.bucket()
		rw.Assign(i, p, uint64(i))
	}
	for i := range rw.Nodes() {
		if g.nodes != nil {
			b := make([]byte, g.geo.NodeSectors*512)
			rw.Encode(i, b)
			g.nodes[rw.out[i].ref.Ptr] = b
		}
	}
	in, o := rw.Install()
	if o == NeedsRewrite {
		g.rewrite(in.Parent)
		in, o = rw.Install()
	}
	if o != Done {
		g.Fatal(o)
	}
	if in.Parent == nil {
		g.tree.RootDurable(g.tree.Root(), nil)
		return
	}
	if a, o := g.tree.Freeze(in.Parent); o == Done {
		g.tree.Finish(a, nil)
	} else {
		g.Fatal(o)
	}
}

// rewriteAll brings all nodes to the disk, leaves first.
func (g *grower) rewriteAll() {
	for level := 0; level <= int(g.tree.Root().Level); level++ {
		for p := (Pos{}); p != MaxPos; {
			n, _ := g.tree.NodeAt(level, p)
			p = n.Ref().High
			g.rewrite(n)
		}
	}
}

// insert caches the ith 4 KiB of inode 1.
func (g *grower) insert(i uint64) {
	k := ondisk.NewExtent(1, 16+8*i+8, 8, ondisk.MakePtr(1, 1<<20+(i*0x9e3779b1&(million-1))*8, 0), i&1 == 0)
	for {
		switch o := g.tree.Insert(&k, 0, &g.change); o {
		case Done:
			if g.change.More {
				k = g.change.Rest
				continue
			}
			return
		case NeedsRoom:
			g.rewrite(g.change.Leaf)
		default:
			g.Fatal(o)
		}
	}
}

// full returns a tree of so many extents of 4 KiB, inserted in random order.
func full(t testing.TB, n int, keep bool) *grower {
	g := newGrower(t, keep)
	r := rand.New(rand.NewPCG(1, 2))
	for _, i := range r.Perm(n) {
		g.insert(uint64(i))
	}
	return g
}

func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

func TestMemoryPerExtent(t *testing.T) {
	const n = million / 4
	before := heap()
	g := full(t, n, false)
	real := float64(heap()-before) / n
	counted := float64(g.tree.Bytes()) / n
	t.Logf("%d extents written at random: %.1f bytes each, %.1f of the heap; %d leaves", n, counted, real, g.tree.Nodes())
	if err := g.tree.Check(); err != nil {
		t.Fatal(err)
	}
	if counted > 20 || real > 20 {
		t.Errorf("%.1f bytes an extent, %.1f of the heap; want at most 20", counted, real)
	}
	runtime.KeepAlive(g)
}

func TestMemoryAfterLoad(t *testing.T) {
	const n = million / 8
	g := full(t, n, true)
	g.rewriteAll()
	before := heap()
	tree := g.load()
	real := float64(heap()-before) / n
	counted := float64(tree.Bytes()) / n
	t.Logf("%d extents read: %.1f bytes each, %.1f of the heap", n, counted, real)
	if counted > 20 || real > 20 {
		t.Errorf("%.1f bytes an extent, %.1f of the heap; want at most 20", counted, real)
	}
	runtime.KeepAlive(g)
}

// load reads the whole tree from what was written.
func (g *grower) load() *Tree {
	t := New(&g.geo, g.tree.Root(), func(uint64) uint8 { return 1 })
	g.loadNode(t, t.Root())
	return t
}

func (g *grower) loadNode(t *Tree, ref Ref) {
	n, err := Parse(&g.geo, ref, g.nodes[ref.Ptr])
	if err != nil {
		g.Fatal(err)
	}
	if o, err := t.Attach(n); o != Done || err != nil {
		g.Fatal(o, err)
	}
	n.EachChild(func(r Ref) { g.loadNode(t, r) })
}

func TestLookupsAndInsertsAllocateNothing(t *testing.T) {
	g := full(t, 100000, false)
	r := rand.New(rand.NewPCG(3, 4))
	if n := testing.AllocsPerRun(10000, func() {
		at := 16 + 8*r.Uint64N(100000)
		if _, miss := g.tree.Lookup(1, at, at+8); !miss.IsZero() {
			t.Fatal(miss)
		}
	}); n > 0 {
		t.Errorf("%.1f allocations a lookup", n)
	}
	if n := testing.AllocsPerRun(10000, func() { g.insert(r.Uint64N(100000)) }); n > 0 {
		t.Errorf("%.1f allocations an overwrite", n)
	}
	next := uint64(100000)
	if n := testing.AllocsPerRun(1000, func() { g.insert(next); next++ }); n > 0.1 {
		t.Errorf("%.2f allocations an insertion", n)
	}
	if n := testing.AllocsPerRun(1000, func() {
		g.tree.Scan(Pos{1, 16 + 8*r.Uint64N(100000)}, MaxPos, 10, func(Extent) bool { return true })
	}); n > 0 {
		t.Errorf("%.1f allocations a scan", n)
	}
}

func BenchmarkLookup(b *testing.B) {
	g := full(b, million, false)
	r := rand.New(rand.NewPCG(3, 4))
	b.ReportAllocs()
	b.ResetTimer()
	for b.Loop() {
		at := 16 + 8*r.Uint64N(million)
		if p, _ := g.tree.Lookup(1, at, at+8); !p.Cached {
			b.Fatal(at)
		}
	}
	b.ReportMetric(float64(g.tree.Bytes())/million, "B/extent")
	b.ReportMetric(float64(g.tree.Root().Level+1), "levels")
}

func BenchmarkInsert(b *testing.B) {
	b.Run("new", func(b *testing.B) {
		perm := rand.New(rand.NewPCG(5, 6)).Perm(million)
		b.ReportAllocs()
		var g *grower
		i := 0
		for b.Loop() {
			if i%million == 0 {
				g = newGrower(b, false)
			}
			g.insert(uint64(perm[i%million]))
			i++
		}
	})
	g := full(b, million, false)
	r := rand.New(rand.NewPCG(3, 4))
	b.Run("over", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			g.insert(r.Uint64N(million))
		}
	})
	b.Run("inside", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			i := r.Uint64N(million)
			k := ondisk.NewInvalidation(1, 16+8*i+4, 2)
			g.tree.Insert(&k, 0, &g.change)
			g.insert(i)
		}
	})
}

func BenchmarkLoad(b *testing.B) {
	g := full(b, million, true)
	g.rewriteAll()
	b.ReportAllocs()
	b.ResetTimer()
	for b.Loop() {
		g.load()
	}
	b.ReportMetric(b.Elapsed().Seconds()/float64(b.N), "s/1M-extents")
}

// BenchmarkRewrite measures what is done with the lock held for a leaf that is as full as it may be: the best of
// all runs, since what else the machine does at the time is no work of ours.
func BenchmarkRewrite(b *testing.B) {
	best := map[string]float64{}
	timed := func(name string, fn func() Outcome) {
		at := b.Elapsed()
		if o := fn(); o != Done {
			b.Fatal(o)
		}
		if s := (b.Elapsed() - at).Seconds() * 1e6; best[name] == 0 || s < best[name] {
			best[name] = s
		}
	}
	for b.Loop() {
		b.StopTimer()
		g := newGrower(b, false)
		n := uint64(g.geo.NodeSectors * 512 / 24)
		for i := range 2 * n {
			g.insert(i * 0x9e3779b1 & (1<<16 - 1))
		}
		leaf, _ := g.tree.NodeAt(0, Pos{})
		b.StartTimer()
		var rw *Rewrite
		timed("µs/begin", func() (o Outcome) { rw, o = g.tree.Begin(leaf); return o })
		timed("µs/copy-2000", func() Outcome { rw.Copy(2000); return Done })
		rw.Copy(1 << 30)
		for i := range rw.Nodes() {
			rw.Assign(i, g.bucket(), uint64(i))
		}
		timed("µs/install", func() (o Outcome) { _, o = rw.Install(); return o })
		g.tree.RootDurable(g.tree.Root(), nil)
		for i := range uint64(170) {
			g.insert(i * 64)
		}
		leaf, _ = g.tree.NodeAt(0, Pos{})
		timed("µs/freeze", func() (o Outcome) { _, o = g.tree.Freeze(leaf); return o })
	}
	for name, v := range best {
		b.ReportMetric(v, name)
	}
}
