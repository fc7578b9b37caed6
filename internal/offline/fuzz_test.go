package offline

import (
	"context"
	"encoding/binary"
	"io"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A target is a small set whose metadata is changed and put right again.
type target struct {
	b      *build
	backs  []blockdev.Device
	areas  []metaArea // what may be changed
	before [][]byte
}

// A metaArea is a piece of metadata.
type metaArea struct {
	raw []byte
	fix func(raw []byte) // makes its checksum right, as far as its lengths can be believed
}

// fuzzTargets are sets that have something of everything: two and three levels, sets that overlap, freeing keys, a
// journal that goes over the end of its ring, flash-only volumes.
var fuzzTargets = sync.OnceValue(func() []*target {
	var list []*target
	for i := range 3 {
		b := newBuildOf(alive{}, shape{buckets: 520 + 40*i})
		b.flash(1, "flash", 300)
		b.attach(2)
		switch i {
		case 0:
			b.onlyLeaf(keySet(manyKeys(20, 16, 0)...), keySet(goneKey(18, 3), inInode(1, dirtyKey(5, 5, dataAt(4, 0)))))
			b.journal(dirtyKey(16, 8, dataAt(8, 0)), goneKey(30, 4))
		case 1:
			old := b.leaf(Pos{0, 900}, keySet(manyKeys(8, 16, 0)...))
			b.root(b.interior(
				keySet(old, b.leaf(top, keySet(inInode(1, cleanKey(0, 8, dataAt(9, 0))), inInode(2, dirtyKey(100, 8, dataAt(10, 0)))))),
				keySet(freeingKey(old), b.leaf(Pos{0, 400}, keySet(dirtyKey(16, 16, dataAt(2, 0)))), b.leaf(Pos{0, 900}, keySet(fillKey(500, 8)), keySet(dirtyKey(502, 2, dataAt(3, 0)))))), 1)
			runRing(b, 1, 5)
		case 2:
			b.oldUUIDs, b.header.Version = true, 0
			low := b.node(Pos{0, 500}, []bset{keySet(b.leaf(Pos{0, 200}, keySet(dirtyKey(16, 8, dataAt(0, 0)))), b.leaf(Pos{0, 500}))})
			high := b.interior(keySet(b.leaf(top, bset{[]ondisk.Key{dirtyKey(500, 8, dataAt(1, 0))}, 0})))
			b.root(b.interior(keySet(low, high)), 2)
		}
		b.seal()
		t := &target{b: b, backs: []blockdev.Device{b.disks[0], b.disks[1]}}
		t.areas = append(t.areas, metaArea{b.cache.at(8, 5), fixSuper}, metaArea{b.disks[0].at(8, 1), fixSuper})
		for _, n := range b.prios {
			t.areas = append(t.areas, metaArea{b.cache.at(b.geo.BucketStart(n), 16), func(raw []byte) { fixChecksum(raw, len(raw), 0) }})
		}
		t.areas = append(t.areas, metaArea{b.cache.at(b.uuids.P[0].Sector(), 16), func([]byte) {}})
		for i := range int(b.super.NJournal) {
			t.areas = append(t.areas, metaArea{b.cache.at(b.geo.BucketStart(b.super.D[i]), 16), fixJournal})
		}
		for _, ref := range b.nodes {
			t.areas = append(t.areas, metaArea{b.cache.at(ref.P[0].Sector(), 16), func(raw []byte) { fixNode(raw, uint64(ref.P[0])) }})
		}
		for _, a := range t.areas {
			t.before = append(t.before, slices.Clone(a.raw))
		}
		list = append(list, t)
	}
	return list
})

// alive is a test that never ends: what it builds stays.
type alive struct{ testing.TB }

func (alive) Helper()           {}
func (alive) Cleanup(func())    {}
func (alive) Fatal(args ...any) { panic(args) }

func fixChecksum(raw []byte, end int, seed uint64) {
	if end < 8 || end > len(raw) {
		return
	}
	if seed == 0 {
		seed = ^uint64(0)
	}
	binary.LittleEndian.PutUint64(raw, ^ondisk.CRC(seed, raw[8:end]))
}

func fixSuper(raw []byte) { fixChecksum(raw, 208+8*int(binary.LittleEndian.Uint16(raw[206:])), 0) }

func fixJournal(raw []byte) {
	for len(raw) > ondisk.JSetHeaderBytes {
		n := ondisk.JSetHeaderBytes + 8*int(binary.LittleEndian.Uint32(raw[28:]))
		if n > len(raw) {
			return
		}
		fixChecksum(raw, n, 0)
		raw = raw[(n+511)&^511:]
	}
}

func fixNode(raw []byte, seed uint64) {
	for len(raw) > 0 && binary.LittleEndian.Uint64(raw[16:]) != 0 {
		n := ondisk.BSetHeaderBytes + 8*int(binary.LittleEndian.Uint32(raw[28:]))
		if n > len(raw) {
			return
		}
		if binary.LittleEndian.Uint32(raw[24:]) == 0 {
			fixChecksum(raw, n, 0)
		} else {
			fixChecksum(raw, n, seed)
		}
		raw = raw[(n+511)&^511:]
	}
}

// An edit is 6 bytes of the fuzzer's input: where, how, and with what.
const editBytes = 6

// change makes the edits, and fixes the checksums of the areas whose bit in fix is set.
func (t *target) change(edits []byte, fix uint8) {
	touched := map[int]bool{}
	for ; len(edits) >= editBytes; edits = edits[editBytes:] {
		i := int(edits[0]) % len(t.areas)
		raw := t.areas[i].raw
		if edits[3] < 0xf0 {
			raw = raw[:min(len(raw), 1024)] // where most of what is in use lies
		}
		at := int(binary.LittleEndian.Uint16(edits[1:])) % (len(raw) - 8)
		touched[i] = true
		v := binary.LittleEndian.Uint16(edits[4:])
		switch edits[3] % 6 {
		case 0:
			raw[at] ^= byte(v)
		case 1:
			raw[at] = byte(v)
		case 2:
			binary.LittleEndian.PutUint16(raw[at:], v)
		case 3: // a whole word: small, negative, or with a bit anywhere
			binary.LittleEndian.PutUint64(raw[at&^7:], uint64(int64(int16(v))))
		case 4:
			binary.LittleEndian.PutUint64(raw[at&^7:], 1<<(v%64)|uint64(v>>6))
		case 5: // a run of words from another place: keys among keys
			from := int(v) % (len(raw) - 24) &^ 7
			copy(raw[at&^7:min(at&^7+24, len(raw))], slices.Clone(raw[from:from+24]))
		}
	}
	for i := range touched {
		if fix&1 != 0 {
			t.areas[i].fix(t.areas[i].raw)
		}
	}
	if fix&2 != 0 {
		for _, a := range t.areas {
			a.fix(a.raw)
		}
	}
}

func (t *target) undo() {
	for i, a := range t.areas {
		copy(a.raw, t.before[i])
	}
}

const (
	fuzzTime  = 20 * time.Second // that one input may take, on a busy machine
	fuzzBytes = 256 << 20        // that it may allocate
)

// run checks the set and reads its volumes.
func (t *target) run(tb testing.TB) {
	watch := time.AfterFunc(fuzzTime, func() { panic("no end in sight") })
	defer watch.Stop()
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	before := mem.TotalAlloc
	defer func() {
		runtime.ReadMemStats(&mem)
		if n := mem.TotalAlloc - before; n > fuzzBytes {
			tb.Errorf("%d MiB allocated", n>>20)
		}
	}()
	s, found, err := Check(context.Background(), t.b.cache, t.backs, CheckOptions{Data: true})
	defer func() { s.Close() }()
	if err != nil {
		tb.Fatal(err)
	}
	for _, f := range s.Report.Findings() {
		if f.String() == "" || f.Count < 1 || f.Sectors < 0 || f.Sector < -1 {
			tb.Errorf("%+v", f)
		}
		dev := int64(backingSize / 512)
		if f.Device == "cache" {
			dev = s.Device.Size / 512
		}
		if f.Sector >= dev || f.Sector >= 0 && f.Sectors == 0 {
			tb.Errorf("found at no place of the device: %v, %d sectors", &f, f.Sectors)
		}
	}
	if s.Report.first(Fatal) != nil {
		return
	}
	if !sortedDisjoint(s.Extents) || slices.ContainsFunc(s.Extents, func(e Extent) bool { return e.Size == 0 }) {
		tb.Errorf("extents overlap or are empty: %v", s.Extents)
	}
	for i, r := range s.Unknown {
		if r.empty() || i > 0 && s.Unknown[i-1].To.Compare(r.From) > 0 {
			tb.Errorf("unknown ranges are in disorder: %v", s.Unknown)
		}
	}
	var volumes []*Volume
	for _, back := range found {
		if v, err := OpenVolume(s, back); err == nil {
			volumes = append(volumes, v)
		}
	}
	for i := range s.Slots {
		if s.Slots[i].FlashOnly() {
			if v, err := OpenFlash(s, s.Slots[i].LabelString()); err == nil {
				volumes = append(volumes, v)
			}
		}
	}
	for _, v := range volumes {
		if size := v.Info().Size; size < 0 || size%int64(v.Info().LogicalBlock) != 0 {
			tb.Errorf("size %d", size)
		} else if size > 8<<20 {
			v.EachPiece(0, size, func(Kind, int64, int64) bool { return true })
			continue // a slot may claim any size
		}
		bad, err := Copy(context.Background(), io.Discard, v, CopyOptions{})
		if err != nil {
			tb.Errorf("copy: %v", err)
		}
		if !within(v.Unreadable(), bad) {
			tb.Errorf("unknown %v, could be read: %v", v.Unreadable(), bad)
		}
	}
}

// FuzzOpen changes the metadata of a small set, with the checksums made right or not, then checks it and reads its
// volumes: nothing may panic, hang, or take memory without bound.
func FuzzOpen(f *testing.F) {
	f.Add(uint8(0), uint8(0), []byte{})
	for i, t := range fuzzTargets() {
		for a := range t.areas {
			f.Add(uint8(i), uint8(1), []byte{byte(a), 40, 0, 0, 1, 0, byte(a), 28, 0, 3, 9, 0})
			f.Add(uint8(i), uint8(0), []byte{byte(a), 48, 0, 4, 62, 0})
			f.Add(uint8(i), uint8(3), []byte{byte(a), 56, 0, 5, 32, 0, byte(a), 44, 0, 1, 0xff, 0})
		}
	}
	f.Fuzz(func(t *testing.T, which, fix uint8, edits []byte) {
		target := fuzzTargets()[int(which)%len(fuzzTargets())]
		target.change(edits, fix)
		defer target.undo()
		target.run(t)
	})
}
