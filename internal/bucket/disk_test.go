package bucket

import (
	"fmt"
	"maps"
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A view is what a power cut would leave: the journal up to entry P, and for each leaf the old or the new parent.
type view struct {
	head   wheader
	leaves []ondisk.Ptr
	keys   []wkey // after replay
	gens   map[uint32]uint8
	replay []wjkey
}

// view works out what is there if the newest entry is p and, where newParent says so, pending appends of the
// parent made it.
func (w *world) view(p uint64, newParent func(leaf int) bool) view {
	v := view{head: w.journal[p-1].head, gens: map[uint32]uint8{}}
	b := v.head.prio
	for first := uint64(0); first < w.g.NBuckets; first += w.g.PrioPerBucket {
		c := w.contents[b]
		if c == nil || c.prio == nil || c.prio.Seq != v.head.prioSeq {
			w.expect("entry %d names prio sets %d at bucket %d, which holds %+v", p, v.head.prioSeq, b, c)
			return v
		}
		for i := first; i < min(first+w.g.PrioPerBucket, w.g.NBuckets); i++ {
			_, v.gens[uint32(i)] = c.prio.Entry(int(i - first))
		}
		b = uint32(c.prio.NextBucket)
	}
	if c := w.contents[v.head.uuid]; c == nil || c.uuid != v.head.uuidUser {
		w.expect("entry %d names a uuid array at bucket %d, which holds %+v", p, v.head.uuid, c)
	}
	raise := func(ptr ondisk.Ptr) {
		b := w.bucket(ptr)
		if ondisk.GenAfter(ptr.Gen(), v.gens[b]) != 0 {
			v.gens[b] = ptr.Gen()
		}
	}
	freeing := w.freeing
	for i, l := range w.leaves {
		at := l.disk
		if l.free != 0 && newParent(i) {
			at = l.node
		}
		v.leaves = append(v.leaves, at)
		if l.free != 0 && !newParent(i) { // its freeing key is not there
			freeing = slices.DeleteFunc(slices.Clone(freeing), func(f ondisk.Ptr) bool { return w.bucket(f) == l.free && f.Gen() == l.disk.Gen()+1 })
		}
	}
	for _, f := range freeing {
		raise(f)
	}
	for i, at := range v.leaves {
		raise(at)
		c := w.contents[w.bucket(at)]
		if c == nil || c.node == nil || c.gen != at.Gen() {
			w.expect("leaf %d at bucket %d gen %d was overwritten by %+v", i, w.bucket(at), at.Gen(), c)
			return v
		}
		v.keys = append(v.keys, c.node...)
	}
	for _, k := range v.keys {
		if k.some {
			raise(k.ptr)
		}
	}
	for _, e := range w.journal[v.head.lastSeq-1 : p] {
		for _, k := range e.keys {
			v.keys[k.slot] = k.key
			v.replay = append(v.replay, k)
			if k.key.some {
				raise(k.key.ptr)
			}
		}
	}
	for i, at := range v.leaves {
		if ondisk.GenAfter(v.gens[w.bucket(at)], at.Gen()) != 0 {
			w.expect("leaf %d at bucket %d gen %d is stale, its bucket is stored as %d", i, w.bucket(at), at.Gen(), v.gens[w.bucket(at)])
		}
	}
	for slot, k := range v.keys {
		if !k.some {
			continue
		}
		b := w.bucket(k.ptr)
		stale := ondisk.GenAfter(v.gens[b], k.ptr.Gen()) != 0
		c := w.contents[b]
		off := w.g.Remainder(k.ptr.Sector())
		switch {
		case stale && k.dirty:
			w.expect("entry %d: dirty slot %d in bucket %d gen %d is stale: the bucket is at %d", p, slot, b, k.ptr.Gen(), v.gens[b])
		case stale:
		case c == nil || c.gen != k.ptr.Gen() || c.data[off] != k.ver:
			w.expect("entry %d: slot %d, bucket %d gen %d offset %d version %d, finds %+v", p, slot, b, k.ptr.Gen(), off, k.ver, c)
		}
	}
	return v
}

// views calls fn for what a power cut could leave now.
func (w *world) views(fn func(p uint64, v view)) {
	for p := w.durable; p <= uint64(len(w.journal)); p++ {
		for _, made := range []bool{false, true} {
			v := w.view(p, func(int) bool { return made })
			fn(p, v)
		}
	}
}

// load builds a table from a view, as a start would.
func (w *world) load(v view) *Loader {
	l, err := NewLoader(nil, &w.g, worldOptions)
	if err != nil {
		panic(err)
	}
	for b := range uint32(4) {
		l.Fixed(b + 3)
	}
	for i, b := 0, v.head.prio; i < int(w.g.NPrio); i++ {
		c := w.contents[b]
		l.PrioSet(i, b, c.prio)
		l.Meta(b)
		b = uint32(c.prio.NextBucket)
	}
	l.Meta(v.head.uuid)
	for _, at := range v.leaves {
		l.Node(at)
		for _, k := range w.contents[w.bucket(at)].node {
			if k.some {
				l.Extent(k.ptr, k.n, k.dirty)
			}
		}
	}
	for _, f := range w.freeing {
		keep := true
		for i, l := range w.leaves {
			if l.free != 0 && w.bucket(f) == l.free && v.leaves[i] == l.disk && f.Gen() == l.disk.Gen()+1 {
				keep = false
			}
		}
		if keep {
			l.Pointer(f)
		}
	}
	return l
}

// crash cuts the power and starts again from what that leaves.
func (w *world) crash(p uint64, newParent func(int) bool) {
	v := w.view(p, newParent)
	l := w.load(v)
	var pinned []uint32
	for _, k := range v.replay {
		if k.key.some {
			b, _ := l.Journal(k.key.ptr)
			pinned = append(pinned, b)
		} else {
			pinned = append(pinned, 0)
		}
	}
	t, rep := l.Finish(p, v.head.lastSeq)
	if rep.Conflicts+rep.Outside+rep.Overfull != 0 {
		w.expect("load: %+v", rep)
	}
	w.t = t
	w.journal = w.journal[:p]
	w.durable, w.openSeq, w.entry, w.header = p, p+1, wentry{}, v.head
	w.uuid, w.uuidFor, w.flight, w.open = v.head.uuid, 0, nil, map[string]*wopen{}
	w.written, w.batchFor, w.encoding, w.trims = false, 0, 0, nil
	w.prioSeq += 10
	kept := w.freeing[:0:0]
	for _, f := range w.freeing {
		for i, l := range w.leaves {
			if l.free != 0 && w.bucket(f) == l.free && v.leaves[i] == l.disk {
				goto next
			}
		}
		kept = append(kept, f)
	next:
	}
	w.freeing = kept
	for i := range w.leaves {
		w.leaves[i] = wleaf{node: v.leaves[i], disk: v.leaves[i]}
		copy(w.mem[i*perLeaf:], w.contents[w.bucket(v.leaves[i])].node)
	}
	for _, e := range w.journal[v.head.lastSeq-1:] {
		for _, k := range e.keys {
			w.pin(k.slot/perLeaf, e.seq)
		}
	}
	if err := t.AllocatePrioSets(); err != nil {
		w.expect("start: %v: %v", err, t.Counts())
	}
	t.broken = w.brk
	w.runBatch()
	for i, k := range v.replay {
		var d Deltas
		if old := w.mem[k.slot]; old.some {
			d.Drop(t, old.ptr, old.n, old.dirty)
		}
		if k.key.some {
			d.Put(t, k.key.ptr, k.key.n, k.key.dirty)
		}
		w.mem[k.slot] = k.key
		t.Apply(&d, w.openSeq, true)
		if pinned[i] != 0 {
			t.Unpin(pinned[i])
		}
	}
}

// check compares everything with everything.
func (w *world) check() {
	t := w.t
	if err := t.Check(); err != nil {
		w.expect("%v", err)
	}
	rc := t.NewRecount(0, 1<<32-1) // I1
	for _, k := range w.mem {
		if k.some {
			rc.Add(k.ptr, k.n, k.dirty)
		}
	}
	for from, done := uint32(0), false; !done; {
		from, done = rc.Compare(from, func(b, live, dirty uint32) { w.expect("%v: recount has %d, %d (I1)", t.Info(b), live, dirty) }, nil)
	}
	pins := map[uint32]uint32{}
	for _, o := range w.open {
		pins[o.bucket]++
	}
	for _, f := range w.flight {
		pins[f.bucket]++
	}
	meta := 1 + 2*int(w.g.NPrio)
	for _, l := range w.leaves {
		meta++
		if l.free != 0 {
			meta++
		}
	}
	for _, b := range slices.Sorted(maps.Keys(pins)) {
		if i := t.Info(b); i.Pins != pins[b] {
			w.expect("%v: should have %d pins", i, pins[b])
		}
	}
	gated := t.gates.n
	if c := t.Counts(); c[Meta] != meta+gated {
		w.expect("%d buckets of metadata, should be %d (I8)", c[Meta], meta+gated)
	}
	if a := t.Anomalies(); len(a) != 0 {
		w.expect("anomaly: %v", a[0])
	}
	w.views(func(p uint64, v view) {
		w.checkLag(v)
		w.checkRoom(p, v)
	})
}

// checkLag is I5: no pointer is older than is known.
func (w *world) checkLag(v view) {
	see := func(what string, p ondisk.Ptr) {
		i := w.t.Info(w.bucket(p))
		if age := ondisk.GenAfter(i.Gen, p.Gen()); age > i.Gen-i.Oldest {
			w.expect("%s: pointer of gen %d, %v (I5)", what, p.Gen(), i)
		}
	}
	for i := range v.leaves {
		for _, k := range w.contents[w.bucket(v.leaves[i])].node {
			if k.some {
				see("leaf", k.ptr)
			}
		}
	}
	for _, k := range v.replay {
		if k.key.some {
			see("journal", k.key.ptr)
		}
	}
	for _, k := range w.mem {
		if k.some {
			see("memory", k.ptr)
		}
	}
	for _, f := range w.freeing {
		see("parent", f)
	}
}

// checkRoom looks at the head-room in what the kernel would see, after replay.
func (w *world) checkRoom(p uint64, v view) {
	clean, dirty, meta := map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{v.head.uuid: true}
	for _, k := range v.keys {
		if b := w.bucket(k.ptr); k.some && v.gens[b] == k.ptr.Gen() {
			clean[b] = true
			if k.dirty {
				dirty[b] = true
			}
		}
	}
	for _, at := range v.leaves {
		meta[w.bucket(at)] = true
		// what the leaves hold before replay is live too, when the kernel starts
		for _, k := range w.contents[w.bucket(at)].node {
			if b := w.bucket(k.ptr); k.some && v.gens[b] == k.ptr.Gen() {
				clean[b] = true
				if k.dirty {
					dirty[b] = true
				}
			}
		}
	}
	for _, k := range v.replay {
		if b := w.bucket(k.key.ptr); k.key.some && v.gens[b] == k.key.ptr.Gen() {
			clean[b] = true
			if k.key.dirty {
				dirty[b] = true
			}
		}
	}
	total := int(w.g.NBuckets) - 7 - len(meta) - int(w.g.NPrio)
	if free := total - len(clean); free < w.t.spare() {
		w.expect("entry %d: %d unused buckets, want %d: %v", p, free, w.t.spare(), w.t.Counts())
	}
	if free := total - len(dirty); free < w.t.spare()+int(w.g.KernelFreeInc) {
		w.expect("entry %d: %d reusable buckets: %v", p, free, w.t.Counts())
	}
}

func (c *content) String() string {
	if c == nil {
		return "nothing"
	}
	return fmt.Sprintf("gen %d, data %v, node %v, prio %v, uuid %d", c.gen, c.data, c.node != nil, c.prio != nil, c.uuid)
}
