package offline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// runRing makes a journal that has gone round more than once and ends in the bucket with that index, two entries
// in each bucket. The last needed entries must be replayed. Each entry has a key of its own and one that all have;
// the result says how the volume reads.
func runRing(b *build, newest, needed int) []span {
	const shared = 1500
	n := int(b.super.NJournal)
	var spans []span
	for i := range 2 * (2*n + newest + 1) {
		if i > 0 && i%2 == 0 {
			b.nextBucket()
		}
		sector := dataAt(uint64(i), 0)
		e := b.journal(dirtyKey(100+10*uint64(i), 4, sector), dirtyKey(shared, 4, sector+4))
		e.LastSeq = uint64(max(1, int(e.Seq)-needed+1))
		spans = append(spans, cached(100+10*uint64(i), 104+10*uint64(i), sector), cached(shared, shared+4, sector+4))
	}
	return spans[len(spans)-2*needed:]
}

// Case 20 b: the newest entry in each possible bucket, the needed range running over the end of the ring. Entries
// of earlier laps stand behind those of the last and in the buckets before.
func TestNewestEntryInEachBucket(t *testing.T) {
	for _, n := range []int{4, 5, 8} {
		for newest := range n {
			for _, needed := range []int{1, 2, 3, 2*n - 3, 2 * n} {
				b := newBuildOf(t, shape{journal: n})
				spans := runRing(b, newest, needed)
				s := b.open()
				if w, found := s.Report.Worst(); found {
					t.Errorf("%d buckets, newest in %d, needed %d: found %v", n, newest, needed, w)
				}
				if got := s.Entries[len(s.Entries)-1]; got.Index != newest || got.Seq != b.newest().Seq || len(s.Needed) != needed {
					t.Errorf("%d buckets: newest is %+v, %d needed; want it in bucket %d, and %d", n, got, len(s.Needed), newest, needed)
				}
				mustRead(t, b.volume(s), spans...)
			}
		}
	}
}

// Case 20 c: the newest entry torn, from each of its sectors on, what was there before still being there: nothing,
// or entries of an earlier lap.
func TestNewestEntryTorn(t *testing.T) {
	for _, lap := range []bool{false, true} {
		for torn := range 3 {
			b := newBuild(t)
			b.journal(dirtyKey(16, 8, dataAt(0, 0)))
			spans := spansOf(dirtyKey(16, 8, dataAt(0, 0)))
			if lap {
				spans = runRing(b, 1, 3)
				b.nextBucket()
			}
			before := b.newest()
			var list []ondisk.Key
			for i := range uint64(50) { // with the header three sectors
				list = append(list, dirtyKey(700+2*i, 1, dataAt(100, 0)+i))
			}
			e := b.journal(list...)
			e.LastSeq = before.Seq
			b.then(func() {
				whole := b.cache.at(e.sector, 3)
				written := slices.Clone(whole)
				clear(whole)
				for _, old := range b.entries[:len(b.entries)-1] {
					if lap && old.index == e.index {
						b.putEntry(old)
					}
				}
				copy(whole[:torn*512], written)
			})
			s := b.open()
			if got := s.Newest.Seq; got != before.Seq {
				t.Errorf("torn at sector %d: newest is %d, want %d", torn, got, before.Seq)
			}
			said := s.Report.first(Harmless)
			if (said != nil) != (torn > 0) || said != nil && (said.Code != JournalTorn || said.Sector != int64(e.sector) || said.Sectors != 3) {
				t.Errorf("torn at sector %d: found %v", torn, said)
			}
			mustRead(t, b.volume(s), spans...)
		}
	}
}

// Case 20 d: one entry missing: of the needed range, the set does not open, and the number is named. Without the
// newest nobody can know that it ever was.
func TestEntryMissing(t *testing.T) {
	for missing := range 8 { // the first two are not needed
		b := newBuild(t)
		runRing(b, 2, 6)
		gone := b.entries[len(b.entries)-8+missing]
		b.then(func() { clear(b.cache.at(gone.sector, 1)) })
		b.seal()
		s, err := Open(context.Background(), b.cache, Options{})
		b.closes = append(b.closes, s.Close)
		if missing < 2 || missing == 7 {
			if err != nil {
				t.Errorf("entry %d, which is not needed or the newest: %v", gone.Seq, err)
			}
			continue
		}
		var f *FindingError
		if !errors.As(err, &f) || f.Finding.Code != JournalGap || !strings.Contains(err.Error(), fmt.Sprintf("entries %d-%d missing", gone.Seq, gone.Seq)) {
			t.Errorf("entry %d is missing: %v", gone.Seq, err)
		}
	}
}

