package offline

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A build is a cache set in the making, in memory. What is not said is as in a set that was used a little: 600
// buckets of 8 KiB, a journal of four, blocks of one sector, every generation 1, one backing device of 1 MiB in
// slot 0, dirty, an empty tree of one leaf, and one empty journal entry.
//
// Nodes are written as they are named; what refers to them is written by seal, which open and check call.
//
//	b := newBuild(t)
//	left := b.leaf(Pos{0, 100}, keySet(dirtyKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(0, 8))), keySet(goneKey(18, 2)))
//	b.root(b.interior(keySet(left, b.leaf(top))), 1)
//	b.journal(dirtyKey(20, 1, dataAt(1, 0)))
//	v := b.volume(b.open())
//	mustRead(t, v, cached(16, 18, dataAt(0, 0)), cached(20, 21, dataAt(1, 0)), cached(21, 24, dataAt(0, 5)), cached(40, 48, dataAt(0, 8)))
//
// Every sector of every device says which one it is, so that whoever reads a volume sees where the bytes come
// from. Sectors of volumes are key sectors throughout: those of backing devices begin at 16, the data offset.
type build struct {
	t     testing.TB
	super ondisk.Superblock
	geo   ondisk.Geometry
	cache *disk
	disks []*disk // backing devices
	slots map[int]ondisk.UUIDEntry

	gens     map[uint64]uint8 // in the prio sets, where it is not 1
	next     uint64           // bucket for the next piece of metadata
	nodes    []ondisk.Key     // as written
	prios    []uint64         // buckets of the prio sets
	uuids    ondisk.Key
	oldUUIDs bool
	header   ondisk.JSet // of every journal entry, but seq and keys
	rootSet  bool

	entries []*entry
	ring    struct {
		index int    // of the journal bucket that takes entries
		used  int    // bytes in it
		seq   uint64 // of the next entry
	}
	after  []func()
	sealed bool
	closes []func() error
}

// A disk is one device of a build.
type disk struct {
	*blockdev.Faulty
	mem   *blockdev.MemoryDevice
	super ondisk.Superblock // of a backing device
}

// An entry is one journal entry, and where it went.
type entry struct {
	ondisk.JSet
	index  int
	sector uint64
}

// size is the entry's length on disk, in bytes.
func (e *entry) size() int { return (e.Bytes() + 511) &^ 511 }

// A shape is what a build may have otherwise than usual; 0: as usual.
type shape struct {
	buckets, bucketSectors, journal, align int
}

var (
	buildSet = ondisk.UUID{0x5e, 0x70, 14: 1, 15: 2}
	top      = Pos{ondisk.MaxInode, ondisk.MaxOffset}
)

const (
	dataStart   = 16 // key sector of the first sector of a backing device
	backingSize = 1 << 20
	volumeEnd   = backingSize / 512 // key sector behind the last one
)

func newBuild(t testing.TB) *build { return newBuildOf(t, shape{}) }

func newBuildOf(t testing.TB, s shape) *build {
	t.Helper()
	def := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	def(&s.buckets, 600)
	def(&s.bucketSectors, 16)
	def(&s.journal, 4)
	def(&s.align, 512)
	first := 23/s.bucketSectors + 1
	b := &build{t: t, slots: map[int]ondisk.UUIDEntry{}, gens: map[uint64]uint8{}, super: ondisk.Superblock{
		Offset: ondisk.SuperblockSector, Version: ondisk.VersionCache, Magic: ondisk.Magic, UUID: ondisk.UUID{0xcc, 15: 1}, SetUUID: buildSet,
		Flags: ondisk.FlagSync, Seq: 1, Word184: uint64(s.buckets), BlockSize: 1, BucketSize16: uint16(s.bucketSectors), NrInSet: 1,
		FirstBucket: uint16(first), NJournal: uint16(s.journal),
	}}
	t.Cleanup(b.free)
	for i := range s.journal {
		b.super.D[i] = uint64(first + i)
	}
	b.geo = ondisk.NewGeometry(&b.super)
	b.cache = b.newDisk("cache", int64(s.buckets*s.bucketSectors)*512, fromCache, s.align)
	b.next = uint64(first + s.journal)
	for range b.geo.NPrio {
		b.prios = append(b.prios, b.bucket())
	}
	b.uuids = ondisk.NewChild(0, 0, b.geo.MetaSectors, ondisk.MakePtr(1, b.geo.BucketStart(b.bucket()), 0))
	b.header = ondisk.JSet{Magic: b.geo.JSetMagic(), Version: 1, UUIDBucket: b.uuids}
	b.header.PrioBucket[0] = b.prios[0]
	b.ring.seq = 1
	b.attach(0)
	return b
}

