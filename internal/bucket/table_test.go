package bucket

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/ubcache/ubcache/internal/ondisk"
	"pgregory.net/rapid"
)

// empty makes a table of n buckets with nothing in them, its pools full unless the device is too small.
func empty(t testing.TB, n uint64, o Options) *Table {
	t.Helper()
	g := testGeometry(n, 16)
	l, err := NewLoader(nil, &g, o)
	if err != nil {
		t.Fatal(err)
	}
	tab, _ := l.Finish(0, 0)
	if err := tab.AllocatePrioSets(); err != nil {
		t.Fatal(err)
	}
	return tab
}

// batches runs batches until no more is wanted or to be had, and the journal with them.
func batches(t testing.TB, tab *Table, seq *uint64) {
	t.Helper()
	for tab.Wanted() > 0 && tab.Pickable() > 0 {
		oneBatch(t, tab, seq)
	}
}

func oneBatch(t testing.TB, tab *Table, seq *uint64) []ondisk.PrioSet {
	t.Helper()
	if !tab.BeginBatch() {
		t.Fatal("a batch is under way")
	}
	for tab.FillBatch(*seq) {
	}
	sets := snapshot(tab)
	for tab.BatchDurable(*seq) {
	}
	*seq++
	return sets
}

func snapshot(tab *Table) []ondisk.PrioSet {
	sets := make([]ondisk.PrioSet, tab.PrioSets())
	for i := range sets {
		sets[i].Data = make([]byte, tab.geo.MetaBytes()-40)
		for from, done := 0, false; !done; {
			from, done = tab.SnapshotGens(&sets[i], i, from)
		}
	}
	return sets
}

// put inserts n sectors into b, which the caller holds.
func put(tab *Table, b uint32, live, dirty int32, seq uint64) {
	var d Deltas
	d.Add(b, tab.Gen(b), live, dirty)
	tab.Apply(&d, seq, true)
}

func mustCheck(t testing.TB, tab *Table) {
	t.Helper()
	if err := tab.Check(); err != nil {
		t.Fatal(err)
	}
}

func mustAllocate(t testing.TB, tab *Table, u Use) uint32 {
	t.Helper()
	b, _, ok := tab.Allocate(u)
	if !ok {
		t.Fatalf("no bucket: %v", tab.Counts())
	}
	return b
}

func want(t testing.TB, tab *Table, b uint32, c Category) {
	t.Helper()
	if i := tab.Info(b); i.Category != c {
		t.Fatalf("%v, want %v", i, c)
	}
}

func bytesPerBucket(tab *Table) float64 {
	bytes := len(tab.entries)*int(unsafe.Sizeof(entry{})) + 8*len(tab.discard.done)
	for _, s := range append(tab.index[:], tab.sparse, tab.discard.index) {
		for _, l := range s.levels {
			bytes += 8 * len(l)
		}
	}
	for i := range tab.pools {
		bytes += 4 * len(tab.pools[i].buf)
	}
	bytes += 4 * cap(tab.batch.list)
	return float64(bytes) / float64(len(tab.entries))
}

func TestBytesABucket(t *testing.T) {
	if per := bytesPerBucket(empty(t, 1<<20, Options{})); per > 13.4 {
		t.Errorf("%.2f bytes a bucket; the package's comment says 13.3", per)
	}
}

func TestLifeOfADataBucket(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForDirty)
	want(t, tab, b, Pinned)
	tab.Pin(b)
	put(tab, b, 8, 8, seq)
	tab.Unpin(b)
	want(t, tab, b, Pinned)
	tab.Unpin(b)
	want(t, tab, b, Dirty)
	if tab.DirtySectors() != 8 || tab.LiveSectors() != 8 {
		t.Error("totals")
	}
	put(tab, b, 0, -8, seq)
	want(t, tab, b, Clean)
	put(tab, b, -8, 0, seq)
	want(t, tab, b, Empty)
	if i := tab.Info(b); i.EmptySeq != seq {
		t.Errorf("%v, want entry %d", i, seq)
	}
	for tab.JournalPassed(seq) {
	}
	if i := tab.Info(b); i.EmptySeq == 0 {
		t.Errorf("%v: entry %d is still needed", i, seq)
	}
	for tab.JournalPassed(seq + 1) {
	}
	if i := tab.Info(b); i.EmptySeq != 0 {
		t.Errorf("%v", i)
	}
	mustCheck(t, tab)
}

