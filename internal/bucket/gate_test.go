package bucket

import (
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// stored returns the generation of b that a write of the generations would store now.
func stored(t *testing.T, tab *Table, b uint32, seq *uint64) uint8 {
	t.Helper()
	sets := oneBatch(t, tab, seq)
	per := uint32(tab.geo.PrioPerBucket)
	_, gen := sets[b/per].Entry(int(b % per))
	return gen
}

func TestFreedNodeWaitsForItsParent(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForMeta)
	gen := tab.Gen(b)
	want(t, tab, b, Meta)
	tab.FreeNode(b)
	if i := tab.Info(b); i.Category != Meta || !i.Gated || i.Gen != gen+1 || !i.Residue {
		t.Error(i)
	}
	if g := stored(t, tab, b, &seq); g != gen {
		t.Errorf("stored as %d while the parent may name %d (I6)", g, gen)
	}
	tab.Release(b)
	want(t, tab, b, Empty)
	mustCheck(t, tab)
	if g := stored(t, tab, b, &seq); g < gen+1 {
		t.Errorf("stored as %d after its release", g)
	}
}

func TestOldRootWaitsForItsEntry(t *testing.T) {
	for _, brk := range []Breakage{0, breakSeqGate} {
		tab, seq := empty(t, 600, Options{}), uint64(1)
		batches(t, tab, &seq)
		b := mustAllocate(t, tab, ForMeta)
		gen := tab.Gen(b)
		tab.broken = brk
		tab.FreeAfter(b, seq+3)
		tab.broken = 0
		for tab.JournalDurable(seq + 2) {
		}
		if early := tab.Info(b).Category != Meta; early != (brk != 0) {
			t.Errorf("%v before its entry was durable; rule broken: %v", tab.Info(b), brk != 0)
		}
		if g := stored(t, tab, b, &seq); (g != gen) != (brk != 0) {
			t.Errorf("stored as %d, named as %d; rule broken: %v", g, gen, brk != 0)
		}
		seq += 3
		for tab.JournalDurable(seq) {
		}
		if brk == 0 {
			want(t, tab, b, Empty)
		}
		mustCheck(t, tab)
	}
}

func TestNodeThatWasNotLinked(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForMeta)
	tab.Return(b)
	if i := tab.Info(b); i.Category != Empty || i.Residue {
		t.Error(i)
	}
	mustCheck(t, tab)
}

func TestBatchNeedsItsJournalEntry(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	put(tab, b, 8, 0, 50)
	tab.Unpin(b)
	tab.opt.Ready = tab.Pickable()
	tab.pools[poolCommon] = newRing(600)
	tab.BeginBatch()
	for tab.FillBatch(50) {
	}
	want(t, tab, b, Inc)
	snapshot(tab)
	defer func() {
		if recover() == nil {
			t.Error("a batch that entry 49 closes holds a bucket of entry 50")
		}
	}()
	for tab.BatchDurable(49) {
	}
}

// Writing the generations can fail, and be done again.
func TestSnapshotAgain(t *testing.T) {
	tab, seq := empty(t, 20_000, Options{}), uint64(1)
	tab.BeginBatch()
	for tab.FillBatch(seq) {
	}
	snapshot(tab)
	p := ondisk.PrioSet{Data: make([]byte, tab.geo.MetaBytes()-40)}
	tab.SnapshotGens(&p, 0, 0)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("durable though only half was copied the second time")
			}
		}()
		tab.BatchDurable(seq)
	}()
	snapshot(tab)
	for tab.BatchDurable(seq) {
	}
	mustCheck(t, tab)
}

func TestReservesFillFirstAndGoLast(t *testing.T) {
	tab, seq := empty(t, 2000, Options{}), uint64(1)
	oneBatch(t, tab, &seq)
	meta, moving := len(tab.pools[poolMeta].buf), len(tab.pools[poolMoving].buf)
	if tab.pools[poolMeta].n != meta || tab.pools[poolMoving].n != moving {
		t.Fatal("reserves are not full")
	}
	common := tab.pools[poolCommon].n
	if n := common + meta/2; !tab.CanSpare(n) || tab.CanSpare(n+1) {
		t.Errorf("to be spared: %d %v, %d %v", n, tab.CanSpare(n), n+1, tab.CanSpare(n+1))
	}
	for range common {
		mustAllocate(t, tab, ForMeta)
	}
	if tab.pools[poolMeta].n != meta {
		t.Error("metadata took from its reserve first")
	}
	if _, _, ok := tab.Allocate(ForClean); ok {
		t.Error("data got a bucket from a reserve")
	}
	if tab.CanAllocate() != meta {
		t.Errorf("%d can be had, want %d", tab.CanAllocate(), meta)
	}
	for range moving {
		mustAllocate(t, tab, ForMoving)
	}
	for range meta {
		mustAllocate(t, tab, ForMeta)
	}
	for _, u := range []Use{ForDirty, ForClean, ForMoving, ForMeta} {
		if _, _, ok := tab.Allocate(u); ok {
			t.Errorf("use %d got a bucket from nowhere", u)
		}
	}
	if !tab.NeedBatch() {
		t.Error("no batch needed")
	}
	batches(t, tab, &seq)
	mustCheck(t, tab)
}