// Several gaps are all named.
func TestEveryGapIsNamed(t *testing.T) {
	b := newBuild(t)
	for i := range uint64(9) {
		if i == 2 || i == 5 || i == 6 {
			b.ring.seq++
			continue
		}
		b.journal(dirtyKey(16+8*i, 8, dataAt(i, 0)))
	}
	s, _ := b.check()
	var said []string
	for _, f := range s.Report.Findings() {
		said = append(said, f.Message)
	}
	if len(said) != 2 || !strings.Contains(said[0], "entries 3-3 missing, needed are 1-9") || !strings.Contains(said[1], "entries 6-7 missing") {
		t.Errorf("found %q", said)
	}
}

// A journal key that a newer one hides was written to its bucket all the same: what else points there is stale.
func TestHiddenJournalKeyRaisesGeneration(t *testing.T) {
	b := newBuild(t)
	b.onlyLeaf(keySet(cleanKey(16, 8, dataAt(0, 0)), cleanKey(40, 8, dataAt(1, 0))))
	b.journal(withGen(2, dirtyKey(100, 8, dataAt(0, 0))))
	b.journal(dirtyKey(100, 8, dataAt(2, 0)))
	s := b.open()
	if s.Gen[dataBucket] != 2 || s.Role[dataBucket] != RoleFree {
		t.Errorf("generation %d, %v", s.Gen[dataBucket], s.Role[dataBucket])
	}
	mustRead(t, b.volume(s), cached(40, 48, dataAt(1, 0)), cached(100, 108, dataAt(2, 0)))
}

// Case 21: an older extent of 128 sectors under newer ones, wherever the two are stored, one dirty and the other
// clean, or both.
func TestOverlapsAfterReload(t *testing.T) {
	const start = 200
	type placed struct {
		name string
		put  func(b *build, old, young ondisk.Key)
	}
	places := []placed{
		{"two sets", func(b *build, old, young ondisk.Key) { b.onlyLeaf(keySet(old), keySet(young)) }},
		{"tree and journal", func(b *build, old, young ondisk.Key) {
			b.onlyLeaf(keySet(old))
			b.journal(young)
		}},
		{"two entries", func(b *build, old, young ondisk.Key) {
			b.journal(old)
			b.nextBucket()
			b.journal(young)
		}},
		{"one entry", func(b *build, old, young ondisk.Key) { b.journal(old, young) }},
		{"written to the leaf, and still in the journal", func(b *build, old, young ondisk.Key) {
			b.onlyLeaf(keySet(old), keySet(young))
			b.journal(old)
			b.journal(young)
		}},
		{"two leaves", func(b *build, old, young ondisk.Key) { // cut at the leaves' border, as a split leaves them
			cut := Pos{0, start + 62}
			l, r := splitAt(cut.Sector, old)
			yl, yr := splitAt(cut.Sector, young)
			b.root(b.interior(keySet(b.leaf(cut, sets(l, yl)...), b.leaf(top, sets(r, yr)...))), 1)
		}},
	}
	for _, newer := range []struct {
		name       string
		start, len uint64
		pointer    bool
	}{
		{"in the middle", start + 60, 8, true},
		{"at the start", start, 8, true},
		{"over the start", start - 4, 8, true},
		{"at the end", start + 120, 8, true},
		{"over the end", start + 124, 8, true},
		{"whole", start, 128, true},
		{"more than whole, an invalidation", start - 10, 148, false},
	} {
		for _, p := range places {
			for _, dirty := range [][2]bool{{false, false}, {false, true}, {true, false}, {true, true}} {
				b := newBuildOf(t, shape{bucketSectors: 128, buckets: 513})
				oldAt, newAt := b.geo.BucketStart(40), b.geo.BucketStart(41)
				extent := func(start, n, at uint64, isDirty bool) (ondisk.Key, int64) {
					if isDirty {
						return dirtyKey(start, n, at), int64(n) * 512
					}
					return cleanKey(start, n, at), 0
				}
				old, dirtyOld := extent(start, 128, oldAt, dirty[0])
				young, dirtyNew := extent(newer.start, newer.len, newAt, dirty[1])
				reads := []span{cached(start, start+128, oldAt), cached(newer.start, newer.start+newer.len, newAt)}
				if !newer.pointer {
					young, dirtyNew = goneKey(newer.start, newer.len), 0
					reads[1].src = source{fromDisk, newer.start}
				}
				if dirtyOld > 0 {
					dirtyOld -= int64(min(newer.start+newer.len, start+128)-max(newer.start, start)) * 512
				}
				p.put(b, old, young)
				s := b.open()
				mustRead(t, b.volume(s), reads...)
				if got, want := s.Stats.DirtyBytes, dirtyOld+dirtyNew; got != want || t.Failed() {
					t.Fatalf("%s, %s, old and new dirty: %v: %d bytes dirty, want %d", newer.name, p.name, dirty, got, want)
				}
			}
		}
	}
}