func TestBucketGivenUpWithoutKeysIsEmpty(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	tab.Unpin(b)
	if i := tab.Info(b); i.Category != Empty || i.EmptySeq != 0 {
		t.Error(i)
	}
	mustCheck(t, tab)
}

func TestApply(t *testing.T) {
	for _, c := range []struct {
		name        string
		have        []int32 // live, dirty
		change      []int32
		live, dirty uint32
		category    Category
	}{
		{"add", []int32{4, 0}, []int32{4, 4}, 8, 4, Dirty},
		{"clean", []int32{8, 8}, []int32{0, -8}, 8, 0, Clean},
		{"overwrite", []int32{8, 8}, []int32{-8, -8}, 0, 0, Empty},
		{"full", []int32{8, 0}, []int32{8, 0}, 16, 0, Clean},
		{"too many", []int32{8, 0}, []int32{9, 0}, 17, 0, Suspect},
		{"too few", []int32{8, 0}, []int32{-9, 0}, 8, 0, Suspect},
		{"too few dirty", []int32{8, 2}, []int32{0, -3}, 8, 2, Suspect},
		{"more dirty than live", []int32{8, 8}, []int32{-4, 0}, 8, 8, Suspect},
		{"more dirty than live, raised", []int32{4, 4}, []int32{0, 4}, 8, 8, Suspect},
		{"nothing left and dirty", []int32{8, 8}, []int32{-8, 0}, 8, 8, Suspect},
	} {
		t.Run(c.name, func(t *testing.T) {
			tab, seq := empty(t, 600, Options{}), uint64(1)
			batches(t, tab, &seq)
			b := mustAllocate(t, tab, ForDirty)
			put(tab, b, c.have[0], c.have[1], seq)
			tab.Unpin(b)
			put(tab, b, c.change[0], c.change[1], seq)
			if i := tab.Info(b); i.Live != c.live || i.Dirty != c.dirty || i.Category != c.category {
				t.Error(i)
			}
			if a := tab.Anomalies(); (len(a) == 1) != (c.category == Suspect) {
				t.Error(a)
			}
			mustCheck(t, tab)
			if c.category == Suspect {
				tab.Trust(b, 0, 0, seq)
				want(t, tab, b, Empty)
				mustCheck(t, tab)
			}
		})
	}
}

func TestPointersOfOtherGenerationsCountNothing(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	var d Deltas
	d.Add(b, tab.Gen(b)-1, -8, 0)
	d.Add(b, tab.Gen(b), 8, 0)
	tab.Apply(&d, seq, true)
	if i := tab.Info(b); i.Live != 8 || len(tab.Anomalies()) != 0 {
		t.Error(i)
	}
	d.Add(b, tab.Gen(b)+1, 8, 0)
	tab.Apply(&d, seq, true)
	if i := tab.Info(b); i.Live != 8 || len(tab.Anomalies()) != 1 {
		t.Error(i)
	}
}

// A key that comes and goes within one insert is in the journal entry all the same.
func TestKeyThatComesAndGoesStillWaitsForTheJournal(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	put(tab, b, 0, 0, seq)
	tab.Unpin(b)
	if i := tab.Info(b); i.Category != Empty || i.EmptySeq != seq {
		t.Error(i)
	}
}

func TestPointerIntoAFreeBucketMakesItSuspect(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	p := &tab.pools[poolCommon]
	b := p.buf[p.head]
	put(tab, b, 8, 0, seq)
	want(t, tab, b, Suspect)
	mustCheck(t, tab)
	if got := mustAllocate(t, tab, ForClean); got == b {
		t.Error("handed out all the same")
	}
}

func TestDeltasOfManyBuckets(t *testing.T) {
	tab, seq := empty(t, 600, Options{Ready: 200, Batch: 100}), uint64(1)
	batches(t, tab, &seq)
	var held []uint32
	for range 100 {
		held = append(held, mustAllocate(t, tab, ForClean))
	}
	var d Deltas
	for range 4 {
		for _, b := range held {
			d.Add(b, tab.Gen(b), 3, 0)
		}
		for _, b := range held {
			d.Add(b, tab.Gen(b), -1, 0)
		}
	}
	tab.Apply(&d, seq, true)
	for _, b := range held {
		if tab.Info(b).Live != 8 {
			t.Fatal(tab.Info(b))
		}
	}
	mustCheck(t, tab)
}