// newDisk makes a device on which every sector says which one it is, or takes one that another build is done with.
func (b *build) newDisk(name string, size int64, what byte, align int) *disk {
	d := &disk{mem: usedDisks.take(name, size, align)}
	if d.mem != nil {
		d.stamp(0, min(uint64(size)/512, dataBucket*16), what) // builds write nowhere else
	} else {
		m, err := blockdev.Memory(size, blockdev.MemoryOptions{Name: name, BufferAlign: align})
		if err != nil {
			b.t.Fatal(err)
		}
		d.mem = m
		d.stamp(0, min(uint64(size)/512, stamped), what)
	}
	d.Faulty = blockdev.NewFaulty(d.mem, 1)
	b.closes = append(b.closes, func() error {
		usedDisks.Lock()
		defer usedDisks.Unlock()
		usedDisks.list = append(usedDisks.list, d.mem)
		return nil
	})
	return d
}

// usedDisks are devices that builds no longer need.
var usedDisks diskPool

type diskPool struct {
	sync.Mutex
	list []*blockdev.MemoryDevice
}

// take returns one of that kind, or nil.
func (p *diskPool) take(name string, size int64, align int) *blockdev.MemoryDevice {
	p.Lock()
	defer p.Unlock()
	for i, m := range p.list {
		if x := m.Info(); x.Name == name && x.Size == size && x.BufferAlign == align {
			p.list = slices.Delete(p.list, i, i+1)
			return m
		}
	}
	return nil
}

// stamped is how many sectors of a large cache device say which they are; the others are zeroes.
const stamped = 600 * 16

// at returns the n sectors at a sector of the disk.
func (d *disk) at(sector uint64, n int) []byte { return d.mem.Bytes()[sector*512:][: n*512 : n*512] }

// breaks makes reads of n sectors at sector fail.
func (d *disk) breaks(sector, n uint64) {
	d.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(sector) * 512, Len: int64(n) * 512})
}

// attach adds a backing device of 1 MiB, dirty, in that slot.
func (b *build) attach(slot int) *disk {
	d := b.newDisk(fmt.Sprintf("backing%d", len(b.disks)), backingSize, fromDisk+byte(len(b.disks)), 512)
	d.super = ondisk.Superblock{
		Offset: ondisk.SuperblockSector, Version: ondisk.VersionBacking, Magic: ondisk.Magic, UUID: ondisk.UUID{0xbb, 15: byte(len(b.disks) + 1)},
		SetUUID: b.super.SetUUID, BlockSize: 1,
	}
	d.super.SetCacheMode(ondisk.Writeback)
	d.super.SetState(ondisk.StateDirty)
	b.disks = append(b.disks, d)
	b.slots[slot] = ondisk.UUIDEntry{UUID: d.super.UUID}
	return d
}

// flash adds a flash-only volume.
func (b *build) flash(slot int, label string, sectors uint64) {
	e := ondisk.UUIDEntry{UUID: ondisk.UUID{0xff, 15: byte(slot)}, Flags: ondisk.UUIDFlashOnly, Sectors: sectors}
	copy(e.Label[:], label)
	b.slots[slot] = e
}

// bucket returns the number of a bucket for metadata. Data belongs into buckets from dataBucket on.
func (b *build) bucket() uint64 {
	b.next++
	return b.next - 1
}

