package offline

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// An Entry says where one journal entry lies.
type Entry struct {
	Seq, LastSeq uint64
	Index        int    // of the journal bucket in the ring
	Sector       uint64 // on the cache device
	Bytes        int    // header and keys
	Keys         uint32 // words
}

// A Journal is what the ring of a set holds.
type Journal struct {
	Entries []Entry     // all that are whole, those of earlier laps too, in order of Seq
	Newest  ondisk.JSet // its Data is nil
	Needed  []Entry     // to be replayed, oldest first

	overlay     []Extent     // what the needed entries say, in the order of their keys
	journalPtrs []ondisk.Ptr // all of their pointers, those of keys that newer ones hide too
}

// journalStart is how much of a journal bucket is read at first, in bytes.
const journalStart = 256 << 10

// A stop is the end of the entries in one journal bucket.
type stop struct {
	at      int // bytes into the bucket
	why     error
	last    uint64 // seq of the entry before, 0 where there is none
	mangled uint64 // seq of an entry that is right but for its magic number, else 0
	bytes   int    // length of what stands there in place of an entry
}

// readJournal reads the whole ring, decides what is needed, and reads that.
func (s *Set) readJournal(ctx context.Context) error {
	g := &s.Geo
	n := int(s.Super.NJournal)
	type result struct {
		entries []Entry
		newest  ondisk.JSet
		stop    stop
		err     error
	}
	results := make([]result, n)
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(4, max(n, 1)) {
		wg.Go(func() {
			var buf []byte
			for i := range next {
				r := &results[i]
				start := g.BucketStart(s.Super.D[i])
				// A large bucket is rarely full: read its beginning, and more where the entries go on.
				for size := min(journalStart, g.BucketBytes()); ; size = min(4*size, g.BucketBytes()) {
					if int64(cap(buf)) < size {
						buf = make([]byte, size)
					}
					buf = buf[:size]
					if r.err = s.io.ReadAt(buf, int64(start)*ondisk.SectorSize); r.err != nil {
						break
					}
					*r = result{}
					r.stop.at, r.stop.why = ondisk.ScanJournalBucket(buf, g, func(at int, j ondisk.JSet) {
						r.entries = append(r.entries, Entry{Seq: j.Seq, LastSeq: j.LastSeq, Index: i, Sector: start + uint64(at)/ondisk.SectorSize, Bytes: j.Bytes(), Keys: j.Keys})
						r.stop.last = j.Seq
						if j.Seq >= r.newest.Seq {
							r.newest = j
							r.newest.Data = nil
						}
					})
					if size == g.BucketBytes() || r.stop.at+ondisk.MaxJSetBytes <= len(buf) {
						break // what stands at the stop was seen whole
					}
				}
				if r.err != nil {
					continue
				}
				r.stop.look(buf, g)
			}
		})
	}
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		next <- i
	}
	close(next)
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	for i := range results {
		r := &results[i]
		start := g.BucketStart(s.Super.D[i])
		if r.err != nil {
			s.find(JournalUnreadable, start, int64(g.BucketSectors), "journal bucket %d: %v", i, r.err)
			continue
		}
		s.Entries = append(s.Entries, r.entries...)
		if len(r.entries) > 0 && r.newest.Seq >= s.Newest.Seq {
			s.Newest = r.newest
		}
		s.reportStop(i, start, &r.stop)
		s.Role[s.journalBucket(i)] = RoleJournal
	}
	slices.SortStableFunc(s.Entries, func(a, b Entry) int { return cmp.Compare(a.Seq, b.Seq) })
	if len(s.Entries) == 0 {
		s.find(JournalEmpty, g.BucketStart(g.FirstBucket), int64(n)*int64(g.BucketSectors), "no journal entry in %d buckets (kernel: %q)", n, "no journal entries found")
		return nil
	}
	s.chooseNeeded()
	return s.readNeeded(ctx)
}

// look tells apart what may stand where the next entry would be.
func (st *stop) look(b []byte, g *ondisk.Geometry) {
	if st.why == nil || len(b)-st.at < ondisk.JSetHeaderBytes {
		return
	}
	le := binary.LittleEndian
	rest := b[st.at:]
	st.bytes = ondisk.JSetHeaderBytes
	if end := ondisk.JSetHeaderBytes + 8*uint64(le.Uint32(rest[28:])); end <= uint64(len(rest)) && end <= ondisk.MaxJSetBytes {
		st.bytes = int(end)
		if errors.Is(st.why, ondisk.ErrNoJSet) {
			// Right but for its magic? The checksum is over the magic as it should be.
			var head [8]byte
			le.PutUint64(head[:], g.JSetMagic())
			if crc := ondisk.CRC(ondisk.CRC(^uint64(0), head[:]), rest[16:end]); ^crc == le.Uint64(rest) {
				st.mangled = le.Uint64(rest[16:])
			}
		}
	}
}