// splitAt cuts k in two at a sector; a part that is empty has size 0.
func splitAt(at uint64, k ondisk.Key) (left, right ondisk.Key) {
	left, right = k, k
	switch {
	case at >= k.End():
		right = goneKey(at, 0)
	case at <= k.Start():
		left = goneKey(at, 0)
	default:
		left.CutBack(at)
		right.CutFront(at)
	}
	return left, right
}

// sets makes a set of each key that has a size.
func sets(keys ...ondisk.Key) (list []bset) {
	for _, k := range keys {
		if k.Size() > 0 {
			list = append(list, keySet(k))
		}
	}
	return list
}

// Generations wrap at 256; what is newer is told by the shorter way round.
func TestGenerationsWrap(t *testing.T) {
	b := newBuild(t)
	for n, g := range []uint8{250, 255, 5, 128, 200} {
		b.gens[dataBucket+uint64(n)] = g
	}
	b.onlyLeaf(keySet(
		withGen(250, dirtyKey(16, 4, dataAt(0, 0))), // current
		withGen(249, cleanKey(24, 4, dataAt(0, 4))), // one behind
		withGen(2, dirtyKey(32, 4, dataAt(1, 0))),   // three ahead of 255
		withGen(255, cleanKey(40, 4, dataAt(1, 4))), // so this is stale
		withGen(250, cleanKey(48, 4, dataAt(2, 0))), // 11 behind 5
		withGen(5, cleanKey(56, 4, dataAt(2, 4))),
		withGen(32, cleanKey(64, 4, dataAt(3, 0))),  // 96 behind: the most that is allowed
		withGen(71, dirtyKey(72, 4, dataAt(4, 0))),  // 129 behind 200, so 127 ahead
		withGen(200, cleanKey(80, 4, dataAt(4, 4))), // and this is stale, too much
	))
	s, _ := b.check()
	for n, g := range []uint8{250, 2, 5, 128, 71} {
		if got := s.Gen[dataBucket+n]; got != g {
			t.Errorf("bucket %d: generation %d, want %d", n, got, g)
		}
	}
	if got := s.OldestGen[dataBucket+3]; got != 32 {
		t.Errorf("oldest pointer has generation %d, want 32", got)
	}
	if f := s.Report.first(AtRisk); f == nil || f.Code != KeyTooStale || f.Count != 1 || f.Sector != int64(dataAt(4, 4)) {
		t.Errorf("worst is %v", f)
	}
	mustRead(t, b.volume(s), cached(16, 20, dataAt(0, 0)), cached(32, 36, dataAt(1, 0)), cached(56, 60, dataAt(2, 4)), cached(72, 76, dataAt(4, 0)))
}

// A split is visible through its freeing key alone, the generation in the prio sets being that of before.
func TestFreeingKeys(t *testing.T) {
	b := newBuild(t)
	old := b.leaf(Pos{0, 1000}, keySet(dirtyKey(16, 8, dataAt(0, 0)), dirtyKey(500, 8, dataAt(0, 8))))
	last := b.leaf(top, keySet(dirtyKey(1000, 8, dataAt(1, 0))))
	low := b.leaf(Pos{0, 400}, keySet(dirtyKey(16, 8, dataAt(2, 0))))
	high := b.leaf(Pos{0, 1000}, keySet(dirtyKey(600, 8, dataAt(2, 8))))
	b.root(b.interior(keySet(old, last), keySet(freeingKey(old), low, high)), 1)
	s, _ := b.check()
	bucket := s.Geo.Bucket(old.P[0].Sector())
	if s.Role[bucket] != RoleFree || s.Gen[bucket] != 2 || s.DiskGen[bucket] != 1 {
		t.Errorf("old child: %v, generation %d, on disk %d", s.Role[bucket], s.Gen[bucket], s.DiskGen[bucket])
	}
	if s.Stats.Nodes != 4 {
		t.Errorf("%d nodes, want 4", s.Stats.Nodes)
	}
	if f := s.Report.first(Degraded); f != nil {
		t.Error(f)
	}
	mustRead(t, b.volume(s), cached(16, 24, dataAt(2, 0)), cached(600, 608, dataAt(2, 8)), cached(1000, 1008, dataAt(1, 0)))
}

