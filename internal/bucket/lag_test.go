package bucket

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// cycle uses every bucket that can be had once, for clean data that is evicted later, and returns how many.
func cycle(t *testing.T, tab *Table, seq *uint64, n int) (used int) {
	t.Helper()
	for range n {
		b, _, ok := tab.Allocate(ForClean)
		if !ok {
			if tab.Wanted() == 0 || tab.Pickable() == 0 {
				return used
			}
			oneBatch(t, tab, seq)
			continue
		}
		put(tab, b, 16, 0, *seq)
		tab.Unpin(b)
		used++
	}
	return used
}

// Clean data evicted again and again leaves residue: the lag grows to its limit, and there the buckets rest, until
// a sweep finds out that nothing old is left.
func TestLagGrowsToItsLimitAndRests(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	used := cycle(t, tab, &seq, 600*120)
	if used < 500*80 {
		t.Errorf("only %d buckets used before they rest", used)
	}
	if lag := tab.MaxLag(); lag != pickLimit {
		t.Errorf("lag %d", lag)
	}
	if tab.stats.OverLag != 0 {
		t.Error("beyond what the format allows")
	}
	if !tab.SweepDue() {
		t.Error("no sweep is due")
	}
	mustCheck(t, tab)

	tab.SweepBegin(seq, tab.NewShadow())
	if ready, _ := tab.SweepEnd(seq); ready {
		t.Error("over while the journal still has entries from before")
	}
	for range 100 { // life goes on: whatever is evicted meanwhile has residue again
		cycle(t, tab, &seq, 1)
	}
	for ready, more := true, true; more; {
		if ready, more = tab.SweepEnd(seq + 1000); !ready {
			t.Fatal("not over")
		}
	}
	if tab.Lags(32) != 0 {
		t.Errorf("%d buckets still lag, the worst by %d", tab.Lags(32), tab.MaxLag())
	}
	mustCheck(t, tab)
	if cycle(t, tab, &seq, 1000) == 0 {
		t.Error("nothing to be had after the sweep")
	}
}

// One small range overwritten so often that the same buckets are used again and again within one journal window
// (J3): as lag they are at the limit, never beyond, and when the window has passed, the lag is gone.
func TestLagWithinOneJournalWindow(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	for range 600 * 120 {
		b, _, ok := tab.Allocate(ForDirty)
		if !ok {
			if tab.Pickable() == 0 {
				break
			}
			oneBatch(t, tab, &seq)
			continue
		}
		put(tab, b, 8, 8, seq)
		put(tab, b, -8, -8, seq)
		tab.Unpin(b)
	}
	if tab.MaxLag() != pickLimit || tab.stats.OverLag != 0 {
		t.Errorf("lag %d", tab.MaxLag())
	}
	mustCheck(t, tab)
	for tab.JournalPassed(seq + 1) {
	}
	if tab.MaxLag() != 0 {
		t.Errorf("lag %d after the window has passed", tab.MaxLag())
	}
	mustCheck(t, tab)
}

// A node that is freed costs one more generation than its bucket had when it was picked.
func TestFreedNodeStaysWithinTheLimit(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	for range 600 * 120 {
		b, _, ok := tab.Allocate(ForMeta)
		if !ok {
			if tab.Pickable() == 0 {
				break
			}
			oneBatch(t, tab, &seq)
			continue
		}
		tab.FreeNode(b)
		tab.Release(b)
	}
	if lag := tab.MaxLag(); lag < pickLimit || lag > ondisk.MaxStale {
		t.Errorf("lag %d", lag)
	}
	mustCheck(t, tab)
}

func TestReuseOfWhatLeftNoTraceCostsNoGeneration(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	for range 5000 {
		b, _, ok := tab.Allocate(ForDirty)
		if !ok {
			oneBatch(t, tab, &seq)
			continue
		}
		put(tab, b, 8, 8, seq)
		put(tab, b, -8, -8, seq)
		tab.Unpin(b)
		seq++
		for tab.JournalPassed(seq) {
		}
	}
	if tab.MaxLag() != 0 {
		t.Errorf("lag %d", tab.MaxLag())
	}
}

