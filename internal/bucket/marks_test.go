package bucket

import (
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// marked returns a running table whose victims marks choose.
func marked(t *testing.T, n uint64) (*Table, *Marks) {
	t.Helper()
	table := empty(t, n, Options{})
	var seq uint64
	batches(t, table, &seq)
	m := table.NewMarks()
	table.UseMarks(m)
	for m.Seed() {
	}
	return table, m
}

// collect makes a collection over keys.
func collect(m *Marks, keys []ondisk.Key) {
	for m.Begin() {
	}
	for i := range keys {
		m.Mark(keys[i].P[0], keys[i].Size(), keys[i].Dirty(), false)
	}
	for m.Finish() {
	}
}

// batchOf makes a batch without writing anything, and returns what was picked.
func batchOf(t *testing.T, table *Table) (picked int) {
	t.Helper()
	if !table.BeginBatch() {
		t.Fatal("a batch is under way")
	}
	for table.FillBatch(1) {
	}
	picked = len(table.batch.list)
	for _, b := range table.batch.list {
		w, s := table.get(b)
		table.set(b, w, s.withState(stateReady))
		table.toPool(b)
	}
	table.batch.phase = idle
	return picked
}

// While a collection is on nothing is picked, but with allocates what was reclaimable when it began; what the walk has
// not come to by then is as good as empty. When nothing is left to pick a collection is due.
func TestMarksSayWhatMayBePicked(t *testing.T) {
	for _, allocates := range []bool{false, true} {
		table, m := marked(t, 2048)
		m.SetAllocates(allocates)
		if m.Due() {
			t.Error("a collection is due at once")
		}
		for m.Begin() {
		}
		got := batchOf(t, table)
		if allocates != (got > 0) {
			t.Errorf("allocates %v: %d picked during a collection", allocates, got)
		}
		for m.Finish() {
		}
		if m.Starved() || m.Due() {
			t.Error("a collection is due after one")
		}
		for range 2048 {
			if batchOf(t, table) == 0 {
				break
			}
			for {
				if _, _, ok := table.Allocate(ForClean); !ok {
					break
				}
			}
		}
		if !m.Starved() || !m.Due() || table.Pickable() != 0 || table.NeedBatch() {
			t.Errorf("there is nothing to pick, and no collection is due: %v", table.Counts())
		}
		if m.Stats().Differences != 0 || m.Stats().Looked == 0 {
			t.Errorf("%+v", m.Stats())
		}
	}
}

// What is held when a collection begins keeps its mark; what is clean in the index is, what the walk finds dirty is dirty,
// and what it did not come by and the exact counts have is an error, which costs no data.
func TestCollectionMarks(t *testing.T) {
	table, m := marked(t, 2048)
	var d Deltas
	put := func(u Use, sectors uint32, dirty bool) ondisk.Key {
		b, gen, ok := table.Allocate(u)
		if !ok {
			t.Fatal("no bucket")
		}
		p := ondisk.MakePtr(gen, table.geo.BucketStart(uint64(b)), 0)
		d.Put(table, p, sectors, dirty)
		table.Apply(&d, 1, true)
		d.Reset()
		table.Unpin(b)
		return ondisk.NewExtent(1, 64, sectors, p, dirty)
	}
	clean, dirty, lost := put(ForClean, 4, false), put(ForDirty, 6, true), put(ForDirty, 5, true)
	held, _, _ := table.Allocate(ForDirty)
	class := func(k ondisk.Key) uint8 { return m.of[table.geo.Bucket(k.P[0].Sector())].class() }
	collect(m, []ondisk.Key{clean, dirty})
	if class(clean) != markClean || class(dirty) != markDirty || m.of[held].class() != markDirty {
		t.Errorf("clean is %d, dirty %d, held %d", class(clean), class(dirty), m.of[held].class())
	}
	if got := m.of[table.geo.Bucket(dirty.P[0].Sector())].used; got != 6 {
		t.Errorf("6 sectors count as %d", got)
	}
	if class(lost) != markDirty || m.Stats().Differences != 1 {
		t.Errorf("dirty data that the walk has not seen is %d; %+v", class(lost), m.Stats())
	}
	m.Ask()
	if !m.Due() {
		t.Error("what was asked for is not due")
	}
	m.rearm()
	m.Spend(table.geo.BucketSectors * 2048 / collectShare)
	if m.Due() {
		t.Error("due a sector early")
	}
	if m.Spend(1); !m.Due() {
		t.Error("not due when a 16th of the cache was written")
	}
}

// However a policy of replacement picks, a call picks no more than without marks: each is some work under the lock.
func TestMarksPickInSlices(t *testing.T) {
	for _, p := range []ondisk.Replacement{ondisk.LRU, ondisk.FIFO, ondisk.Random} {
		table, _ := marked(t, 1<<16)
		table.SetPolicy(p)
		for {
			if _, _, ok := table.Allocate(ForClean); !ok {
				break
			}
		}
		if !table.BeginBatch() || table.batch.want < 2*pickSlice {
			t.Fatalf("%v: a batch of %d", p, table.batch.want)
		}
		for before, more := 0, true; more; before = len(table.batch.list) {
			if more = table.FillBatch(1); len(table.batch.list)-before > pickSlice {
				t.Fatalf("%v: %d picked in one call", p, len(table.batch.list)-before)
			}
		}
		if len(table.batch.list) < table.batch.want {
			t.Errorf("%v: %d picked of %d", p, len(table.batch.list), table.batch.want)
		}
	}
}