// reportStop says why the entries of a journal bucket end where they do, unless it is the plain end.
func (s *Set) reportStop(i int, start uint64, st *stop) {
	at, length := start+uint64(st.at)/ondisk.SectorSize, int64(st.bytes+ondisk.SectorSize-1)/ondisk.SectorSize
	switch {
	case st.mangled != 0:
		s.find(JournalDamaged, at, length, "journal bucket %d: entry %d is right but for its magic number", i, st.mangled)
	case st.why == nil, errors.Is(st.why, ondisk.ErrNoJSet):
	case errors.Is(st.why, ondisk.ErrBadJSet):
		s.find(JournalTorn, at, length, "journal bucket %d: %v", i, st.why)
	default:
		s.find(JournalDamaged, at, length, "journal bucket %d: %v", i, st.why)
	}
}

// chooseNeeded finds the entries to replay and holds them against the rules of the ring. Source: F 6.3.
func (s *Set) chooseNeeded() {
	from, to := s.Newest.LastSeq, s.Newest.Seq
	i, _ := slices.BinarySearchFunc(s.Entries, from, func(e Entry, seq uint64) int { return cmp.Compare(e.Seq, seq) })
	for _, e := range s.Entries[i:] {
		if n := len(s.Needed); n > 0 && s.Needed[n-1].Seq == e.Seq {
			s.find(JournalOrder, e.Sector, int64(e.Bytes+511)/512, "entry %d is there twice, also at sector %d", e.Seq, s.Needed[n-1].Sector)
			continue
		}
		s.Needed = append(s.Needed, e)
	}
	expect := from
	for n, e := range s.Needed {
		gap := e.Seq != expect
		if gap {
			code := JournalGap
			if n == 0 && s.Super.Discard() {
				code = JournalDiscarded
			}
			s.find(code, e.Sector, int64(e.Bytes+511)/512, "journal entries %d-%d missing, needed are %d-%d; this is the one after", expect, e.Seq-1, from, to)
		}
		expect = e.Seq + 1
		if n == 0 || gap {
			continue
		}
		p := s.Needed[n-1]
		switch step := (e.Index - p.Index + int(s.Super.NJournal)) % int(s.Super.NJournal); {
		case step == 0 && e.Sector < p.Sector:
			s.find(JournalOrder, e.Sector, int64(e.Bytes+511)/512, "entry %d lies before entry %d in journal bucket %d", e.Seq, p.Seq, e.Index)
		case step > 1:
			s.find(JournalOrder, e.Sector, int64(e.Bytes+511)/512, "entry %d is in journal bucket %d, entry %d before it in %d: buckets are used in turn", e.Seq, e.Index, p.Seq, p.Index)
		}
	}
}

// readNeeded reads the keys of the needed entries.
func (s *Set) readNeeded(ctx context.Context) error {
	g := &s.Geo
	buf := make([]byte, ondisk.MaxJSetBytes)
	for _, e := range s.Needed {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := buf[:e.Bytes]
		if err := s.io.ReadAt(b, int64(e.Sector)*ondisk.SectorSize); err != nil {
			return fmt.Errorf("journal entry %d, which could be read a moment ago: %w", e.Seq, err)
		}
		j, err := ondisk.DecodeJSet(b, g)
		if err != nil {
			return fmt.Errorf("journal entry %d, which was right a moment ago: %w", e.Seq, err)
		}
		sectors := int64(e.Bytes+511) / 512
		err = j.EachKey(func(k *ondisk.Key) bool {
			s.Stats.ReplayedKeys++
			fault := g.LeafFault(k)
			if fault != ondisk.FaultNone || k.End() == 0 {
				s.find(JournalKey, e.Sector, sectors, "entry %d: key %v: %v", e.Seq, k, fault)
			}
			if fault == ondisk.FaultTooBig && k.End() > 0 && k.End() <= ondisk.MaxKeySize {
				*k = ondisk.NewInvalidation(k.Inode(), k.End(), uint32(k.End())) // what it hides, down to sector 0
			}
			if k.Size() > 0 && uint64(k.Size()) <= k.End() && k.End() <= ondisk.MaxOffset {
				x := newExtent(k, fault)
				s.overlay = append(s.overlay, x)
				if x.flags&(extPtr|extCheck|extBad) == extPtr {
					s.journalPtrs = append(s.journalPtrs, x.P)
				}
			}
			return true
		})
		if err != nil {
			s.find(JournalDamaged, e.Sector, sectors, "%v", err)
			s.find(JournalGap, e.Sector, sectors, "entry %d cannot be replayed: the keys behind that place are not known", e.Seq)
		}
	}
	return nil
}

// journalBucket returns the bucket number of the ring's ith bucket.
func (s *Set) journalBucket(i int) uint64 { return s.Super.D[i] }

// EntryKeys reads the keys of an entry again.
func (s *Set) EntryKeys(e Entry) ([]ondisk.Key, error) {
	b := make([]byte, e.Bytes)
	if err := s.io.ReadAt(b, int64(e.Sector)*ondisk.SectorSize); err != nil {
		return nil, err
	}
	j, err := ondisk.DecodeJSet(b, &s.Geo)
	if err != nil {
		return nil, err
	}
	var keys []ondisk.Key
	err = j.EachKey(func(k *ondisk.Key) bool {
		keys = append(keys, *k)
		return true
	})
	return keys, err
}