// A sweep takes over what its walk found, and what happened meanwhile.
func TestSweep(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	cycle(t, tab, &seq, 600*10)
	seq++
	for tab.JournalPassed(seq) {
	}
	at := func(b uint32, back uint8) ondisk.Ptr {
		return ondisk.MakePtr(tab.Gen(b)-back, tab.geo.BucketStart(uint64(b)), 0)
	}
	var seen, unseen, freeing, evicted, emptied uint32
	for b := uint32(3); emptied == 0; b++ {
		if i := tab.Info(b); i.Category == Clean && i.Gen-i.Oldest > 4 {
			switch {
			case seen == 0:
				seen = b
			case unseen == 0:
				unseen = b
			case freeing == 0:
				freeing = b
			case evicted == 0:
				evicted = b
			default:
				emptied = b
			}
		}
	}
	tab.SweepBegin(seq, tab.NewShadow())
	tab.SweepSee(at(seen, 3))
	tab.SweepSee(at(seen, 1))
	tab.SweepSee(at(freeing, 0))
	put(tab, emptied, -16, 0, seq)
	tab.BeginBatch()
	tab.pick(evicted, seq)
	tab.pick(emptied, seq)
	for ready, more := true, true; more; ready, more = tab.SweepEnd(seq + 1) {
		if !ready {
			t.Fatal("not over")
		}
	}
	for _, c := range []struct {
		what    string
		b       uint32
		lag     uint8
		residue bool
	}{
		{"seen", seen, 3, true},
		{"unseen", unseen, 0, false},
		{"freeing key", freeing, 0, true},
		{"evicted meanwhile", evicted, 1, true},
		{"emptied and picked meanwhile", emptied, 1, false},
	} {
		if i := tab.Info(c.b); i.Gen-i.Oldest != c.lag || i.Residue != c.residue {
			t.Errorf("%s: %v, want lag %d, residue %v", c.what, i, c.lag, c.residue)
		}
	}
	for tab.JournalPassed(seq + 1) {
	}
	if i := tab.Info(emptied); i.Gen != i.Oldest {
		t.Errorf("%v after the window has passed", i)
	}
	mustCheck(t, tab)
}

func TestSweepGivenUp(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	cycle(t, tab, &seq, 600*10)
	lag := tab.MaxLag()
	tab.SweepBegin(seq, tab.NewShadow())
	cycle(t, tab, &seq, 100)
	tab.SweepAbort()
	if tab.MaxLag() < lag {
		t.Errorf("lag %d, was %d", tab.MaxLag(), lag)
	}
	if ready, more := tab.SweepEnd(seq); !ready || more {
		t.Error("there is a sweep")
	}
	mustCheck(t, tab)
}

// The verifier's walk, with a cursor, while everything changes: at the end both counts are the same, and if one
// bucket's is not, it is found.
func TestRecountWhileThingsChange(t *testing.T) {
	for seed := range uint64(20) {
		tab, seq := empty(t, 600, Options{}), uint64(1)
		r := rand.New(rand.NewPCG(seed, 0))
		type key struct {
			ptr   ondisk.Ptr
			dirty bool
			some  bool
		}
		keys := make([]key, 2000)
		cursor := -1 // keys up to here have been walked
		var rc *Recount
		bucket, off := uint32(0), uint32(16)
		change := func() {
			if off == 16 {
				if bucket != 0 {
					tab.Unpin(bucket)
				}
				b, _, ok := tab.Allocate(ForDirty)
				for !ok {
					oneBatch(t, tab, &seq)
					b, _, ok = tab.Allocate(ForDirty)
				}
				bucket, off = b, 0
			}
			i := r.IntN(len(keys))
			k := key{ondisk.MakePtr(tab.Gen(bucket), tab.geo.BucketStart(uint64(bucket))+uint64(off), 0), r.IntN(40) == 0, true}
			off += 2
			var d Deltas
			if old := keys[i]; old.some {
				d.Drop(tab, old.ptr, 2, old.dirty)
			}
			d.Put(tab, k.ptr, 2, k.dirty)
			keys[i] = k
			if rc != nil && i <= cursor {
				rc.Apply(&d)
			}
			tab.Apply(&d, seq, true)
		}
		for range 4000 {
			change()
		}
		rc = tab.NewRecount(0, 1<<32-1)
		tab.Watch(rc)
		for cursor < len(keys)-1 {
			if r.IntN(3) == 0 {
				cursor++
				if k := keys[cursor]; k.some {
					rc.Add(k.ptr, 2, k.dirty)
				}
			} else {
				change()
			}
		}
		differ := func() (n int) {
			for from, done := uint32(0), false; !done; {
				from, done = rc.Compare(from, func(b, live, dirty uint32) {
					n++
					tab.Doubt(b, live, dirty, "verifier")
				}, nil)
			}
			return n
		}
		if n := differ(); n != 0 {
			t.Fatalf("seed %d: %d buckets differ", seed, n)
		}
		tab.Unwatch()
		for b := range tab.NBuckets() {
			if i := tab.Info(b); i.Category == Clean && i.Live > 2 {
				w, s := tab.get(b)
				tab.set(b, w.withCounts(i.Live-1, 0), s)
				if n := differ(); n != 1 || tab.Info(b).Category != Suspect || tab.Info(b).Live != i.Live {
					t.Errorf("%d found, %v", n, tab.Info(b))
				}
				break
			}
		}
		mustCheck(t, tab)
	}
}