// The freeing key may stand in another node than the child that a reused bucket has become.
func TestFreedBucketIsChildElsewhere(t *testing.T) {
	b := newBuild(t)
	old := b.leaf(Pos{0, 300}, keySet(dirtyKey(16, 8, dataAt(0, 0))))
	bucket := b.next - 1
	b.gens[bucket] = 3 // in the meantime: freed at 2, used again at 3
	b.next = bucket
	again := b.leaf(Pos{0, 900}, keySet(dirtyKey(700, 8, dataAt(1, 0))))
	moved := b.leaf(Pos{0, 300}, keySet(dirtyKey(20, 8, dataAt(2, 0))))
	left := b.node(Pos{0, 300}, []bset{keySet(old), keySet(freeingKey(old), moved)})
	right := b.interior(keySet(again, b.leaf(top)))
	b.root(b.interior(keySet(left, right)), 2)
	b.gens[bucket] = 1 // the prio sets know nothing of it
	s, _ := b.check()
	if s.Gen[bucket] != 3 {
		t.Errorf("generation %d, want 3", s.Gen[bucket])
	}
	if f := s.Report.first(Degraded); f != nil {
		t.Error(f)
	}
	mustRead(t, b.volume(s), cached(20, 28, dataAt(2, 0)), cached(700, 708, dataAt(1, 0)))
}

// Large sets have several prio sets, each pointing to the next.
func TestPrioChain(t *testing.T) {
	make3 := func(t *testing.T) *build {
		b := newBuildOf(t, shape{buckets: 6000})
		if b.geo.NPrio != 3 {
			t.Fatalf("%d prio sets", b.geo.NPrio)
		}
		per := b.geo.PrioPerBucket
		for _, n := range []uint64{per - 1, per, 2*per - 1, 2 * per, 5999} {
			b.gens[n] = uint8(n)
			b.cache.stamp(n*16, 4, fromCache)
		}
		var list []ondisk.Key
		for i, n := range []uint64{per - 1, per, 2*per - 1, 2 * per, 5999} {
			start := 16 + 10*uint64(i)
			list = append(list, withGen(uint8(n), dirtyKey(start, 4, n*16)), withGen(uint8(n)-1, dirtyKey(start+4, 4, n*16+4)))
		}
		b.onlyLeaf(keySet(list...))
		return b
	}
	b := make3(t)
	s := b.open()
	var want []span
	for i, n := range []uint64{b.geo.PrioPerBucket - 1, b.geo.PrioPerBucket, 2*b.geo.PrioPerBucket - 1, 2 * b.geo.PrioPerBucket, 5999} {
		want = append(want, cached(16+10*uint64(i), 20+10*uint64(i), n*16))
	}
	mustRead(t, b.volume(s), want...)

	for _, tt := range []struct {
		next uint64
		says string
	}{{b.prios[0], "is prio already"}, {5, "is journal already"}, {6000, "would be in bucket 6000"}, {0, "would be in bucket 0"}, {1 << 63, "would be in bucket"}} {
		b := make3(t)
		b.then(func() {
			raw := b.cache.at(b.geo.BucketStart(b.prios[1]), 16)
			p, err := ondisk.DecodePrioSet(raw, &b.geo)
			if err != nil {
				t.Fatal(err)
			}
			p.NextBucket = tt.next
			p.Encode(raw)
		})
		s, _ := b.check()
		f := s.Report.first(Fatal)
		if f == nil || f.Code != PrioChain || !strings.Contains(f.Message, tt.says) || f.Sector < 0 {
			t.Errorf("next %d: %v", tt.next, f)
		}
	}
}
