package journal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A ringImage is a journal put together by hand.
type ringImage struct {
	t   testing.TB
	dev *blockdev.MemoryDevice
	src Source
	seq uint64
	at  []int // blocks used of each bucket
}

func newRingImage(t testing.TB, l layout) *ringImage {
	sb := l.superblock()
	d := newDisk(t, l, nil)
	t.Cleanup(func() { d.Close() })
	io, err := blockdev.NewIO(d, 4)
	must(t, err)
	t.Cleanup(func() { io.Close() })
	return &ringImage{t: t, dev: d, at: make([]int, l.buckets), src: Source{IO: io, Geometry: ondisk.NewGeometry(sb), Buckets: sb.D[:l.buckets]}}
}

// entry writes the next entry behind what the bucket holds, with that many keys, and returns its bytes.
func (r *ringImage) entry(bucket int, lastSeq uint64, keys int) []byte {
	r.seq++
	set := ondisk.JSet{Magic: r.src.Geometry.JSetMagic(), Seq: r.seq, Version: 1, LastSeq: lastSeq, Root: ondisk.MaxKey, UUIDBucket: ondisk.MaxKey}
	for i := range keys {
		k := ondisk.NewInvalidation(1, r.seq*10000+uint64(i), 8)
		set.Data = ondisk.AppendKey(set.Data, &k)
	}
	b := make([]byte, 64<<10)
	n := set.Encode(b)
	block := r.src.Geometry.BlockBytes()
	size := (n + block - 1) / block * block
	at := r.src.at(int32(bucket), int64(r.at[bucket]*block))
	to := r.dev.Bytes()[at:][:size]
	copy(to, b)
	r.at[bucket] += size / block
	return to
}

func (r *ringImage) read() (*Recovery, error) { return Read(context.Background(), r.src) }

func seqs(rec *Recovery) (from, to uint64) {
	return rec.Entries[0].Seq, rec.Entries[len(rec.Entries)-1].Seq
}

// TestNewestInEachBucket is case 20 (b): the needed range runs over the ring's end, or not.
func TestNewestInEachBucket(t *testing.T) {
	for _, n := range []int{2, 4, 7} {
		for newest := range n {
			l := smallest
			l.buckets = n
			r := newRingImage(t, l)
			for i := range n { // an earlier lap, in the same places
				r.entry(i, r.seq+1, 2)
				r.entry(i, r.seq+1, 0)
			}
			clear(r.at)
			first := r.seq + 1
			last := first
			for i := range n { // oldest first, the newest last
				last = r.seq + 1
				r.entry((newest+1+i)%n, first, 3)
			}
			rec, err := r.read()
			must(t, err)
			if from, to := seqs(rec); from != first || to != last || rec.Newest.Seq != last || rec.bucket != newest {
				t.Errorf("%d buckets, newest in %d: read %d-%d, newest %d in %d; want %d-%d", n, newest, from, to, rec.Newest.Seq, rec.bucket, first, last)
			}
			keys := 0
			must(t, rec.EachKey(context.Background(), func(uint64, *ondisk.Key) error { keys++; return nil }))
			if keys != 3*n {
				t.Errorf("%d keys, want %d", keys, 3*n)
			}
		}
	}
}

// TestTornNewest is case 20 (c): whatever sector of the newest entry is missing, it has never been.
func TestTornNewest(t *testing.T) {
	for sector := range 5 {
		for _, fill := range []byte{0, 0xff} {
			r := newRingImage(t, smallest)
			r.entry(1, 1, 5)
			b := r.entry(1, 1, 120)
			if len(b) != 5*512 {
				t.Fatalf("%d bytes", len(b))
			}
			for i := range 512 {
				b[sector*512+i] = fill
			}
			rec, err := r.read()
			must(t, err)
			if from, to := seqs(rec); from != 1 || to != 1 {
				t.Errorf("sector %d: read %d-%d, want 1-1", sector, from, to)
			}
		}
	}
}