// A pointer older than any that can be left is an error of ours, or damage: the bucket lags as it says.
func TestSweepFindsAPointerThatShouldNotBe(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	tab.SweepBegin(seq, tab.NewShadow())
	tab.SweepSee(ondisk.MakePtr(tab.Gen(b)-7, tab.geo.BucketStart(uint64(b)), 0))
	if i := tab.Info(b); i.Gen-i.Oldest != 7 || !i.Residue {
		t.Error(i)
	}
	if a := tab.Anomalies(); len(a) != 1 || !strings.Contains(a[0].String(), "pointer older than any known: change (+0 live, +0 dirty)") {
		t.Error(a)
	}
	mustCheck(t, tab)
}

func TestCheckFindsWhatDoesNotFit(t *testing.T) {
	for name, fn := range map[string]func(tab *Table, clean uint32){
		"counts":   func(tab *Table, b uint32) { tab.counts[Dirty]++ },
		"live":     func(tab *Table, b uint32) { tab.entries[b].lo += 1 << 8 },
		"overfull": func(tab *Table, b uint32) { w, s := tab.get(b); tab.set(b, w.withCounts(17, 0), s) },
		"dirty":    func(tab *Table, b uint32) { w, s := tab.get(b); tab.set(b, w.withCounts(1, 2), s) },
		"pools":    func(tab *Table, b uint32) { tab.pools[poolCommon].push(b) },
		"twice":    func(tab *Table, b uint32) { p := &tab.pools[poolCommon]; p.push(p.buf[p.head]) },
		"window":   func(tab *Table, b uint32) { tab.window.put(b, 5) },
		"index":    func(tab *Table, b uint32) { tab.index[cleanLow].remove(b) },
		"lag":      func(tab *Table, b uint32) { w, s := tab.get(b); tab.set(b, w.withGen(w.gen()+1), s) },
		"ready": func(tab *Table, b uint32) {
			w, s := tab.get(b)
			tab.window.put(b, 5000)
			tab.set(b, w.withCounts(0, 0), s.withState(stateReady)|windowBit)
			tab.pools[poolCommon].push(b)
		},
	} {
		t.Run(name, func(t *testing.T) {
			tab, seq := empty(t, 600, Options{}), uint64(1)
			batches(t, tab, &seq)
			b := mustAllocate(t, tab, ForClean)
			put(tab, b, 8, 0, seq)
			tab.Unpin(b)
			mustCheck(t, tab)
			if fn(tab, b); tab.Check() == nil {
				t.Error("not found")
			}
		})
	}
}

// A recount in several windows is that of the whole; what lies outside of one does not count there, nor is it zeroed.
func TestRecountByWindows(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	var list []uint32
	for range 20 {
		b := mustAllocate(t, tab, ForDirty)
		put(tab, b, 8, 4, seq)
		tab.Unpin(b)
		list = append(list, b)
	}
	seen := map[uint32]bool{}
	for first := uint32(0); first < tab.NBuckets(); first += 25 {
		r := tab.NewRecount(first, 25)
		tab.Watch(r)
		for _, b := range list {
			r.zero(b)
			r.Add(ondisk.MakePtr(tab.Gen(b), tab.geo.BucketStart(uint64(b)), 0), 4, true)
			var d Deltas
			d.Add(b, tab.Gen(b), 3, 0)
			r.Apply(&d)
		}
		for from, done := uint32(0), false; !done; {
			from, done = r.Compare(from, func(b, live, dirty uint32) {
				if seen[b] || live != 7 || dirty != 4 || b < first || b >= first+25 {
					t.Errorf("bucket %d: %d, %d in the window from %d on", b, live, dirty, first)
				}
				seen[b] = true
			}, nil)
		}
		tab.Unwatch()
	}
	if len(seen) != len(list) {
		t.Errorf("%d buckets differ, want %d", len(seen), len(list))
	}
}

// A bucket that was ready when a doubt came up is handed out once when it is trusted again, and counts that cannot be are not
// trusted.
func TestTrustAReadyBucket(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := tab.pools[poolCommon].buf[(tab.pools[poolCommon].head+3)%len(tab.pools[poolCommon].buf)]
	tab.Doubt(b, 2, 1, "for the test")
	want(t, tab, b, Suspect)
	if tab.Trust(b, 17, 0, seq) || tab.Trust(b, 1, 2, seq) {
		t.Error("trusted with counts that cannot be")
	}
	if !tab.Trust(b, 0, 0, seq) || tab.Trust(b, 0, 0, seq) {
		t.Error("not trusted once")
	}
	want(t, tab, b, Empty)
	mustCheck(t, tab)
}