// fill writes data until nothing more is to be had, batch after batch, nothing ever becoming free.
func fill(t *testing.T, tab *Table, u Use, seq *uint64) (n int) {
	t.Helper()
	for {
		b, _, ok := tab.Allocate(u)
		if !ok {
			before := tab.Stats().Batches
			if tab.NeedBatch() {
				oneBatch(t, tab, seq)
			}
			if b, _, ok = tab.Allocate(u); !ok {
				if tab.Stats().Batches == before {
					return n
				}
				continue
			}
		}
		n++
		d := int32(0)
		if u == ForDirty {
			d = 16
		}
		put(tab, b, 16, d, *seq)
		tab.Unpin(b)
		if u == ForClean && n > 5000 {
			return n // it goes on for ever
		}
	}
}

func TestFullOfDirtyData(t *testing.T) {
	for _, n := range []uint64{513, 600, 5000, 70_000} {
		tab, seq := empty(t, n, Options{}), uint64(1)
		wrote := fill(t, tab, ForDirty, &seq)
		c := tab.Counts()
		left := int(n) - c[Dirty] - c[Meta] - c[Fixed]
		spare := tab.spare() + int(tab.geo.KernelFreeInc) + tab.opt.MovingReserve + tab.nodeSlack()
		if wrote != c[Dirty] || left < spare || left > spare+tab.opt.Batch {
			t.Errorf("%d buckets: %d dirty, %d left, head-room %d", n, c[Dirty], left, spare)
		}
		// What is left is there for metadata and, but for the part that must be unused, for clean data.
		if tab.CanAllocate() < tab.spare() {
			t.Errorf("%d buckets: metadata can have %d", n, tab.CanAllocate())
		}
		if m := tab.Movable(); m < tab.opt.MovingReserve || m > tab.opt.MovingReserve+tab.nodeSlack()+tab.opt.Batch {
			t.Errorf("%d buckets: %d for moving, reserve %d", n, m, tab.opt.MovingReserve)
		}
		var moved []uint32
		for m := tab.Movable(); m > 0; m-- {
			moved = append(moved, mustAllocate(t, tab, ForMoving))
		}
		if b, _, ok := tab.Allocate(ForMoving); ok {
			t.Errorf("%d buckets: moving got %d of the head-room", n, b)
		}
		for _, b := range moved {
			tab.Unpin(b)
		}
		oneBatch(t, tab, &seq)
		b := mustAllocate(t, tab, ForClean)
		tab.Unpin(b)
		mustCheck(t, tab)

		// One bucket is written back: it can be used again at once.
		var dirty uint32
		for dirty = 0; tab.Info(dirty).Category != Dirty; dirty++ {
		}
		put(tab, dirty, 0, -16, seq)
		fill(t, tab, ForDirty, &seq)
		if got := tab.Counts()[Dirty]; got < wrote {
			t.Errorf("%d buckets: only %d dirty again", n, got)
		}
		mustCheck(t, tab)
	}
}

func TestFullOfCleanData(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	fill(t, tab, ForClean, &seq)
	if tab.unused() < tab.spare() {
		t.Errorf("%d unused, want %d", tab.unused(), tab.spare())
	}
	if tab.InUse() > 5 {
		t.Errorf("%d %% in use: %v", tab.InUse(), tab.Counts())
	}
	mustCheck(t, tab)
}

func TestFullOfMetadata(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	fill(t, tab, ForDirty, &seq)
	var nodes []uint32
	for {
		b, _, ok := tab.Allocate(ForMeta)
		if !ok {
			if tab.Wanted() == 0 || tab.Pickable() == 0 {
				break
			}
			oneBatch(t, tab, &seq)
			continue
		}
		nodes = append(nodes, b)
	}
	if len(nodes) < tab.spare() {
		t.Errorf("only %d nodes", len(nodes))
	}
	for _, u := range []Use{ForDirty, ForClean, ForMoving} {
		if _, _, ok := tab.Allocate(u); ok {
			t.Errorf("use %d got a bucket", u)
		}
	}
	for _, b := range nodes {
		tab.FreeNode(b)
		tab.Release(b)
	}
	batches(t, tab, &seq)
	mustAllocate(t, tab, ForClean)
	mustCheck(t, tab)
}

// All that is clean was cleaned just now: for a kernel it is dirty still, so it must become ready to count.
func TestDirtyDataIsNotRefusedWhereAllWasCleanedJustNow(t *testing.T) {
	tab, seq := empty(t, 5000, Options{}), uint64(1)
	wrote := fill(t, tab, ForDirty, &seq)
	for b := range tab.NBuckets() {
		if i := tab.Info(b); i.Category == Dirty {
			put(tab, b, 0, -int32(i.Dirty), seq)
		}
	}
	if again := fill(t, tab, ForDirty, &seq); again < wrote {
		t.Errorf("%d dirty, then %d", wrote, again)
	}
	mustCheck(t, tab)
}

func TestBatchWithoutBuckets(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	named := tab.NamedPrioBuckets()[0]
	oneBatch(t, tab, &seq)
	if tab.NamedPrioBuckets()[0] == named {
		t.Error("the same prio set twice")
	}
	if tab.BeginBatch(); tab.BeginBatch() {
		t.Error("two at once")
	}
}