// TestMissingEntries is case 20 (d).
func TestMissingEntries(t *testing.T) {
	for _, c := range []struct {
		name    string
		damage  func(r *ringImage, entries [][]byte)
		discard bool
		want    string // the error, or the range read
	}{
		{name: "whole", damage: func(*ringImage, [][]byte) {}, want: "1-9"},
		{name: "a key flipped", damage: func(_ *ringImage, e [][]byte) { e[4][300] ^= 1 }, want: "cache: journal entries 5-5 missing! (replaying 1-9)"},
		{name: "two flipped", damage: func(_ *ringImage, e [][]byte) { e[3][300] ^= 1; e[7][300] ^= 1 }, want: "cache: journal entries 4-4, 8-8 missing! (replaying 1-9)"},
		{name: "first of a bucket flipped", damage: func(_ *ringImage, e [][]byte) { e[3][300] ^= 1 }, want: "cache: journal entries 4-4 missing! (replaying 1-9)"},
		{name: "gone", damage: func(_ *ringImage, e [][]byte) { clear(e[4]) }, want: "cache: journal entries 5-6 missing! (replaying 1-9)"},
		{name: "the last but one flipped", damage: func(_ *ringImage, e [][]byte) { e[7][300] ^= 1 }, want: "cache: journal entries 8-8 missing! (replaying 1-9)"},
		{name: "the first bucket", damage: func(_ *ringImage, e [][]byte) { clear(e[0]) }, want: "cache: journal entries 1-3 missing! (replaying 1-9)"},
		{name: "the first bucket discarded", damage: func(_ *ringImage, e [][]byte) { clear(e[0]) }, discard: true, want: "4-9"},
		{name: "more than discarded", damage: func(_ *ringImage, e [][]byte) { clear(e[0]); clear(e[5]) }, discard: true, want: "cache: journal entries 6-6 missing! (replaying 1-9)"},
		{name: "all", damage: func(_ *ringImage, e [][]byte) {
			for _, b := range e {
				clear(b)
			}
		}, want: "cache: no journal entries found in 4 buckets"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRingImage(t, smallest)
			var entries [][]byte
			for i := range 9 {
				entries = append(entries, r.entry(i/3, 1, 9))
			}
			c.damage(r, entries)
			r.src.Discard = c.discard
			rec, err := r.read()
			if err != nil {
				if err.Error() != c.want {
					t.Errorf("%v, want %s", err, c.want)
				}
				var m *MissingError
				if errors.As(err, &m) != errors.Is(err, ErrMissing) || errors.Is(err, ErrMissing) != errors.Is(err, ondisk.ErrCorrupt) || !errors.Is(err, ErrMissing) && !errors.Is(err, ErrEmpty) {
					t.Errorf("%#v is of the wrong kind", err)
				}
				return
			}
			if from, to := seqs(rec); fmt.Sprintf("%d-%d", from, to) != c.want {
				t.Errorf("read %d-%d, want %s", from, to, c.want)
			}
			if c.discard && rec.Discarded != (Range{1, 3}) {
				t.Errorf("discarded %v, want 1-3", rec.Discarded)
			}
		})
	}
}

// TestEarlierLife: what is left from before the set was made anew does not count where it can be told apart, and
// Erase leaves nothing of it.
func TestEarlierLife(t *testing.T) {
	r := newRingImage(t, smallest)
	r.seq = 500
	for i := range 4 {
		for range 3 {
			r.entry(i, r.seq+1, 1)
		}
	}
	clear(r.at)
	r.seq = 0
	r.entry(1, 1, 1) // over the first block of the second bucket; behind it lies entry 505
	for _, i := range []int{0, 2, 3} {
		clear(r.dev.Bytes()[r.src.at(int32(i), 0):][:512])
	}
	rec, err := r.read()
	must(t, err)
	if rec.Newest.Seq != 1 {
		t.Errorf("newest is %d, want 1", rec.Newest.Seq)
	}
	must(t, Erase(context.Background(), r.src))
	if _, err := r.read(); !errors.Is(err, ErrEmpty) {
		t.Errorf("after Erase: %v", err)
	}
}

// TestTwiceTheSameEntry: the copy that others were written behind is the one that counts.
func TestTwiceTheSameEntry(t *testing.T) {
	r := newRingImage(t, smallest)
	r.entry(0, 1, 1) // 1
	r.entry(0, 1, 1) // 2, which arrived late
	r.seq = 1
	r.entry(1, 1, 2) // 2, of the next life
	r.entry(1, 1, 1) // 3
	rec, err := r.read()
	must(t, err)
	if n := len(rec.Entries); n != 3 || rec.Entries[1].Bucket != 1 {
		t.Errorf("%+v", rec.Entries)
	}
}