// dataAt returns the sector of the cache device that is off sectors into data bucket n.
func dataAt(n, off uint64) uint64 { return (dataBucket+n)*16 + off }

// dataBucket is the first bucket for data, in sets whose buckets have 16 sectors.
const dataBucket = 300

// A bset is one set of a node. Keys keep the order in which they are given.
type bset struct {
	keys    []ondisk.Key
	version uint32
}

func keySet(keys ...ondisk.Key) bset { return bset{keys, 1} }

// leaf writes a leaf, whose keys end at to at most, and returns the reference to it.
func (b *build) leaf(to Pos, sets ...bset) ondisk.Key { return b.node(to, sets) }

// interior writes an interior node that reaches to the top.
func (b *build) interior(sets ...bset) ondisk.Key { return b.node(top, sets) }

func (b *build) node(to Pos, sets []bset) ondisk.Key {
	b.t.Helper()
	bucket := b.bucket()
	ref := ondisk.NewChild(to.Inode, to.Sector, b.geo.NodeSectors, ondisk.MakePtr(b.gen(bucket), b.geo.BucketStart(bucket), 0))
	raw := b.cache.at(ref.P[0].Sector(), int(b.geo.NodeSectors))
	clear(raw)
	if len(sets) == 0 {
		sets = []bset{keySet()}
	}
	used := 0
	for _, s := range sets {
		var words []byte
		for i := range s.keys {
			words = ondisk.AppendKey(words, &s.keys[i])
		}
		if used+ondisk.BSetHeaderBytes+len(words) > len(raw) {
			b.t.Fatalf("the node in bucket %d has no room for its sets", bucket)
		}
		n := ondisk.EncodeBSet(raw[used:], b.geo.BSetMagic(), 0x5e900000+bucket, ref.P[0], words)
		if s.version == 0 {
			binary.LittleEndian.PutUint32(raw[used+24:], 0)
			binary.LittleEndian.PutUint64(raw[used:], ondisk.Checksum(raw[used+8:used+n]))
		}
		used += (n + b.geo.BlockBytes() - 1) / b.geo.BlockBytes() * b.geo.BlockBytes()
	}
	b.nodes = append(b.nodes, ref)
	return ref
}

// root makes a node, of that level, the root.
func (b *build) root(ref ondisk.Key, level int) {
	b.header.Root, b.header.Level, b.rootSet = ref, uint16(level), true
}

// onlyLeaf makes the tree one leaf with those sets.
func (b *build) onlyLeaf(sets ...bset) ondisk.Key {
	ref := b.leaf(top, sets...)
	b.root(ref, 0)
	return ref
}

// twoLeaves makes the tree a root and two leaves that meet at sector 1000 of inode 0.
func (b *build) twoLeaves(left, right bset) (l, r ondisk.Key) {
	l, r = b.leaf(Pos{0, 1000}, left), b.leaf(top, right)
	b.root(b.interior(keySet(l, r)), 1)
	return l, r
}

// gen is the generation of a bucket in the prio sets.
func (b *build) gen(bucket uint64) uint8 {
	if g, ok := b.gens[bucket]; ok {
		return g
	}
	return 1
}

// journal adds an entry with keys, behind the last one, or in the next bucket of the ring where that is full.
// All are needed unless the newest says otherwise.
func (b *build) journal(keys ...ondisk.Key) *entry {
	b.t.Helper()
	e := &entry{}
	e.Seq = b.ring.seq
	e.LastSeq = e.Seq
	if len(b.entries) > 0 {
		e.LastSeq = b.entries[0].Seq
	}
	for i := range keys {
		e.Data = ondisk.AppendKey(e.Data, &keys[i])
	}
	e.Keys = uint32(len(e.Data) / 8)
	if b.ring.used+e.size() > int(b.geo.BucketBytes()) {
		b.nextBucket()
	}
	e.index = b.ring.index
	e.sector = b.geo.BucketStart(b.super.D[e.index]) + uint64(b.ring.used)/512
	b.ring.used += e.size()
	b.ring.seq++
	b.entries = append(b.entries, e)
	return e
}

