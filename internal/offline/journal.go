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

	mangled bool // the magic number on disk is wrong, and the checksum says that all else is right
}

func (e *Entry) sectors() int64 { return int64(e.Bytes+ondisk.SectorSize-1) / ondisk.SectorSize }

// A Journal is what the ring of a set holds.
type Journal struct {
	Entries []Entry     // all that are whole, those of earlier laps too, in order of Seq
	Newest  ondisk.JSet // its Data is nil
	Needed  []Entry     // to be replayed, oldest first

	overlay     []Extent     // what the needed entries say, in the order of their keys
	replayed    []Extent     // the same, not yet laid over each other
	journalPtrs []ondisk.Ptr // all of their pointers, those of keys that newer ones hide too
}

// A journalBucket is what one bucket of the ring was found to hold.
type journalBucket struct {
	entries []Entry
	newest  ondisk.JSet
	flaws   []journalFlaw
	unread  []int64 // byte offsets of pieces that could not be read
	readErr error   // of the first of them
}

// A journalFlaw is something in a journal bucket that is no entry and looks as if it had been one.
type journalFlaw struct {
	code  Code
	entry Entry // as far as it can be told
	text  string
}

// unreadPiece is the unit in which a journal bucket is read around what cannot be read, in bytes.
const unreadPiece = 4096