// TestRingOrder: entries that are all there and not in ring order are no journal that anyone wrote.
func TestRingOrder(t *testing.T) {
	r := newRingImage(t, smallest)
	r.entry(0, 1, 1)
	r.entry(2, 1, 1)
	if _, err := r.read(); !errors.Is(err, ondisk.ErrCorrupt) || errors.Is(err, ErrMissing) {
		t.Errorf("entries in buckets 0 and 2: %v", err)
	}
}

// TestUnreadableBucket: it could hold the newest entry.
func TestUnreadableBucket(t *testing.T) {
	r := newRingImage(t, smallest)
	for i := range 4 {
		r.entry(i, 1, 1)
	}
	f := blockdev.NewFaulty(r.dev, 1)
	f.Add(blockdev.Fault{Off: r.src.at(2, 0), Len: 512, Ops: []blockdev.Op{blockdev.OpRead}})
	io, err := blockdev.NewIO(f, 1)
	must(t, err)
	defer io.Close()
	r.src.IO = io
	if _, err := r.read(); !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), "journal bucket 2") {
		t.Errorf("%v", err)
	}
}

// TestReadLargeBuckets reads buckets larger than the window, full of entries of all sizes, which need several reads.
func TestReadLargeBuckets(t *testing.T) {
	l := layout{buckets: 4, bucket: 2048, block: 8, leaves: 1}
	r := newRingImage(t, l)
	want := 0
	for i := range 4 {
		for n := 0; r.at[i] < 240; n++ {
			keys := n * 397 % 2000
			want += keys
			r.entry(i, 1, keys)
		}
	}
	rec, err := r.read()
	must(t, err)
	got := 0
	last := uint64(0)
	must(t, rec.EachKey(context.Background(), func(seq uint64, k *ondisk.Key) error {
		got++
		if k.End() <= last || k.End()/10000 != seq {
			return fmt.Errorf("key %v of entry %d behind %d", k, seq, last)
		}
		last = k.End()
		return nil
	}))
	if got != want || rec.Newest.Seq != r.seq {
		t.Errorf("%d keys, want %d; newest %d, want %d", got, want, rec.Newest.Seq, r.seq)
	}
}

// TestFixtures reads what real kernels left, and compares with the independent reader.
func TestFixtures(t *testing.T) {
	all, err := fixture.All()
	must(t, err)
	for _, f := range all {
		if !f.HasCache() || testing.Short() && f.Name > "e" {
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			path, err := f.Extract("cache", t.TempDir())
			must(t, err)
			dev, err := blockdev.Open(path, blockdev.Options{ReadOnly: true, Runtime: rt.New()})
			must(t, err)
			defer dev.Close()
			set, err := offline.Open(context.Background(), dev, offline.Options{})
			must(t, err)
			defer set.Close()
			io, err := blockdev.NewIO(dev, 4)
			must(t, err)
			defer io.Close()
			src := Source{IO: io, Geometry: set.Geo, Buckets: set.Super.D[:set.Super.NJournal], Discard: set.Super.Discard()}
			rec, err := Read(context.Background(), src)
			must(t, err)
			if rec.Newest.Seq != set.Newest.Seq || rec.Newest.Root != set.Newest.Root || len(rec.Entries) != len(set.Needed) {
				t.Fatalf("newest %d, %d needed; the other reader has %d, %d", rec.Newest.Seq, len(rec.Entries), set.Newest.Seq, len(set.Needed))
			}
			var got, want []ondisk.Key
			must(t, rec.EachKey(context.Background(), func(_ uint64, k *ondisk.Key) error { got = append(got, *k); return nil }))
			for i, e := range set.Needed {
				if rec.Entries[i].Seq != e.Seq || uint64(src.at(rec.Entries[i].Bucket, rec.Entries[i].At))/512 != e.Sector {
					t.Fatalf("entry %+v, the other reader has %+v", rec.Entries[i], e)
				}
				keys, err := set.EntryKeys(e)
				must(t, err)
				want = append(want, keys...)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%d keys, the other reader has %d, or they differ", len(got), len(want))
			}
		})
	}
}
