package btree

import (
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A tb is what a rig needs of a test, plain or of rapid.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

// A shape is what a rig's set looks like.
type shape struct {
	buckets       int
	bucketSectors int
	blockSectors  int
	inodes        int
	sectors       uint64 // of each inode
}

// A cell is what the model knows of one sector.
type cell struct {
	ptr    ondisk.Ptr // 0: not cached
	dirty  bool
	epoch  uint64 // must not be on the disk with its pointer before a younger flush
	strict bool   // may be lost in a crash
}

// An entry of the journal: one key.
type journalled struct {
	seq uint64
	key ondisk.Key
}

// A rig plays the set around a tree: a disk, buckets with generations, a journal, and what is in flight, each
// step of which it makes when told. Its model is one cell for each sector.
type rig struct {
	tb
	shape
	super ondisk.Superblock
	geo   ondisk.Geometry
	disk  []byte
	gens  []uint8 // in memory
	saved []uint8 // in the prio sets: not raised for nodes that something on the disk may refer to
	meta  []uint64
	data  struct{ bucket, used uint64 } // write point

	tree        *Tree
	durableRoot Ref
	lowered     int
	appends     []*flight
	rewrites    []*remake
	parents     []*Node

	seq, lastSeq uint64
	replaying    bool
	journal      []journalled
	flushes      []uint64 // done, by inode

	model  [][]cell
	counts map[uint64][2]int // bucket and generation: live and dirty sectors, by what changes say
	change Change
	rand   uint64
	splits int
}

type flight struct {
	a      *Append
	writes []Write
}

type remake struct {
	rw      *Rewrite
	buckets []uint64
	written bool
}

const firstMeta = 40 // the first bucket for nodes; a quarter of the buckets is for nodes

func newRig(t tb, s shape) *rig {
	r := &rig{tb: t, shape: s, counts: map[uint64][2]int{}, rand: 1, seq: 1, lastSeq: 1}
	r.super = ondisk.Superblock{
		Offset: ondisk.SuperblockSector, Version: ondisk.VersionCache, Magic: ondisk.Magic, UUID: ondisk.UUID{1}, SetUUID: ondisk.UUID{2, 3},
		Flags: ondisk.FlagSync, Seq: 1, Word184: uint64(s.buckets), BlockSize: uint16(s.blockSectors), BucketSize16: uint16(s.bucketSectors),
		NrInSet: 1, FirstBucket: uint16(23/s.bucketSectors + 1), NJournal: 24,
	}
	for i := range int(r.super.NJournal) {
		r.super.D[i] = uint64(r.super.FirstBucket) + uint64(i)
	}
	r.geo = ondisk.NewGeometry(&r.super)
	r.geo.NrUUIDs = max(r.geo.NrUUIDs, 8)
	r.gens, r.saved = make([]uint8, s.buckets), make([]uint8, s.buckets)
	for i := range r.gens {
		r.gens[i], r.saved[i] = 1, 1
	}
	r.disk = make([]byte, (s.buckets/4)*s.bucketSectors*512)
	for b := s.buckets/4 - 1; b >= firstMeta; b-- {
		r.scribble(uint64(b))
		r.meta = append(r.meta, uint64(b))
	}
	r.data.bucket = uint64(s.buckets / 4)
	r.model = make([][]cell, s.inodes)
	for i := range r.model {
		r.model[i] = make([]cell, s.sectors)
	}
	r.flushes = make([]uint64, s.inodes)
	// An empty root.
	p := r.newBucket()
	b := make([]byte, r.geo.BlockBytes())
	ondisk.EncodeBSet(b, r.geo.BSetMagic(), 0x77, p, nil)
	copy(r.disk[p.Sector()*512:], b)
	r.durableRoot = Ref{Sectors: r.geo.NodeSectors, Ptr: p, High: MaxPos}
	r.tree = New(&r.geo, r.durableRoot, r.gen)
	return r
}

func (r *rig) gen(b uint64) uint8 { return r.gens[b] }

func (r *rig) random() uint64 {
	r.rand += 0x9e3779b97f4a7c15 // splitmix64
	z := (r.rand ^ r.rand>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// scribble fills a bucket with junk, so that whoever reads what was freed sees it.
func (r *rig) scribble(b uint64) {
	at := r.disk[r.geo.BucketStart(b)*512:][:r.geo.BucketBytes()]
	for i := range at {
		at[i] = byte(0xa5 + i)
	}
}

func (r *rig) newBucket() ondisk.Ptr {
	if len(r.meta) == 0 {
		r.Fatalf("no bucket for a node is left")
	}
	b := r.meta[len(r.meta)-1]
	r.meta = r.meta[:len(r.meta)-1]
	return ondisk.MakePtr(r.gens[b], r.geo.BucketStart(b), 0)
}

// release takes back what the tree says is free.
func (r *rig) release(freed []Ref) {
	for _, f := range freed {
		b := r.geo.Bucket(f.Ptr.Sector())
		if r.gens[b] != f.Ptr.Gen()+1 || slices.Contains(r.meta, b) {
			r.Fatalf("bucket %d of generation %d is freed, pointer %d", b, r.gens[b], f.Ptr.Gen())
		}
		r.saved[b] = r.gens[b]
		r.scribble(b)
		r.meta = slices.Insert(r.meta, 0, b)
	}
}

// load reads a node.
func (r *rig) load(ref Ref) {
	r.Helper()
	at := ref.Ptr.Sector() * 512
	n, err := Parse(&r.geo, ref, r.disk[at:at+uint64(ref.Sectors)*512])
	if err != nil {
		r.Fatalf("%v: %v", ref, err)
	}
	if n.full {
		r.Fatalf("%v: the merged keys do not fit in its %d blocks", ref, n.used)
	}
	n.EachRef(func(p ondisk.Ptr) {
		if b := r.geo.Bucket(p.Sector()); ondisk.GenAfter(r.gens[b], p.Gen()) == 0 {
			r.gens[b] = p.Gen()
		}
	})
	if o, err := r.tree.Attach(n); o != Done || err != nil {
		r.Fatalf("%v is not attached: %v, %v", ref, o, err)
	}
}

// space returns a place for that many sectors of data; what was there before is stale.
func (r *rig) space(n int) ondisk.Ptr {
	if r.data.used+uint64(n) > uint64(r.bucketSectors) {
		if r.data.bucket++; r.data.bucket == uint64(r.buckets) {
			r.data.bucket = uint64(r.buckets / 4)
		}
		r.invalidate(r.data.bucket)
		r.data.used = 0
	}
	p := ondisk.MakePtr(r.gens[r.data.bucket], r.geo.BucketStart(r.data.bucket)+r.data.used, 0)
	r.data.used += uint64(n)
	return p
}

func (r *rig) invalidate(b uint64) {
	r.gens[b]++
	r.saved[b] = r.gens[b]
	if b == r.data.bucket {
		r.data.used = uint64(r.bucketSectors)
	}
}

func (r *rig) live(c *cell) bool {
	return c.ptr != 0 && r.gens[r.geo.Bucket(c.ptr.Sector())] == c.ptr.Gen()
}

// insert stores a key, whatever that takes, in the tree, the journal and the model.
func (r *rig) insert(k ondisk.Key, epoch uint64) {
	r.Helper()
	for more := true; more; more, k = r.change.More, r.change.Rest {
		for {
			o := r.tree.Insert(&k, epoch, &r.change)
			if r.met(o) {
				break
			}
		}
		r.took(epoch)
	}
}

// replace stores k where old still is, and returns how many sectors that were.
func (r *rig) replace(old, k ondisk.Key) (sectors int) {
	r.Helper()
	for more := true; more; more, k = r.change.More, r.change.Rest {
		for {
			o := r.tree.Replace(&old, &k, 0, &r.change)
			if o == NoMatch {
				return sectors
			}
			if r.met(o) {
				break
			}
		}
		sectors += int(r.change.Stored.Size)
		r.took(0)
	}
	return sectors
}

// met does what the outcome of an insertion asks for, and reports whether it is done.
func (r *rig) met(o Outcome) bool {
	r.Helper()
	switch o {
	case Done:
		return true
	case NeedsNode:
		r.load(r.change.Miss)
	case NeedsRoom:
		r.settle()
		if !r.change.Leaf.Gone() {
			r.begin(r.change.Leaf)
			r.settle()
		}
		if !r.change.Leaf.Gone() {
			r.Fatalf("%v was not rewritten", r.change.Leaf.Ref())
		}
	default:
		r.Fatalf("outcome %v", o)
	}
	return false
}

// took holds a change against the model and the accounts, and makes the same change there.
func (r *rig) took(epoch uint64) {
	r.Helper()
	c := &r.change
	x := c.Stored
	k := x.Key()
	if x.Held() {
		k = ondisk.NewInvalidation(x.Inode, x.End(), uint32(x.Size))
	}
	r.journal = append(r.journal, journalled{r.seq, k})
	r.tree.Pin(c.Leaf, r.seq)
	r.seq++
	m := r.model[x.Inode]
	at := x.Start
	for i := range c.Removed {
		f := &c.Removed[i]
		if f.Inode != x.Inode || f.Start < at || f.End() > x.End() || f.Size == 0 {
			r.Fatalf("%v is said to have removed %v", x, *f)
		}
		r.noLive(m, at, f.Start)
		for s := f.Start; s < f.End(); s++ {
			o := &m[s]
			p := f.Ptr.Advance(s - f.Start)
			if !f.HasPtr() {
				p = 0
			}
			if r.live(o) && (p != o.ptr || f.Dirty() != o.dirty) || !r.live(o) && f.HasPtr() && p != o.ptr {
				r.Fatalf("%v is said to have removed %v; sector %d had %v", x, *f, s, o.ptr)
			}
		}
		if f.HasPtr() {
			r.account(f.Ptr, -int(f.Size), f.Dirty())
		}
		at = f.End()
	}
	r.noLive(m, at, x.End())
	if x.HasPtr() {
		r.account(x.Ptr, int(x.Size), x.Dirty())
	}
	for s := x.Start; s < x.End(); s++ {
		m[s] = cell{}
		if x.HasPtr() {
			m[s] = cell{ptr: x.Ptr.Advance(s - x.Start), dirty: x.Dirty(), epoch: epoch, strict: epoch != 0}
		}
	}
}

func (r *rig) noLive(m []cell, from, to uint64) {
	r.Helper()
	for s := from; s < to; s++ {
		if r.live(&m[s]) {
			r.Fatalf("the change does not say that it removed sector %d, %v", s, m[s].ptr)
		}
	}
}

func (r *rig) account(p ondisk.Ptr, n int, dirty bool) {
	id := r.geo.Bucket(p.Sector())<<8 | uint64(p.Gen())
	c := r.counts[id]
	c[0] += n
	if dirty {
		c[1] += n
	}
	r.counts[id] = c
}

// counted returns what the accounts should say, from the model.
func (r *rig) counted() map[uint64][2]int {
	m := map[uint64][2]int{}
	for i := range r.model {
		for s := range r.model[i] {
			if c := &r.model[i][s]; r.live(c) {
				id := r.geo.Bucket(c.ptr.Sector())<<8 | uint64(c.ptr.Gen())
				n := m[id]
				n[0]++
				if c.dirty {
					n[1]++
				}
				m[id] = n
			}
		}
	}
	return m
}

// compare holds the tree against the model: lookups, accounts, and what the tree must hold to.
func (r *rig) compare() {
	r.Helper()
	if err := r.tree.Check(); err != nil {
		r.Fatalf("%v", err)
	}
	want := r.counted()
	for id, c := range r.counts {
		if b := id >> 8; uint8(id) == r.gens[b] && want[id] != c {
			r.Fatalf("bucket %d: %v sectors live and dirty, by account %v", b, want[id], c)
		}
	}
	for id, c := range want {
		if r.counts[id] != c {
			r.Fatalf("bucket %d: %v sectors live and dirty, by account %v", id>>8, c, r.counts[id])
		}
	}
	for i := range r.model {
		for s := uint64(0); s < r.sectors; {
			p, miss := r.tree.Lookup(uint32(i), s, r.sectors)
			if !miss.IsZero() {
				r.load(miss)
				continue
			}
			if p.Start != s || p.End <= s || p.End > r.sectors {
				r.Fatalf("lookup of %d:%d gives %+v", i, s, p)
			}
			for ; s < p.End; s++ {
				c := &r.model[i][s]
				at := p.Ptr.Advance(s - p.Start)
				if r.live(c) && (!p.Cached || at != c.ptr || p.Dirty != c.dirty) ||
					!r.live(c) && p.Cached && r.live(&cell{ptr: at}) {
					r.Fatalf("%d:%d is %v dirty %v, lookup gives %+v", i, s, c.ptr, c.dirty, p)
				}
			}
		}
	}
}

// The steps of what is in flight.

func (r *rig) freeze(n *Node) Outcome {
	a, o := r.tree.Freeze(n)
	if o == Done {
		f := &flight{a: a, writes: a.Encode(make([]byte, a.Bytes()), 512)}
		r.appends = append(r.appends, f)
	}
	return o
}

func (r *rig) write(ws []Write) {
	for _, w := range ws {
		copy(r.disk[w.Off:], w.Data)
	}
}

// finish writes the rest of an append and finishes it.
func (r *rig) finish(i int) {
	f := r.appends[i]
	r.appends = slices.Delete(r.appends, i, i+1)
	r.write(f.writes)
	r.release(r.tree.Finish(f.a, nil))
	r.advance()
}

// advance moves last_seq on.
func (r *rig) advance() {
	r.Helper()
	if r.replaying {
		return // what is not inserted yet is needed, too
	}
	last, _ := r.tree.OldestPin()
	if last == 0 {
		last = r.seq
	}
	if last < r.lastSeq {
		r.Fatalf("entry %d is needed, and was let go: %d was the oldest", last, r.lastSeq)
	}
	r.lastSeq = last
}

func (r *rig) begin(victims ...*Node) Outcome {
	rw, o := r.tree.Begin(victims...)
	if o != Done {
		return o
	}
	r.rewrites = append(r.rewrites, &remake{rw: rw})
	return o
}

// make writes the new nodes of a rewrite.
func (r *rig) make(m *remake) {
	if m.written {
		return
	}
	for i := range m.rw.Nodes() {
		p := r.newBucket()
		m.buckets = append(m.buckets, r.geo.Bucket(p.Sector()))
		m.rw.Assign(i, p, r.random())
	}
	for i := range m.rw.Nodes() {
		r.write(m.rw.Encode(i, make([]byte, m.rw.Bytes(i))))
	}
	m.written = true
}

// install tries the ith rewrite.
func (r *rig) install(i int) (progress bool) {
	r.Helper()
	m := r.rewrites[i]
	if !m.rw.Copy(1 + int(r.random()%60)) {
		return true
	}
	if v := len(m.rw.victims); v > 1 && m.rw.Nodes() >= v {
		r.giveUp(i)
		return true
	}
	r.make(m)
	in, o := m.rw.Install()
	switch o {
	case Done:
		if len(in.New) > len(in.Old) {
			r.splits++
		}
		for _, old := range in.Old {
			r.gens[r.geo.Bucket(old.Ptr.Sector())]++
		}
		if in.Parent != nil {
			r.parents = append(r.parents, in.Parent)
		}
	case Busy:
		return false
	case NeedsRewrite:
		return r.begin(in.Parent) == Done
	case Gone:
		m.rw.Abort()
		for _, b := range m.buckets {
			r.scribble(b)
			r.meta = slices.Insert(r.meta, 0, b)
		}
	default:
		r.Fatalf("install: %v", o)
	}
	r.rewrites = slices.Delete(r.rewrites, i, i+1)
	return true
}

func (r *rig) giveUp(i int) {
	m := r.rewrites[i]
	m.rw.Abort()
	for _, b := range m.buckets {
		r.scribble(b)
		r.meta = slices.Insert(r.meta, 0, b)
	}
	r.rewrites = slices.Delete(r.rewrites, i, i+1)
	r.advance()
}

// rootDurable writes the journal entry with the newest root.
func (r *rig) rootDurable() bool {
	if r.tree.Root() == r.durableRoot {
		return false
	}
	r.durableRoot = r.tree.Root()
	r.release(r.tree.RootDurable(r.durableRoot, nil))
	r.advance()
	return true
}

// lower makes the only child of the root the root, and reports whether it could.
func (r *rig) lower() bool {
	old, o := r.tree.Lower()
	for o == NeedsNode {
		r.load(old)
		old, o = r.tree.Lower()
	}
	if o == Done {
		r.gens[r.geo.Bucket(old.Ptr.Sector())]++
		r.lowered++
	}
	return o == Done
}

// settle brings all that is in flight to its end.
func (r *rig) settle() {
	r.Helper()
	for range 1000 {
		progress := r.rootDurable()
		for len(r.appends) > 0 {
			r.finish(0)
			progress = true
		}
		for i := 0; i < len(r.parents); i++ {
			switch r.freeze(r.parents[i]) {
			case Done, Nothing, Gone:
				r.parents = slices.Delete(r.parents, i, i+1)
				i--
				progress = true
			case Busy:
			default:
				r.Fatalf("%v cannot be appended to", r.parents[i].Ref())
			}
		}
		for i := len(r.rewrites) - 1; i >= 0; i-- {
			progress = r.install(i) || progress
		}
		if !progress && len(r.appends) == 0 {
			if len(r.rewrites)+len(r.parents) > 0 {
				r.Fatalf("%d rewrites and %d parents do not come to their end", len(r.rewrites), len(r.parents))
			}
			return
		}
	}
	r.Fatalf("what is in flight never comes to its end")
}

// sync makes all that can be durable so.
func (r *rig) sync() {
	r.Helper()
	r.settle()
	for {
		var again []*Node
		for _, n := range slices.Clone(r.tree.nodes) {
			if n.Gone() || !n.Dirty() {
				continue
			}
			switch r.freeze(n) {
			case Done, Nothing:
			case NeedsRewrite:
				if r.begin(n) == Done {
					again = append(again, n)
				}
			default:
				r.Fatalf("%v", n.Ref())
			}
		}
		r.settle()
		if len(again) == 0 {
			return
		}
	}
}

// each calls fn with what the tree holds.
func (r *rig) each(fn func(x Extent) bool) {
	for from := (Pos{}); from.Less(MaxPos); {
		next, miss := r.tree.Scan(from, MaxPos, 1<<30, fn)
		if !miss.IsZero() {
			r.load(miss)
		}
		from = next
	}
}

func (r *rig) node(level int, p Pos) *Node {
	r.Helper()
	for {
		n, miss := r.tree.NodeAt(level, p)
		if n != nil {
			return n
		}
		if miss.IsZero() {
			r.Fatalf("no node of level %d at %v", level, p)
		}
		r.load(miss)
	}
}
