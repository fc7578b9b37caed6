package bucket

import (
	"math/rand/v2"
	"testing"
)

// Histories of the model discard buckets, and never any that is not empty; each is discarded once, until it is written.
func TestModelDiscards(t *testing.T) {
	total := 0
	for seed := range uint64(60) {
		w := newWorld(0, t.Fatalf)
		choose := rand.New(rand.NewPCG(seed, 7)).IntN
		for range 300 {
			before := w.t.Counts()
			n := w.trimmed
			if w.step(choose, allSteps) == "discard" && w.trimmed > n {
				after := w.t.Counts()
				if d := w.trimmed - n; before[Empty]-after[Empty] != d || after[Pinned]-before[Pinned] != d {
					t.Fatalf("seed %d: %d discarded, categories %v before and %v after", seed, d, before, after)
				}
			}
			if err := w.t.Check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		total += w.trimmed
	}
	t.Logf("%d discards", total)
	if total < 200 {
		t.Errorf("%d discards in all: too few to mean anything", total)
	}
}

// Empty buckets are discarded once each, in runs, and again when they have been written and emptied. Meanwhile no batch
// gets them, they do not count as used, and their generation is not what a reader knows.
func TestDiscardOnce(t *testing.T) {
	tab, seq := empty(t, 4000, Options{}), uint64(1)
	batches(t, tab, &seq)
	left, used := tab.Discardable(), tab.Used()
	if left == 0 || left != tab.Counts()[Empty] {
		t.Fatalf("%d to be discarded, %v", left, tab.Counts())
	}
	for left > 0 {
		first, n := tab.DiscardBegin(16)
		if n == 0 || n > 16 || tab.Discardable() != left-n || tab.Used() != used {
			t.Fatalf("%d of %d taken, %d left, %d used of %d", n, left, tab.Discardable(), tab.Used(), used)
		}
		for b := first; b < first+uint32(n); b++ {
			want(t, tab, b, Pinned)
			if i := tab.Info(b); i.Gen != 1 || i.Oldest != i.Gen {
				t.Fatal(i)
			}
		}
		mustCheck(t, tab)
		tab.DiscardEnd(first, n)
		want(t, tab, first, Empty)
		left -= n
	}
	if first, n := tab.DiscardBegin(16); n != 0 {
		t.Fatalf("bucket %d is discarded again", first)
	}
	mustCheck(t, tab)
	// One that has been written is there again when it is empty, and out of the journal's window.
	b := mustAllocate(t, tab, ForClean)
	tab.Unpin(b)
	if got, n := tab.DiscardBegin(16); n != 1 || got != b {
		t.Fatalf("%d buckets from %d on, want %d", n, got, b)
	}
	tab.DiscardEnd(b, 1)
	mustCheck(t, tab)
}

// What is emptied waits until no needed entry has a pointer to it; what was evicted, until a sweep.
func TestDiscardWaits(t *testing.T) {
	tab, seq := empty(t, 4000, Options{}), uint64(1)
	batches(t, tab, &seq)
	for tab.Discardable() > 0 {
		first, n := tab.DiscardBegin(64)
		tab.DiscardEnd(first, n)
	}
	b := mustAllocate(t, tab, ForDirty)
	var d Deltas
	d.Add(b, tab.Gen(b), 8, 8)
	tab.Apply(&d, seq, true)
	tab.Unpin(b)
	d.Add(b, tab.Gen(b), -8, -8)
	tab.Apply(&d, seq, true)
	want(t, tab, b, Empty)
	for _, last := range []uint64{0, seq} {
		for tab.JournalDurable(seq) || tab.JournalPassed(last) {
		}
		if _, n := tab.DiscardBegin(1); n != 0 {
			t.Fatalf("%v is discarded while entries from %d on are needed", tab.Info(b), last)
		}
	}
	for tab.JournalPassed(seq + 1) {
	}
	if got, n := tab.DiscardBegin(1); n != 1 || got != b {
		t.Fatalf("%d buckets from %d on, want %d", n, got, b)
	}
	mustCheck(t, tab)
}

// There are no discards where fewer buckets would be felt.
func TestDiscardSkipped(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	if _, n := tab.DiscardBegin(1); n != 1 {
		t.Fatal("none although all is empty")
	}
	for 2*tab.pools[poolCommon].n >= tab.opt.Ready {
		mustAllocate(t, tab, ForClean)
	}
	if _, n := tab.DiscardBegin(1); n != 0 {
		t.Error("a discard although few buckets are ready")
	}
}
