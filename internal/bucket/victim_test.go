package bucket

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// cleanTable makes a table of n buckets, nearly all clean, with ages and live sectors as given.
func cleanTable(t testing.TB, n uint64, sectors uint16, p ondisk.Replacement, of func(b uint32) (age uint16, live uint32)) *Table {
	t.Helper()
	return layTable(t, n, sectors, p, func(b uint32) (age uint16, live, dirty uint32) {
		age, live = of(b)
		return age, live, 0
	})
}

// layTable is cleanTable with dirty sectors.
func layTable(t testing.TB, n uint64, sectors uint16, p ondisk.Replacement, of func(b uint32) (age uint16, live, dirty uint32)) *Table {
	t.Helper()
	g := testGeometry(n, sectors)
	l, err := NewLoader(nil, &g, Options{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	first := uint32(g.FirstBucket) + 2*uint32(g.NPrio)
	for b := first; b < uint32(n); b++ {
		age, live, dirty := of(b)
		w, s := l.t.get(b)
		l.put(b, w.withCounts(live, dirty), s.withStamp(maxAge-age))
	}
	tab, _ := l.Finish(0, 0)
	if err := tab.AllocatePrioSets(); err != nil {
		t.Fatal(err)
	}
	return tab
}

// What LRU picks is among the lowest by the kernel's score, though it never sorts.
func TestLRUPicksLowScores(t *testing.T) {
	for name, of := range map[string]func(r *rand.Rand, b uint32) (uint16, uint32){
		"all ages":        func(r *rand.Rand, b uint32) (uint16, uint32) { return uint16(r.UintN(maxAge)), 128 },
		"neighbours":      func(r *rand.Rand, b uint32) (uint16, uint32) { return uint16(b / 2), 128 },
		"few old":         func(r *rand.Rand, b uint32) (uint16, uint32) { return uint16(pickOne(r.UintN(20) == 0, 9000, 10)), 128 },
		"all of one age":  func(r *rand.Rand, b uint32) (uint16, uint32) { return 5, 1 + uint32(r.UintN(128)) },
		"ages and sizes":  func(r *rand.Rand, b uint32) (uint16, uint32) { return uint16(r.UintN(3000)), 1 + uint32(r.UintN(128)) },
		"nothing was hit": func(r *rand.Rand, b uint32) (uint16, uint32) { return 0, 128 },
	} {
		t.Run(name, func(t *testing.T) {
			const n = 60_000
			r := rand.New(rand.NewPCG(1, 2))
			score := make([]uint64, n)
			live, age := make([]uint32, n), make([]uint32, n)
			tab := cleanTable(t, n, 128, ondisk.LRU, func(b uint32) (uint16, uint32) {
				a, l := of(r, b)
				age[b], live[b] = uint32(a), l
				return a, l
			})
			oldest := slices.Max(age)
			for b := range score {
				score[b] = uint64(oldest-age[b]+oldest/8+1) * uint64(live[b])
			}
			sorted := slices.DeleteFunc(slices.Clone(score), func(s uint64) bool { return s == 0 })
			slices.Sort(sorted)
			seq := uint64(1)
			batches(t, tab, &seq) // what was empty, and the hand's first look around
			tab.pools[poolCommon] = newRing(n)
			tab.opt.Ready = 2000
			tab.stats.Examined, tab.stats.Evicted = 0, 0
			oneBatch(t, tab, &seq)
			var rank float64
			for _, b := range tab.batch.list {
				at, _ := slices.BinarySearch(sorted, score[b])
				rank += float64(at) / float64(len(sorted)) / float64(len(tab.batch.list))
			}
			t.Logf("%d picked, %.1f looked at for each, mean rank %.3f (0 is the lowest, a random choice 0.5)",
				tab.stats.Evicted, float64(tab.stats.Examined)/float64(tab.stats.Evicted), rank)
			if rank > 0.12 {
				t.Errorf("mean rank %.3f", rank)
			}
			if tab.stats.Examined > 40*tab.stats.Evicted {
				t.Errorf("%d looked at for %d", tab.stats.Examined, tab.stats.Evicted)
			}
		})
	}
}

func pickOne(yes bool, a, b int) int {
	if yes {
		return a
	}
	return b
}

func TestFIFOGoesRound(t *testing.T) {
	tab := cleanTable(t, 5000, 16, ondisk.FIFO, func(b uint32) (uint16, uint32) { return 0, 16 })
	seq := uint64(1)
	last, seen := uint32(0), uint64(0)
	for range 100 {
		if cycle(t, tab, &seq, 10); tab.stats.Batches == seen {
			continue
		}
		seen = tab.stats.Batches
		for _, b := range tab.batch.list {
			if b <= last {
				t.Fatalf("%d after %d", b, last)
			}
			last = b
		}
	}
}

func TestRandomIsSpread(t *testing.T) {
	tab := cleanTable(t, 50_000, 16, ondisk.Random, func(b uint32) (uint16, uint32) { return 0, 16 })
	seq := uint64(1)
	var parts [10]int
	total := 0
	for range 30 {
		cycle(t, tab, &seq, 100)
		for _, b := range tab.batch.list {
			parts[b/5000]++
			total++
		}
		tab.batch.list = tab.batch.list[:0]
	}
	for i, n := range parts {
		if n < total/20 || n > total/5 {
			t.Errorf("part %d of 10 got %d of %d", i, n, total)
		}
	}
	tab.SetPolicy(ondisk.LRU)
	cycle(t, tab, &seq, 100)
	mustCheck(t, tab)
}

func TestPrioritiesSinkAndStayAtZero(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	put(tab, b, 8, 0, seq)
	prio := func() uint16 { return tab.Info(b).Prio }
	if prio() != ondisk.PrioInitial {
		t.Errorf("%d at first", prio())
	}
	tab.Age(uint64(tab.clock.per) * 5)
	tab.Tick()
	if prio() != ondisk.PrioInitial-5 {
		t.Errorf("%d after 5 ticks", prio())
	}
	tab.Touch(b)
	if prio() != ondisk.PrioInitial {
		t.Errorf("%d after a hit", prio())
	}
	for i := range 200_000 {
		tab.Age(uint64(tab.clock.per))
		tab.Tick()
		if want := uint16(max(0, ondisk.PrioInitial-1-i)); prio() != want {
			t.Fatalf("%d after %d ticks, want %d", prio(), i+1, want)
		}
	}
	if p := tab.Info(tab.NamedPrioBuckets()[0]).Prio; p != ondisk.PrioMetadata {
		t.Errorf("metadata has %d", p)
	}
	mustCheck(t, tab)
}

// Hits and lookups may come in while the lock is held shared.
func TestTouchTogether(t *testing.T) {
	tab, seq := empty(t, 600, Options{}), uint64(1)
	batches(t, tab, &seq)
	b := mustAllocate(t, tab, ForClean)
	var mu sync.RWMutex
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				tab.Age(100)
				mu.RLock()
				if tab.Stale(ondisk.MakePtr(tab.Gen(b), tab.geo.BucketStart(uint64(b)), 0)) == 0 {
					tab.Touch(b)
				}
				mu.RUnlock()
			}
		})
	}
	for range 2000 {
		mu.Lock()
		put(tab, b, 8, 0, seq)
		put(tab, b, -8, 0, seq)
		mu.Unlock()
	}
	wg.Wait()
	mustCheck(t, tab)
}
