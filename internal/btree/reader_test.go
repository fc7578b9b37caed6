package btree

import (
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A reader merges what is on the disk, independently of the tree: cells of all inodes.
type reader struct {
	*rig
	gens  []uint8
	cells [][]cell
	nodes map[uint64]bool // buckets
}

// read reads the disk as a kernel would after a crash, and applies the journal.
func (r *rig) read() *reader {
	r.Helper()
	d := &reader{rig: r, gens: slices.Clone(r.saved), nodes: map[uint64]bool{}}
	for range r.model {
		d.cells = append(d.cells, make([]cell, r.sectors))
	}
	key := r.durableRoot.Key()
	d.raise(&key)
	d.node(&key, int(r.durableRoot.Level), Pos{})
	for _, j := range r.journal {
		if j.seq >= r.lastSeq {
			d.put(&j.key)
		}
	}
	return d
}

func (d *reader) raise(k *ondisk.Key) {
	if b := d.geo.Bucket(k.P[0].Sector()); ondisk.GenAfter(d.gens[b], k.P[0].Gen()) == 0 {
		d.gens[b] = k.P[0].Gen()
	}
}

func (d *reader) put(k *ondisk.Key) {
	for s := k.Start(); s < k.End(); s++ {
		c := &d.cells[k.Inode()][s]
		*c = cell{}
		if k.Ptrs() > 0 {
			*c = cell{ptr: k.P[0].Advance(s - k.Start()), dirty: k.Dirty()}
		}
	}
}

func (d *reader) node(ref *ondisk.Key, level int, low Pos) {
	d.Helper()
	at := ref.P[0].Sector()
	n := ondisk.DecodeNode(d.disk[at*512:(at+uint64(ref.Size()))*512], &d.geo, ref)
	if n.Err != nil {
		d.Fatalf("node %v: %v", ref, n.Err)
	}
	d.nodes[d.geo.Bucket(at)] = true
	high := Pos{ref.Inode(), ref.End()}
	var keys []ondisk.Key
	var sums []Extent // merged, to know how many there are
	for i := range n.Sets {
		var last Pos
		err := n.Sets[i].EachKey(func(k *ondisk.Key) bool {
			p := Pos{k.Inode(), k.End()}
			start := p
			if level == 0 {
				start.Sector = k.Start()
				if f := d.geo.LeafFault(k); f != ondisk.FaultNone {
					d.Fatalf("leaf %v has %v: %v", ref, k, f)
				}
				d.put(k)
				sums = merge(sums, extentOf(k))
			} else if f := d.geo.NodeFault(k); f != ondisk.FaultNone {
				d.Fatalf("node %v has %v: %v", ref, k, f)
			}
			if !k.IsFreeing() && (start.Less(last) || start.Less(low) || high.Less(p) || level > 0 && !low.Less(p)) {
				d.Fatalf("node %v from %v: %v is out of order or range", ref, low, k)
			}
			if !k.IsFreeing() {
				last = p
			}
			keys = append(keys, *k)
			return true
		})
		if err != nil {
			d.Fatalf("node %v: %v", ref, err)
		}
		words := 0
		for i := range sums {
			words += sums[i].words()
		}
		upTo := int(n.Used)
		if i+1 < len(n.Sets) {
			upTo = int(n.Sets[i+1].Block)
		}
		if len(sums) > 0 && 32+8*words > upTo*d.geo.BlockBytes() {
			d.Fatalf("leaf %v: after set %d the merged keys take %d words, in %d blocks", ref, i, words, upTo)
		}
	}
	if level == 0 {
		return
	}
	for i := range keys {
		d.raise(&keys[i])
	}
	sortKeys(keys)
	from := low
	for i := range keys {
		k := &keys[i]
		if k.IsFreeing() || d.gens[d.geo.Bucket(k.P[0].Sector())] != k.P[0].Gen() {
			continue
		}
		if p := (Pos{k.Inode(), k.End()}); !from.Less(p) {
			d.Fatalf("node %v has two live children up to %v", ref, p)
		}
		d.node(k, level-1, from)
		from = Pos{k.Inode(), k.End()}
	}
	if from != high {
		d.Fatalf("node %v: live children reach to %v", ref, from)
	}
}

// merge lays x over a sorted list, the slow way.
func merge(list []Extent, x Extent) []Extent {
	var out []Extent
	for _, o := range list {
		if o.Inode != x.Inode || o.End() <= x.Start || o.Start >= x.End() {
			out = append(out, o)
			continue
		}
		if o.Start < x.Start {
			out = append(out, o.clip(o.Start, x.Start))
		}
		if o.End() > x.End() {
			out = append(out, o.clip(x.End(), o.End()))
		}
	}
	return append(out, x)
}

// compareDisk holds what a crash now would leave against the model.
func (r *rig) compareDisk() {
	r.Helper()
	d := r.read()
	for i := range r.model {
		for s := range r.model[i] {
			want, got := &r.model[i][s], &d.cells[i][s]
			liveGot := got.ptr != 0 && d.gens[r.geo.Bucket(got.ptr.Sector())] == got.ptr.Gen()
			switch {
			case liveGot && (!r.live(want) || got.ptr != want.ptr || got.dirty != want.dirty):
				r.Fatalf("%d:%d: the disk says %v dirty %v, want %v %v", i, s, got.ptr, got.dirty, want.ptr, want.dirty)
			case liveGot && want.epoch != 0 && want.epoch >= r.flushes[i]:
				r.Fatalf("%d:%d: on the disk in epoch %d, flush %d is done", i, s, want.epoch, r.flushes[i])
			case !liveGot && r.live(want) && !want.strict:
				r.Fatalf("%d:%d: the disk says nothing, want %v dirty %v", i, s, want.ptr, want.dirty)
			}
		}
	}
}

// crash forgets what is in memory and opens the set again.
func (r *rig) crash() {
	r.Helper()
	r.compareDisk()
	d := r.read()
	r.appends, r.rewrites, r.parents = nil, nil, nil
	copy(r.gens[:r.buckets/4], d.gens) // of nodes
	r.meta = r.meta[:0]
	for b := uint64(r.buckets/4) - 1; b >= firstMeta; b-- {
		if !d.nodes[b] {
			r.gens[b]++ // whatever was in it
			r.saved[b] = r.gens[b]
			r.scribble(b)
			r.meta = append(r.meta, b)
		}
	}
	for i := range r.model {
		for s := range r.model[i] {
			c, got := &r.model[i][s], d.cells[i][s]
			if c.strict && got.ptr == 0 {
				*c = cell{}
			}
			c.strict, c.epoch = false, 0
		}
	}
	r.tree = New(&r.geo, r.durableRoot, r.gen)
	r.counts = map[uint64][2]int{}
	journal, from := r.journal, r.lastSeq
	r.replaying = true
	for _, j := range journal {
		if j.seq < from {
			continue
		}
		for more, k := true, j.key; more; more, k = r.change.More, r.change.Rest {
			for !r.met(r.tree.Insert(&k, 0, &r.change)) {
			}
			r.tree.Pin(r.change.Leaf, j.seq)
		}
	}
	r.counts = r.counted()
	r.replaying = false
}
