package offline

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// The model of a set is an array with one cell for each sector of two volumes: the backing device in slot 0 and a
// flash-only volume in slot 1. Keys are painted into it in the order in which they count.

const (
	modelSectors = 120 // of each inode; those of inode 0 begin at dataStart
	modelBuckets = 10  // for data
)

// A cell is what the newest key says of a sector.
type cell struct {
	set   bool // a key covers it
	ptr   ondisk.Ptr
	live  bool // the key has a pointer that may be good
	dirty bool
}

type model [2][dataStart + modelSectors]cell

func (m *model) paint(k ondisk.Key) {
	for s := k.Start(); s < k.End(); s++ {
		c := cell{set: true, dirty: k.Dirty()}
		if k.Ptrs() > 0 && k.P[0].Dev() != ondisk.CheckDev {
			c.live, c.ptr = true, k.P[0].Advance(s-k.Start())
		}
		m[k.Inode()][s] = c
	}
}

// A gens is the generations that recovery finds, by bucket of data.
type gens [modelBuckets]uint8

func (g *gens) raise(p ondisk.Ptr) {
	b := p.Sector()/16 - dataBucket
	if d := g[b] - p.Gen(); d == 0 || d > 128 {
		g[b] = p.Gen()
	}
}

// drawKey makes a key within [from, to) of an inode, and returns where the next one may begin.
func drawKey(t *rapid.T, inode uint32, from, to uint64, base *gens) (ondisk.Key, uint64) {
	size := rapid.Uint64Range(1, min(14, to-from)).Draw(t, "size")
	start := from + rapid.Uint64Range(0, min(20, to-from-size)).Draw(t, "gap")
	var k ondisk.Key
	switch kind := rapid.IntRange(0, 9).Draw(t, "kind"); kind {
	case 0:
		k = goneKey(start, size)
	case 1:
		k = fillKey(start, size)
	case 2:
		k = dirtyKey(start, size, dataAt(0, 0))
		k.CutFront(k.End()) // size 0, end kept
		size = 0
	default:
		n := rapid.Uint64Range(0, modelBuckets-1).Draw(t, "bucket")
		at := dataAt(n, rapid.Uint64Range(0, 16-size).Draw(t, "at"))
		k = cleanKey(start, size, at)
		if kind%2 == 0 {
			k = dirtyKey(start, size, at)
		}
		// Within a window that no pair of pointers to one bucket can be ambiguous in.
		k = withGen(base[n]+uint8(rapid.IntRange(0, 3).Draw(t, "generation")), k)
	}
	return inInode(inode, k), start + size
}

// drawSet makes the keys of one bset, sorted and without overlap.
func drawSet(t *rapid.T, base *gens) (list []ondisk.Key) {
	for inode := range uint32(2) {
		from, to := uint64(0), uint64(modelSectors)
		if inode == 0 {
			from, to = dataStart, dataStart+modelSectors
		}
		for range rapid.IntRange(0, 5).Draw(t, "keys") {
			if from >= to {
				break
			}
			var k ondisk.Key
			k, from = drawKey(t, inode, from, to, base)
			list = append(list, k)
		}
	}
	return list
}

// drawBorders makes the positions at which leaves end, the last one being the top.
func drawBorders(t *rapid.T) []Pos {
	var list []Pos
	for range rapid.IntRange(0, 4).Draw(t, "splits") {
		list = append(list, Pos{rapid.Uint32Range(0, 1).Draw(t, "split inode"), rapid.Uint64Range(1, modelSectors).Draw(t, "split")})
	}
	slices.SortFunc(list, Pos.Compare)
	return append(slices.Compact(list), top)
}

// inLeaf returns what of k lies in the leaf between two borders; its size is 0 if nothing does.
func inLeaf(k ondisk.Key, from, to Pos) ondisk.Key {
	start, end := Pos{k.Inode(), k.Start()}, keyPos(&k)
	if k.Size() == 0 { // belongs where its end is
		if end.Compare(from) > 0 && end.Compare(to) <= 0 {
			return k
		}
		return ondisk.Key{}
	}
	if end.Compare(from) <= 0 || start.Compare(to) >= 0 {
		return ondisk.Key{}
	}
	if start.Compare(from) < 0 {
		k.CutFront(from.Sector)
	}
	if keyPos(&k).Compare(to) > 0 {
		k.CutBack(to.Sector)
	}
	return k
}