// readJournal reads the whole ring, decides what is needed, and reads that.
func (s *Set) readJournal(ctx context.Context) error {
	g := &s.Geo
	n := int(s.Super.NJournal)
	buckets := make([]journalBucket, n)
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(4, max(n, 1)) {
		wg.Go(func() {
			buf := make([]byte, min(g.BucketBytes(), journalWindow+ondisk.MaxJSetBytes))
			for i := range next {
				s.readJournalBucket(i, &buckets[i], buf)
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
	for i := range buckets {
		b := &buckets[i]
		s.Role[s.Super.D[i]] = RoleJournal
		s.Entries = append(s.Entries, b.entries...)
		if len(b.entries) > 0 && b.newest.Seq >= s.Newest.Seq {
			s.Newest = b.newest
		}
	}
	slices.SortStableFunc(s.Entries, func(a, b Entry) int { return cmp.Compare(a.Seq, b.Seq) })
	s.reportJournal(buckets)
	if len(s.Entries) == 0 {
		s.find(JournalEmpty, g.BucketStart(g.FirstBucket), int64(n)*int64(g.BucketSectors), "no journal entry in %d buckets (kernel: %q)", n, "no journal entries found")
		return nil
	}
	s.chooseNeeded()
	return s.readNeeded(ctx)
}

// readJournalBucket reads one bucket of the ring, through buf, and finds its entries. A kernel stops at the first
// block that does not begin one; here the rest is looked through too. What an earlier lap left there is never needed
// (its numbers are smaller), but an entry behind one that went bad is.
func (s *Set) readJournalBucket(i int, b *journalBucket, buf []byte) {
	start := int64(s.Geo.BucketStart(s.Super.D[i])) * ondisk.SectorSize
	scan := journalScan{s: s, b: b, index: i, start: uint64(start) / ondisk.SectorSize}
	size := s.Geo.BucketBytes()
	for base := int64(0); base < size; base += journalWindow {
		window := buf[:min(int64(len(buf)), size-base)]
		if err := s.io.ReadAt(window, start+base); err != nil {
			if b.readErr == nil {
				b.readErr = err
			}
			for _, at := range s.readPieces(window, start+base) {
				if at += base; len(b.unread) == 0 || b.unread[len(b.unread)-1] < at { // windows overlap
					b.unread = append(b.unread, at)
				}
			}
		}
		scan.window(window, base, min(base+journalWindow, size))
	}
}

// journalWindow is how much of a journal bucket is looked at at once, in bytes. The buffer is larger by one entry, so
// that every entry that begins in the window is in it whole.
const journalWindow = 4 << 20

// A journalScan goes through one bucket of the ring.
type journalScan struct {
	s       *Set
	b       *journalBucket
	index   int
	start   uint64 // of the bucket, sectors
	at      int64  // in the bucket, bytes
	stopped bool   // at something that is no entry, at least once
}

// window looks for entries that begin before end. buf holds the bucket from base on.
func (j *journalScan) window(buf []byte, base, end int64) {
	g := &j.s.Geo
	block := int64(g.BlockBytes())
	for j.at < end {
		rest := buf[j.at-base:]
		if len(rest) < ondisk.JSetHeaderBytes {
			j.at += block
			continue
		}
		set, err := ondisk.DecodeJSet(rest, g)
		mended := errors.Is(err, ondisk.ErrNoJSet) && mendMagic(rest, g)
		if mended {
			set, err = ondisk.DecodeJSet(rest, g)
		}
		e := Entry{
			Seq: set.Seq, LastSeq: set.LastSeq, Index: j.index, Sector: j.start + uint64(j.at)/ondisk.SectorSize,
			Bytes: set.Bytes(), Keys: set.Keys, mangled: mended && err == nil,
		}
		if err == nil {
			j.found(e, set)
			j.at += (int64(e.Bytes) + block - 1) / block * block
			continue
		}
		if e.Bytes > ondisk.MaxJSetBytes || e.Bytes > len(rest) {
			e.Bytes = ondisk.JSetHeaderBytes
		}
		switch {
		case errors.Is(err, ondisk.ErrNoJSet):
		case !errors.Is(err, ondisk.ErrBadJSet):
			j.b.flaws = append(j.b.flaws, journalFlaw{JournalDamaged, e, err.Error()})
		case !j.stopped || e.Seq > j.b.newest.Seq:
			j.b.flaws = append(j.b.flaws, journalFlaw{JournalTorn, e, err.Error()})
		}
		j.stopped = true
		j.at += block
	}
}

// found takes an entry over.
func (j *journalScan) found(e Entry, set ondisk.JSet) {
	if e.mangled {
		j.b.flaws = append(j.b.flaws, journalFlaw{JournalDamaged, e, fmt.Sprintf("entry %d is right but for its magic number: a kernel does not see it", e.Seq)})
	}
	j.b.entries = append(j.b.entries, e)
	if set.Seq >= j.b.newest.Seq {
		j.b.newest = set
		j.b.newest.Data = nil
	}
}

// mendMagic sets the magic number of what stands at the start of b right, if that makes it a whole entry.
func mendMagic(b []byte, g *ondisk.Geometry) bool {
	le := binary.LittleEndian
	end := ondisk.JSetHeaderBytes + 8*uint64(le.Uint32(b[28:]))
	if seq := le.Uint64(b[16:]); seq == 0 || le.Uint64(b[32:]) > seq || le.Uint32(b[24:]) > 1 || end > ondisk.MaxJSetBytes || end > uint64(len(b)) {
		return false // not even the fields are those of an entry
	}
	var head [8]byte
	le.PutUint64(head[:], g.JSetMagic())
	if ^ondisk.CRC(ondisk.CRC(^uint64(0), head[:]), b[16:end]) != le.Uint64(b) {
		return false
	}
	copy(b[8:], head[:])
	return true
}

// readPieces reads buf piece by piece, after it could not be read as a whole, zeroes what cannot be read, and
// returns the offsets of those pieces.
func (s *Set) readPieces(buf []byte, off int64) (unread []int64) {
	for at := 0; at < len(buf); at += unreadPiece {
		piece := buf[at:min(at+unreadPiece, len(buf))]
		if s.io.ReadAt(piece, off+int64(at)) != nil {
			clear(piece)
			unread = append(unread, int64(at))
		}
	}
	return unread
}

// reportJournal reports what is wrong in the buckets of the ring, once the newest entry is known: what was needed,
// or could be newer than it, ends everything.
func (s *Set) reportJournal(buckets []journalBucket) {
	newestIn := -1
	if len(s.Entries) > 0 {
		newestIn = s.Entries[len(s.Entries)-1].Index
	}
	for i := range buckets {
		b := &buckets[i]
		start := s.Geo.BucketStart(s.Super.D[i])
		for _, f := range b.flaws {
			s.find(f.code, f.entry.Sector, f.entry.sectors(), "journal bucket %d: %s", i, f.text)
			if f.code == JournalDamaged && !f.entry.mangled && f.entry.Seq >= s.Newest.LastSeq {
				s.find(JournalGap, f.entry.Sector, f.entry.sectors(), "entry %d cannot be replayed", f.entry.Seq)
			}
		}
		for _, at := range b.unread {
			s.find(JournalUnreadable, start+uint64(at)/ondisk.SectorSize, unreadPiece/ondisk.SectorSize, "journal bucket %d: %v", i, b.readErr)
			// The entry after the newest is behind it in its bucket, or at the beginning of the next.
			place := start + uint64(at)/ondisk.SectorSize
			if newestIn >= 0 && (i == newestIn && place >= s.Entries[len(s.Entries)-1].Sector || i == (newestIn+1)%len(buckets)) {
				s.find(JournalGap, place, unreadPiece/ondisk.SectorSize, "entries after %d may lie here, where nothing can be read", s.Newest.Seq)
			}
		}
	}
}

// chooseNeeded finds the entries to replay and holds them against the rules of the ring. Source: F 6.3.
func (s *Set) chooseNeeded() {
	from, to := s.Newest.LastSeq, s.Newest.Seq
	i, _ := slices.BinarySearchFunc(s.Entries, from, func(e Entry, seq uint64) int { return cmp.Compare(e.Seq, seq) })
	for _, e := range s.Entries[i:] {
		if n := len(s.Needed); n > 0 && s.Needed[n-1].Seq == e.Seq {
			s.find(JournalOrder, e.Sector, e.sectors(), "entry %d is there twice, also at sector %d", e.Seq, s.Needed[n-1].Sector)
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
			s.find(code, e.Sector, e.sectors(), "journal entries %d-%d missing, needed are %d-%d; this is the one after", expect, e.Seq-1, from, to)
		}
		expect = e.Seq + 1
		if n == 0 || gap {
			continue
		}
		p := s.Needed[n-1]
		switch step := (e.Index - p.Index + int(s.Super.NJournal)) % int(s.Super.NJournal); {
		case step == 0 && e.Sector < p.Sector:
			s.find(JournalOrder, e.Sector, e.sectors(), "entry %d lies before entry %d in journal bucket %d", e.Seq, p.Seq, e.Index)
		case step > 1:
			s.find(JournalOrder, e.Sector, e.sectors(), "entry %d is in journal bucket %d, entry %d before it in %d: buckets are used in turn", e.Seq, e.Index, p.Seq, p.Index)
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
		if e.mangled {
			mendMagic(b, g)
		}
		j, err := ondisk.DecodeJSet(b, g)
		if err != nil {
			return fmt.Errorf("journal entry %d, which was right a moment ago: %w", e.Seq, err)
		}
		sectors := e.sectors()
		err = j.EachKey(func(k *ondisk.Key) bool {
			s.Stats.ReplayedKeys++
			fault := g.LeafFault(k)
			if fault != ondisk.FaultNone || k.End() == 0 {
				s.find(JournalKey, e.Sector, sectors, "entry %d: key %v: %v", e.Seq, k, fault)
			}
			s.overlayKey(k, fault)
			return true
		})
		if err != nil {
			s.find(JournalDamaged, e.Sector, sectors, "%v", err)
			s.find(JournalGap, e.Sector, sectors, "entry %d cannot be replayed: the keys behind that place are not known", e.Seq)
		}
	}
	return nil
}

// overlayKey lays a key of the journal over what came before it.
func (s *Set) overlayKey(k *ondisk.Key, fault ondisk.Fault) {
	if fault == ondisk.FaultTooBig && k.End() > 0 && k.End() <= ondisk.MaxKeySize {
		*k = ondisk.NewInvalidation(k.Inode(), k.End(), uint32(k.End())) // what it hides, down to sector 0
	}
	if k.Size() == 0 || uint64(k.Size()) > k.End() || k.End() > ondisk.MaxOffset {
		return
	}
	x := newExtent(k, fault)
	s.overlay = append(s.overlay, x)
	if x.flags&(extPtr|extCheck|extBad) == extPtr {
		s.journalPtrs = append(s.journalPtrs, x.P)
	}
}

// EntryKeys reads the keys of an entry again.
func (s *Set) EntryKeys(e Entry) ([]ondisk.Key, error) {
	b := make([]byte, e.Bytes)
	if err := s.io.ReadAt(b, int64(e.Sector)*ondisk.SectorSize); err != nil {
		return nil, err
	}
	if e.mangled {
		mendMagic(b, &s.Geo)
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