// nextBucket makes the next entry the first of the next bucket of the ring.
func (b *build) nextBucket() {
	b.ring.index, b.ring.used = (b.ring.index+1)%int(b.super.NJournal), 0
}

// newest returns the newest entry.
func (b *build) newest() *entry { return b.entries[len(b.entries)-1] }

// then has fn called at the end of seal, when all is on the devices: the place for damage.
func (b *build) then(fn func()) { b.after = append(b.after, fn) }

// free gives the memory back, at the end of the test at the latest.
func (b *build) free() {
	for _, fn := range slices.Backward(b.closes) {
		_ = fn()
	}
	b.closes = nil
}

// seal writes everything that is not written yet.
func (b *build) seal() {
	b.t.Helper()
	if b.sealed {
		return
	}
	b.sealed = true
	if !b.rootSet {
		b.onlyLeaf()
	}
	if len(b.entries) == 0 {
		b.journal()
	}
	for i := range int(b.super.NJournal) {
		clear(b.cache.at(b.geo.BucketStart(b.super.D[i]), 1))
	}
	for _, e := range b.entries {
		b.putEntry(e)
	}
	b.putPrios()
	b.putUUIDs()
	b.super.SetChecksum()
	b.super.Encode(b.cache.at(8, 8))
	for _, d := range b.disks {
		d.super.SetChecksum()
		d.super.Encode(d.at(8, 8))
	}
	for _, fn := range b.after {
		fn()
	}
}

func (b *build) putEntry(e *entry) {
	j := b.header
	j.Seq, j.LastSeq, j.Data = e.Seq, e.LastSeq, e.Data
	j.Encode(b.cache.at(e.sector, e.size()/512))
}

func (b *build) putPrios() {
	for i, bucket := range b.prios {
		raw := b.cache.at(b.geo.BucketStart(bucket), int(b.geo.MetaSectors))
		clear(raw)
		p := ondisk.PrioSet{Magic: b.geo.PrioMagic(), Seq: 1, NextBucket: b.prios[0], Data: raw[40:]}
		if i+1 < len(b.prios) {
			p.NextBucket = b.prios[i+1]
		}
		for j := range min(b.geo.PrioPerBucket, b.geo.NBuckets-uint64(i)*b.geo.PrioPerBucket) {
			p.SetEntry(int(j), ondisk.PrioInitial, b.gen(uint64(i)*b.geo.PrioPerBucket+j))
		}
		p.Encode(raw)
	}
}

func (b *build) putUUIDs() {
	raw := b.cache.at(b.uuids.P[0].Sector(), int(b.geo.MetaSectors))
	clear(raw)
	for i, e := range b.slots {
		if b.oldUUIDs {
			var one [128]byte
			e.Encode(one[:])
			copy(raw[64*i:64*(i+1)], one[:])
			continue
		}
		e.Encode(raw[128*i:])
	}
}