// drawSetOf builds a set from random keys, paints the model with them in the same order, and returns the
// generations that recovery must find.
func drawSetOf(t *rapid.T, b *build, m *model) gens {
	var base, want gens
	for i := range base {
		base[i] = rapid.Byte().Draw(t, "base generation")
		want[i] = base[i] + uint8(rapid.IntRange(0, 3).Draw(t, "written generation"))
		b.gens[dataBucket+uint64(i)] = want[i]
	}
	sets := make([][]ondisk.Key, rapid.IntRange(0, 5).Draw(t, "sets"))
	for i := range sets {
		sets[i] = drawSet(t, &base)
		for _, k := range sets[i] {
			m.paint(k)
		}
	}
	// What the sets hide does not tell generations.
	for i := range m {
		for _, c := range m[i] {
			if c.live {
				want.raise(c.ptr)
			}
		}
	}
	var children []ondisk.Key
	from := Pos{}
	for _, to := range drawBorders(t) {
		var node []bset
		for i, set := range sets {
			var keys []ondisk.Key
			for _, k := range set {
				if k = inLeaf(k, from, to); k.High != 0 {
					keys = append(keys, k)
				}
			}
			if len(keys) > 0 || i == 0 { // only the first may be empty
				node = append(node, bset{keys, uint32(rapid.IntRange(0, 1).Draw(t, "bset version"))})
			}
		}
		children = append(children, b.leaf(to, node...))
		from = to
	}
	drawInterior(t, b, children)

	for range rapid.IntRange(0, 6).Draw(t, "entries") {
		var keys []ondisk.Key
		for range rapid.IntRange(0, 6).Draw(t, "entry keys") {
			inode := rapid.Uint32Range(0, 1).Draw(t, "inode")
			start := uint64(0)
			if inode == 0 {
				start = dataStart
			}
			from := start + rapid.Uint64Range(0, modelSectors-1).Draw(t, "from")
			if k, _ := drawKey(t, inode, from, start+modelSectors, &base); k.Size() > 0 && k.Ptrs() <= 1 {
				keys = append(keys, k)
			}
		}
		if rapid.IntRange(0, 2).Draw(t, "next bucket") == 0 {
			b.nextBucket()
		}
		b.journal(keys...)
	}
	b.journal() // the newest
	needed := rapid.IntRange(1, len(b.entries)).Draw(t, "needed")
	b.newest().LastSeq = b.newest().Seq - uint64(needed) + 1
	for _, e := range b.entries[len(b.entries)-needed:] {
		err := e.EachKey(func(k *ondisk.Key) bool {
			if m.paint(*k); k.Ptrs() > 0 && !k.IsCheck() {
				want.raise(k.P[0])
			}
			return true
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return want
}

// drawInterior puts nodes over the leaves, with old children and freeing keys in between.
func drawInterior(t *rapid.T, b *build, children []ondisk.Key) {
	if len(children) == 1 && rapid.Bool().Draw(t, "root is a leaf") {
		b.root(children[0], 0)
		return
	}
	level := 0
	for len(children) > 1 || level == 0 || level < 3 && rapid.Bool().Draw(t, "one more level") {
		level++
		var above []ondisk.Key
		for len(children) > 0 {
			n := rapid.IntRange(min(2, len(children)), len(children)).Draw(t, "children")
			mine := children[:n]
			children = children[n:]
			sets := []bset{keySet()}
			for _, c := range mine {
				last := &sets[len(sets)-1]
				if rapid.IntRange(0, 3).Draw(t, "replaced") == 0 {
					old := withGen(1, ondisk.NewChild(c.Inode(), c.End(), 16, ondisk.MakePtr(1, b.geo.BucketStart(b.bucket()), 0)))
					last.keys = append(last.keys, old)
					sets = append(sets, keySet(freeingKey(old)))
					last = &sets[len(sets)-1]
				}
				last.keys = append(last.keys, c)
			}
			pos := keyPos(&mine[n-1])
			above = append(above, b.node(pos, sets))
		}
		children = above
	}
	b.root(children[0], level)
}

// sources says where each sector of the volume of an inode must come from.
func (m *model) sources(inode int, g gens) []source {
	first, other := 0, source{}
	if inode == 0 {
		first, other = dataStart, source{what: fromDisk}
	}
	list := make([]source, modelSectors)
	for i := range list {
		s := first + i
		list[i] = other
		if inode == 0 {
			list[i].sector = uint64(s)
		}
		if c := m[inode][s]; c.live && g[c.ptr.Sector()/16-dataBucket] == c.ptr.Gen() {
			list[i] = source{fromCache, c.ptr.Sector()}
		}
	}
	return list
}

// TestModel holds what Open makes of random sets, and what their volumes read, against the model.
func TestModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		align := rapid.SampledFrom([]int{512, 4096}).Draw(r, "alignment")
		b := newBuildOf(t, shape{align: align, journal: 8}) // all entries stay
		defer b.free()
		b.flash(1, "flash", modelSectors)
		var m model
		g := drawSetOf(r, b, &m)
		s, _ := b.check()
		for _, f := range s.Report.Findings() {
			if f.Severity > Harmless && f.Code != BucketShared { // two keys may well be drawn with one pointer
				r.Fatalf("found %v", &f)
			}
		}
		for i := range g {
			if got := s.Gen[dataBucket+i]; got != g[i] {
				r.Fatalf("bucket %d has generation %d, want %d", dataBucket+i, got, g[i])
			}
		}
		flash, err := OpenFlash(s, "flash")
		if err != nil {
			r.Fatal(err)
		}
		cached, dirty := int64(0), int64(0)
		for inode, v := range []*Volume{b.volume(s), flash} {
			want := m.sources(inode, g)
			got := sectorsOf(t, v)
			for i, w := range want {
				if got[i] != w {
					r.Fatalf("inode %d, sector %d is %v, want %v", inode, int(v.first)+i, got[i], w)
				}
				if w.what == fromCache {
					cached += 512
					if m[inode][int(v.first)+i].dirty {
						dirty += 512
					}
				}
			}
			readAtRandom(r, v, got)
		}
		if s.Stats.CachedBytes != cached || s.Stats.DirtyBytes != dirty {
			r.Fatalf("cached %d, dirty %d; want %d and %d", s.Stats.CachedBytes, s.Stats.DirtyBytes, cached, dirty)
		}
		used := uint64(0)
		for n := range uint64(modelBuckets) {
			used += uint64(s.Used[dataBucket+n])
		}
		if used != uint64(cached)/512 {
			r.Fatalf("%d sectors used, %d cached", used, cached/512)
		}
	})
}

// readAtRandom reads ranges of random place and size, some of them at the same time and into memory that the
// volume's devices would not take, and compares.
func readAtRandom(t *rapid.T, v *Volume, want []source) {
	io, err := blockdev.NewIO(v, rapid.IntRange(1, 8).Draw(t, "depth"))
	if err != nil {
		t.Fatal(err)
	}
	defer io.Close()
	var wg sync.WaitGroup
	failed := make(chan string, 16)
	for range 8 {
		n := rapid.IntRange(1, 40).Draw(t, "sectors")
		at := rapid.IntRange(0, len(want)-n).Draw(t, "at")
		odd := rapid.IntRange(0, 511).Draw(t, "unaligned by")
		wg.Go(func() {
			buf := make([]byte, odd+n*512)[odd:]
			if err := io.ReadAt(buf, int64(at)*512); err != nil {
				failed <- err.Error()
				return
			}
			for i := range n {
				if got := sourceOf(buf[i*512:]); got != want[at+i] {
					failed <- fmt.Sprintf("read of %d at %d: sector %d is %v, want %v", n, at, i, got, want[at+i])
					return
				}
			}
		})
	}
	wg.Wait()
	select {
	case s := <-failed:
		t.Fatal(s)
	default:
	}
}