func TestApplyAllocatesNothing(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	a, b := mustAllocate(t, tab, ForDirty), mustAllocate(t, tab, ForDirty)
	var d Deltas
	if n := testing.AllocsPerRun(1000, func() {
		for _, sign := range []int32{1, -1} {
			d.Add(a, tab.Gen(a), 8*sign, 8*sign)
			d.Add(b, tab.Gen(b), 8*sign, 0)
			tab.Apply(&d, seq, true)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestPinsThatOverflowStay(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	for range maxPins + 10 {
		tab.Pin(b)
	}
	for range maxPins + 11 {
		tab.Unpin(b)
	}
	want(t, tab, b, Pinned)
}

func TestPinIf(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForDirty)
	at := ondisk.MakePtr(tab.Gen(b), tab.geo.BucketStart(uint64(b)), 0)
	put(tab, b, 8, 8, seq)
	tab.Unpin(b)
	if !tab.PinIf(at) || tab.Info(b).Category != Pinned {
		t.Error(tab.Info(b))
	}
	tab.Unpin(b)
	for _, p := range []ondisk.Ptr{
		ondisk.MakePtr(tab.Gen(b)-1, at.Sector(), 0), ondisk.MakePtr(tab.Gen(b), at.Sector(), ondisk.CheckDev),
		ondisk.MakePtr(0, 0, 0), ondisk.MakePtr(0, 1<<40, 0),
	} {
		if tab.PinIf(p) {
			t.Errorf("pinned by %x", p)
		}
	}
}

func TestMisuseOfBucketsPanics(t *testing.T) {
	for name, fn := range map[string]func(tab *Table, data uint32){
		"unpin":        func(tab *Table, b uint32) { tab.Unpin(b); tab.Unpin(b) },
		"free data":    func(tab *Table, b uint32) { tab.FreeNode(b) },
		"release":      func(tab *Table, b uint32) { tab.Release(b) },
		"return":       func(tab *Table, b uint32) { tab.Return(b) },
		"unused":       func(tab *Table, b uint32) { tab.TakeUnused() },
		"fill":         func(tab *Table, b uint32) { tab.FillBatch(9) },
		"snapshot":     func(tab *Table, b uint32) { snapshot(tab) },
		"durable":      func(tab *Table, b uint32) { tab.BatchDurable(9) },
		"half encoded": func(tab *Table, b uint32) { tab.BeginBatch(); tab.FillBatch(9); tab.BatchDurable(9) },
	} {
		t.Run(name, func(t *testing.T) {
			tab, seq := empty(t, 600, Options{}), uint64(1)
			batches(t, tab, &seq)
			b := mustAllocate(t, tab, ForClean)
			defer func() {
				if s, _ := recover().(string); !strings.HasPrefix(s, "bucket: ") {
					t.Errorf("no panic: %q", s)
				}
			}()
			fn(tab, b)
		})
	}
}

func TestLoaderRefuses(t *testing.T) {
	g := testGeometry(600, 16)
	g.BucketSectors = 1 << 20
	if _, err := NewLoader(nil, &g, Options{}); !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
	g = testGeometry(1<<32, 16)
	if _, err := NewLoader(nil, &g, Options{}); !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
}

func TestLoad(t *testing.T) {
	g := testGeometry(600, 16)
	ptr := func(b uint64, gen uint8) ondisk.Ptr { return ondisk.MakePtr(gen, g.BucketStart(b), 0) }
	for _, c := range []struct {
		name   string
		do     func(l *Loader)
		want   string // of bucket 100
		report Report
	}{
		{"nothing", func(l *Loader) {}, "bucket 100 gen 5 (oldest 5) empty, 0 live, 0 dirty, prio 777", Report{}},
		{
			"extents", func(l *Loader) { l.Extent(ptr(100, 5), 8, true); l.Extent(ptr(100, 5), 4, false) },
			"bucket 100 gen 5 (oldest 5) dirty, 12 live, 8 dirty, prio 777",
			Report{Extents: 2},
		},
		{
			"stale", func(l *Loader) { l.Extent(ptr(100, 3), 8, true) },
			"bucket 100 gen 5 (oldest 3) empty, 0 live, 0 dirty, prio 777, residue",
			Report{Stale: 1},
		},
		{
			"newer", func(l *Loader) { l.Extent(ptr(100, 6), 8, false) },
			"bucket 100 gen 6 (oldest 5) clean, 8 live, 0 dirty, prio 777, residue",
			Report{Extents: 1, Raised: 1},
		},
		{
			"newer after others", func(l *Loader) { l.Extent(ptr(100, 5), 8, true); l.Node(ptr(100, 7)) },
			"bucket 100 gen 7 (oldest 5) meta, 0 live, 0 dirty, prio 65535, residue",
			Report{Extents: 1, Nodes: 1, Raised: 1, DirtyDropped: true},
		},
		{
			"node that was", func(l *Loader) { l.Node(ptr(100, 5)); l.Pointer(ptr(100, 6)); l.Extent(ptr(100, 6), 2, false) },
			"bucket 100 gen 6 (oldest 5) clean, 2 live, 0 dirty, prio 777, residue",
			Report{Extents: 1, Nodes: 1, Raised: 1},
		},
		{
			"freeing key as new as its bucket", func(l *Loader) { l.Pointer(ptr(100, 5)) },
			"bucket 100 gen 5 (oldest 5) empty, 0 live, 0 dirty, prio 777, residue",
			Report{},
		},
		{
			"two roles", func(l *Loader) { l.Extent(ptr(100, 5), 8, true); l.Node(ptr(100, 5)) },
			"bucket 100 gen 5 (oldest 5) meta, 0 live, 0 dirty, prio 65535",
			Report{Extents: 1, Nodes: 1, Conflicts: 1},
		},
		{
			"two other roles", func(l *Loader) { l.Meta(100); l.Extent(ptr(100, 5), 8, true) },
			"bucket 100 gen 5 (oldest 5) meta, 0 live, 0 dirty, prio 65535",
			Report{Conflicts: 1},
		},
		{
			"overfull", func(l *Loader) { l.Extent(ptr(100, 5), 16, true); l.Extent(ptr(100, 5), 16, true) },
			"bucket 100 gen 5 (oldest 5) suspect, 32 live, 32 dirty, prio 777",
			Report{Extents: 2, Overfull: 1},
		},
		{
			"journal", func(l *Loader) { l.Journal(ptr(100, 5)); l.Journal(ptr(100, 4)); l.Journal(ptr(1, 4)) },
			"bucket 100 gen 5 (oldest 4) pinned, 0 live, 0 dirty, prio 777, 2 pins, residue",
			Report{Stale: 1, Outside: 1},
		},
		{
			"outside", func(l *Loader) {
				l.Extent(ptr(0, 0), 8, true)
				l.Extent(ptr(600, 0), 8, true)
				l.Extent(ondisk.MakePtr(5, g.BucketStart(100), 1), 8, true)
			},
			"bucket 100 gen 5 (oldest 5) empty, 0 live, 0 dirty, prio 777",
			Report{Outside: 3},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := NewLoader(nil, &g, Options{})
			if err != nil {
				t.Fatal(err)
			}
			p := ondisk.PrioSet{Data: make([]byte, g.MetaBytes()-40)}
			p.SetEntry(100, 777, 5)
			l.PrioSet(0, 200, &p)
			l.Meta(200)
			c.do(l)
			tab, report := l.Finish(10, 5)
			if got := tab.Info(100).String(); got != c.want {
				t.Errorf("\n got %s\nwant %s", got, c.want)
			}
			if report != c.report {
				t.Errorf("report %+v, want %+v", report, c.report)
			}
			want(t, tab, 2, Fixed)
			want(t, tab, 200, Meta)
			mustCheck(t, tab)
		})
	}
}

func TestNotEnoughToStart(t *testing.T) {
	g := testGeometry(600, 16)
	l, _ := NewLoader(nil, &g, Options{})
	for b := uint64(3); b < 600; b++ {
		l.Extent(ondisk.MakePtr(0, g.BucketStart(b), 0), 1, true)
	}
	tab, _ := l.Finish(1, 1)
	if err := tab.AllocatePrioSets(); !errors.Is(err, ErrNoSpace) {
		t.Error(err)
	}
}

// What is stored and loaded again is the same, however many prio sets there are and however large they are.
func TestGenerationsAndPrioritiesSurvive(t *testing.T) {
	for _, n := range []uint64{600, 2717, 2718, 20_000} {
		tab, seq := empty(t, n, Options{}), uint64(1)
		r := rand.New(rand.NewPCG(n, 0))
		for i := range tab.entries {
			if b := uint32(i); tab.Info(b).Category == Empty {
				w, s := tab.get(b)
				tab.set(b, w.withGen(uint8(r.Uint32())), (s | residueBit).withStamp(uint16(r.UintN(maxAge+1))))
			}
		}
		sets := oneBatch(t, tab, &seq)
		l, _ := NewLoader(nil, &tab.geo, Options{})
		named := tab.NamedPrioBuckets()
		for i := range sets {
			if i+1 < len(sets) && sets[i].NextBucket != uint64(named[i+1]) {
				t.Errorf("set %d names %d", i, sets[i].NextBucket)
			}
			buf := make([]byte, tab.geo.MetaBytes())
			sets[i].Encode(buf)
			back, err := ondisk.DecodePrioSet(buf, &tab.geo)
			if err != nil {
				t.Fatal(err)
			}
			l.PrioSet(i, named[i], &back)
			l.Meta(named[i])
		}
		again, _ := l.Finish(1, 1)
		if !slices.Equal(again.NamedPrioBuckets(), named) {
			t.Error("other prio buckets")
		}
		for i := range tab.entries {
			a, b := tab.Info(uint32(i)), again.Info(uint32(i))
			if a.Gen != b.Gen || a.Prio != b.Prio && a.Category != Meta {
				t.Fatalf("%v, was %v", b, a)
			}
		}
	}
}

func TestBitset(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint32Range(1, 300_000).Draw(t, "n")
		s, model := newBitset(n), map[uint32]bool{}
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			b := rapid.Uint32Range(0, n-1).Draw(t, "b")
			if model[b] {
				s.remove(b)
				delete(model, b)
			} else {
				s.add(b)
				model[b] = true
			}
			from := rapid.Uint32Range(0, n).Draw(t, "from")
			best, found := uint32(0), false
			for m := range model {
				if m >= from && (!found || m < best) {
					best, found = m, true
				}
			}
			if got, ok := s.next(from); ok != found || got != best || s.count != len(model) {
				t.Fatalf("next(%d) = %d, %v, want %d, %v; count %d of %d", from, got, ok, best, found, s.count, len(model))
			}
		}
	})
}