// open opens the set, which must work.
func (b *build) open() *Set {
	b.t.Helper()
	b.seal()
	s, err := Open(context.Background(), b.cache, Options{})
	b.closes = append(b.closes, s.Close)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

// check checks the set with its backing devices, data included.
func (b *build) check() (*Set, []*Backing) {
	b.t.Helper()
	b.seal()
	devs := make([]blockdev.Device, len(b.disks))
	for i := range b.disks {
		devs[i] = b.disks[i]
	}
	s, found, err := Check(context.Background(), b.cache, devs, CheckOptions{Data: true})
	b.closes = append(b.closes, s.Close)
	if err != nil {
		b.t.Fatal(err)
	}
	return s, found
}

// volume opens the volume of the first backing device.
func (b *build) volume(s *Set) *Volume {
	b.t.Helper()
	return b.volumeOf(s, 0)
}

func (b *build) volumeOf(s *Set, i int) *Volume {
	b.t.Helper()
	back, err := OpenBacking(s, b.disks[i])
	if err != nil {
		b.t.Fatal(err)
	}
	v, err := OpenVolume(s, back)
	if err != nil {
		b.t.Fatal(err)
	}
	return v
}

// Keys. Sectors of inode 0, generation 1, unless withGen or inInode says otherwise.

func cleanKey(start, size, sector uint64) ondisk.Key {
	return ondisk.NewExtent(0, start+size, uint32(size), ondisk.MakePtr(1, sector, 0), false)
}

func dirtyKey(start, size, sector uint64) ondisk.Key {
	return ondisk.NewExtent(0, start+size, uint32(size), ondisk.MakePtr(1, sector, 0), true)
}

// goneKey is an invalidation.
func goneKey(start, size uint64) ondisk.Key {
	return ondisk.NewInvalidation(0, start+size, uint32(size))
}

// fillKey is the placeholder of a read miss. What its pointer says besides the device is random.
func fillKey(start, size uint64) ondisk.Key {
	return ondisk.NewExtent(0, start+size, uint32(size), ondisk.Ptr(0xdead_beef_cafe_f00d)|ondisk.CheckDev<<51, false)
}

// withGen changes the generation of k's pointers.
func withGen(g uint8, k ondisk.Key) ondisk.Key {
	for i := range k.Ptrs() {
		k.P[i] = k.P[i]&^0xff | ondisk.Ptr(g)
	}
	return k
}

// inInode moves k to another inode.
func inInode(inode uint32, k ondisk.Key) ondisk.Key {
	k.High = k.High&^ondisk.MaxInode | uint64(inode)
	return k
}

// freeingKey is the freeing key of a child that was replaced: at position (0,0), one generation on.
func freeingKey(child ondisk.Key) ondisk.Key {
	k := inInode(0, withGen(child.P[0].Gen()+1, child))
	k.Low = 0
	return k
}

// Where bytes come from.
const (
	fromZero  = 0
	fromError = 1
	fromCache = 2
	fromDisk  = 3 // and the index of the backing device
	fromMix   = 255
)

// A source is where one sector came from.
type source struct {
	what   byte
	sector uint64
}

func (s source) String() string {
	switch s.what {
	case fromZero:
		return "zeroes"
	case fromError:
		return "an error"
	case fromMix:
		return "a mixture"
	case fromCache:
		return fmt.Sprintf("cache sector %d", s.sector)
	}
	return fmt.Sprintf("backing%d sector %d", s.what-fromDisk, s.sector)
}

const stampMagic = 0x7562_6361_6368_6500

var stamps struct {
	sync.Mutex
	byKind map[byte][]byte
}

// stamp makes n sectors say which ones they are.
func (d *disk) stamp(sector, n uint64, what byte) {
	b := d.at(sector, int(n))
	put := func(b []byte) {
		for i := 0; i < len(b); i += 16 {
			binary.LittleEndian.PutUint64(b[i:], stampMagic|uint64(what))
			binary.LittleEndian.PutUint64(b[i+8:], sector+uint64(i/512))
		}
	}
	if sector > 0 {
		put(b)
		return
	}
	stamps.Lock()
	defer stamps.Unlock()
	if stamps.byKind == nil {
		stamps.byKind = map[byte][]byte{}
	}
	if len(stamps.byKind[what]) < len(b) {
		stamps.byKind[what] = make([]byte, len(b))
		put(stamps.byKind[what])
	}
	copy(b, stamps.byKind[what])
}

// sourceOf reads what a sector says of itself.
func sourceOf(b []byte) source {
	lo, hi := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
	switch {
	case !bytes.Equal(b[16:512], b[:496]):
	case lo == 0 && hi == 0:
		return source{what: fromZero}
	case lo&^0xff == stampMagic:
		return source{byte(lo), hi}
	}
	return source{what: fromMix}
}

// sectorsOf reads a volume sector by sector and says where each came from. The index is the volume's own sector.
func sectorsOf(t testing.TB, v blockdev.Device) []source {
	t.Helper()
	n := int(v.Info().Size / 512)
	got := make([]source, n)
	each := max(512, v.Info().BufferAlign)
	buf := make([]byte, (n+1)*each)
	buf = buf[-addr(buf)&uintptr(each-1):]
	reqs := make([]*blockdev.Request, n)
	for i := range reqs {
		reqs[i] = &blockdev.Request{Op: blockdev.OpRead, Off: int64(i) * 512, Buf: buf[i*each:][:512:512]}
	}
	left := n
	done := make(chan struct{})
	q, err := v.NewQueue(64, func(reqs []*blockdev.Request) {
		if left -= len(reqs); left == 0 {
			close(done)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	q.Submit(reqs)
	<-done
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	for i, r := range reqs {
		if r.Err != nil {
			got[i] = source{what: fromError}
		} else {
			got[i] = sourceOf(r.Buf)
		}
	}
	return got
}

func addr(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }

// A span says where the key sectors from, inclusive, to to, exclusive, of a volume come from.
type span struct {
	from, to uint64
	src      source // of the first sector
}

func cached(from, to, sector uint64) span { return span{from, to, source{fromCache, sector}} }
func unknown(from, to uint64) span        { return span{from, to, source{what: fromError}} }

// expected lays spans over the backing device, or over zeroes for a flash-only volume.
func expected(v *Volume, spans []span) []source {
	want := make([]source, v.Info().Size/512)
	put := func(s span) {
		for k := max(s.from, v.first); k < min(s.to, v.first+uint64(len(want))); k++ {
			x := s.src
			if x.what >= fromCache {
				x.sector += k - s.from
			}
			want[k-v.first] = x
		}
	}
	if d, ok := v.backing.(*disk); ok {
		put(span{v.first, v.first + uint64(len(want)), source{sourceOf(d.at(100, 1)).what, v.first}})
	}
	for _, s := range spans {
		put(s)
	}
	return want
}

// mustRead reads the whole volume: what spans say must come from there, all else from the backing device. Copy
// must agree, and give zeroes for what cannot be read, and list exactly that.
func mustRead(t testing.TB, v *Volume, spans ...span) {
	t.Helper()
	want := expected(v, spans)
	got := sectorsOf(t, v)
	compareSources(t, v, "read by sectors", got, want)

	var out sliceWriter
	bad, err := Copy(context.Background(), &out, v, CopyOptions{})
	if err != nil || int64(len(out)) != v.Info().Size {
		t.Fatalf("copy: %d bytes of %d, %v", len(out), v.Info().Size, err)
	}
	var wantBad [][2]int64
	for i := range want {
		got[i] = sourceOf(out[i*512:])
		if want[i].what == fromError {
			want[i].what = fromZero
			wantBad = append(wantBad, [2]int64{int64(i) * 512, 512})
		}
	}
	compareSources(t, v, "copied", got, want)
	if wantBad = joinRanges(wantBad); !slices.Equal(bad, wantBad) {
		t.Errorf("copy says that it could not read %v, want %v", bad, wantBad)
	}
	if u := v.Unreadable(); len(u) > 0 && !within(u, wantBad) {
		t.Errorf("said to be unknown: %v; could not be read: %v", u, wantBad)
	}
}

// within reports whether every range of a lies in one of b.
func within(a, b [][2]int64) bool {
	return !slices.ContainsFunc(a, func(x [2]int64) bool {
		return !slices.ContainsFunc(b, func(y [2]int64) bool { return y[0] <= x[0] && x[0]+x[1] <= y[0]+y[1] })
	})
}

type sliceWriter []byte

func (w *sliceWriter) Write(p []byte) (int, error) {
	*w = append(*w, p...)
	return len(p), nil
}

func compareSources(t testing.TB, v *Volume, how string, got, want []source) {
	t.Helper()
	var diff strings.Builder
	n := 0
	for i := range want {
		if got[i] != want[i] {
			if n++; n <= 5 {
				fmt.Fprintf(&diff, "\n  sector %d is %v, want %v", v.first+uint64(i), got[i], want[i])
			}
		}
	}
	if n > 0 {
		t.Errorf("%s: %d of %d sectors differ:%s", how, n, len(want), diff.String())
	}
}