func TestWindow(t *testing.T) {
	w := newWindow()
	for seq := uint64(1); seq <= 5000; seq++ {
		w.put(uint32(seq%700), seq)
		w.put(uint32(seq%700), seq)
	}
	gone := 0
	for {
		_, ok, more := w.expire(4501)
		if !more {
			break
		}
		if ok {
			gone++
		}
	}
	if len(w.seq) != 500 || gone != 200 || w.queue.n != 500 {
		t.Errorf("%d left, %d gone, %d queued", len(w.seq), gone, w.queue.n)
	}
	for _, _, more := w.expire(9999); more; _, _, more = w.expire(9999) {
	}
	if len(w.seq) != 0 || w.queue.n != 0 || len(w.queue.chunks) != 1 {
		t.Errorf("%d left in %d chunks", len(w.seq), len(w.queue.chunks))
	}
}

// Batches grow while data finds nothing ready, up to a limit, and shrink again.
func TestBatchesFollowTheNeed(t *testing.T) {
	const n = 1 << 16
	tab := empty(t, n, Options{})
	var seq uint64
	sizes := map[int]bool{}
	one := func() int {
		before := tab.Stats().PickedEmpty
		oneBatch(t, tab, &seq)
		return int(tab.Stats().PickedEmpty - before)
	}
	batches(t, tab, &seq)
	usual := 0
	for range 20 { // all that is ready goes while a batch is on its way
		for {
			if _, _, ok := tab.Allocate(ForClean); !ok {
				break
			}
		}
		got := one()
		if usual == 0 {
			usual = got
		}
		sizes[got] = true
	}
	if tab.supply.times != tab.opt.most || len(sizes) < 3 {
		t.Errorf("batches of %v buckets, %d times the usual, at most %d", sizes, tab.supply.times, tab.opt.most)
	}
	for range 20 * supplyCalm {
		one()
	}
	if tab.supply.times != 1 {
		t.Errorf("batches are %d times the usual when nobody wants more", tab.supply.times)
	}
	mustCheck(t, tab)
}
