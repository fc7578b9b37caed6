package journal

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Source says where a journal lies.
type Source struct {
	IO       *blockdev.IO    // on the cache device
	Geometry ondisk.Geometry // of the set
	Buckets  []uint64        // of the ring, in order: the superblock's d[:njournal]

	// Discard says that the superblock has CACHE_DISCARD: kernels that had it discarded buckets early, so that
	// entries may be missing at the beginning of what is needed (F 6.3).
	Discard bool
}

// An Entry is a journal entry that must be replayed.
type Entry struct {
	Seq    uint64
	Bucket int32 // ring index; -1: in a shared mapping only
	At     int64 // bytes into the bucket
	Bytes  int32 // header and keys
}

// A Recovery is what the journal says when a set is opened.
type Recovery struct {
	Newest  ondisk.JSet // its header: where the set's roots are; Data is nil
	Entries []Entry     // to be replayed, oldest first; none is missing in between

	Discarded Range // entries that a kernel's discard took away, all zero if none; see Source.Discard
	Mapped    int   // how many of Entries are in the shared mapping only

	src    Source
	bucket int      // ring index of the newest entry
	end    int64    // byte of that bucket behind it
	hidden bool     // a kernel does not see it there, since one before it is damaged
	last   []uint64 // by ring index: greatest seq in the bucket
	mapped []sharedEntry
}

// readWindow is how much is read at once, in bytes; a bucket begins with less, since many are nearly empty.
const (
	readWindow = 256 << 10
	readFirst  = 64 << 10
)

// Read reads the ring and decides what must be replayed. It writes nothing. A set with fewer than four journal
// buckets can be read too.
//
// It fails with ErrEmpty where there is no entry, with a *MissingError where needed ones are not there, with an
// error that matches ondisk.ErrCorrupt where entries are not in ring order, and where a bucket cannot be read: it
// could hold the newest entry, and to go on from an older one would undo what was flushed. (The kernel takes an
// unreadable bucket for an empty one.)
//
// A torn entry has never been. That the last one is torn, rather than damaged later, shows in that none follows.
func Read(ctx context.Context, src Source) (*Recovery, error) {
	r := &Recovery{src: src, last: make([]uint64, len(src.Buckets))}
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	buf := pool.Get(readWindow)
	defer pool.Trim(0)
	defer buf.Release()
	var all []Entry
	for i := range src.Buckets {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		end, hidden := int64(0), false
		err := src.scan(i, buf.Data, func(e Entry, j *ondisk.JSet) {
			hidden = hidden || e.At != end
			end = e.At + src.length(j)
			all = append(all, e)
			r.last[i] = max(r.last[i], e.Seq)
			if e.Seq >= r.Newest.Seq {
				r.Newest, r.bucket, r.end, r.hidden = *j, i, end, hidden
				r.Newest.Data = nil
			}
		})
		if err != nil {
			return nil, fmt.Errorf("journal bucket %d: %w", i, err)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: %w in %d buckets", r.device(), ErrEmpty, len(src.Buckets))
	}
	return r, r.choose(all)
}

func (r *Recovery) device() string { return r.src.IO.Device().Info().Name }

// at returns where in bytes on the device a place of the ring lies.
func (s *Source) at(bucket int32, at int64) int64 {
	return int64(s.Geometry.BucketStart(s.Buckets[bucket]))*ondisk.SectorSize + at
}

// length returns how many bytes of a bucket an entry takes.
func (s *Source) length(j *ondisk.JSet) int64 {
	block := int64(s.Geometry.BlockBytes())
	return (int64(j.Bytes()) + block - 1) &^ (block - 1)
}

// scan calls fn with the entries of one bucket, which follow on each other without a gap: what comes behind them and
// is whole all the same is left from an earlier lap. buf has readWindow bytes.
func (s *Source) scan(bucket int, buf []byte, fn func(e Entry, j *ondisk.JSet)) error {
	g := &s.Geometry
	size := g.BucketBytes()
	var have []byte // bytes of the bucket from byte from on
	var from int64
	// decode returns the entry at byte at of the bucket.
	decode := func(at int64) (ondisk.JSet, error) {
		if end := from + int64(len(have)); end < size && end-at < ondisk.MaxJSetBytes {
			n := int64(readWindow)
			if at == 0 {
				n = readFirst
			}
			from, have = at, buf[:min(n, size-at)]
			if err := s.IO.ReadAt(have, s.at(int32(bucket), at)); err != nil {
				return ondisk.JSet{}, err
			}
		}
		return ondisk.DecodeJSet(have[at-from:], g)
	}
	expect := uint64(0) // the next seq, 0 at the beginning
	for at := int64(0); at < size; {
		j, err := decode(at)
		switch {
		case errors.Is(err, ondisk.ErrNoJSet):
			return nil
		case errors.Is(err, ondisk.ErrBadJSet):
			// Torn, or damaged: only a damaged one has its successor behind it.
			if j.Bytes() > ondisk.MaxJSetBytes || at+s.length(&j) >= size || expect != 0 && j.Seq != expect {
				return nil
			}
			next, err := decode(at + s.length(&j))
			if err != nil && !errors.Is(err, ondisk.ErrNoJSet) && !errors.Is(err, ondisk.ErrBadJSet) {
				return err
			}
			if err != nil || next.Seq != j.Seq+1 {
				return nil
			}
			expect = next.Seq
		case err != nil:
			return ondisk.At(err, s.IO.Device().Info().Name, s.at(int32(bucket), at)/ondisk.SectorSize)
		case expect != 0 && j.Seq != expect:
			return nil
		default:
			fn(Entry{Seq: j.Seq, Bucket: int32(bucket), At: at, Bytes: int32(j.Bytes())}, &j)
			expect = j.Seq + 1
		}
		at += s.length(&j)
	}
	return nil
}

// choose finds the entries that the newest one needs and holds them against the rules of the ring.
func (r *Recovery) choose(all []Entry) error {
	n := len(r.src.Buckets)
	behind := func(e Entry) int { return (r.bucket - int(e.Bucket) + n) % n } // ring steps to the newest entry
	all = slices.DeleteFunc(all, func(e Entry) bool { return e.Seq < r.Newest.LastSeq })
	slices.SortFunc(all, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Seq, b.Seq), cmp.Compare(behind(a), behind(b)))
	})
	// Of two with the same number the later in the ring is the one that others were written behind.
	all = slices.CompactFunc(all, func(a, b Entry) bool { return a.Seq == b.Seq })
	r.Entries = all

	needed := Range{r.Newest.LastSeq, r.Newest.Seq}
	var missing []Range
	expect := needed.From
	for _, e := range all {
		if e.Seq != expect {
			missing = append(missing, Range{expect, e.Seq - 1})
		}
		expect = e.Seq + 1
	}
	if r.src.Discard && len(missing) > 0 && missing[0].From == needed.From {
		r.Discarded, missing = missing[0], missing[1:]
	}
	if len(missing) > 0 {
		return &MissingError{Device: r.device(), Missing: missing, Needed: needed}
	}
	if len(all) > maxSpan {
		return fmt.Errorf("%s: %d journal entries needed, %d is the most: %w", r.device(), len(all), maxSpan, ondisk.ErrCorrupt)
	}
	for i, e := range all[1:] {
		p := all[i]
		if step := (int(e.Bucket) - int(p.Bucket) + n) % n; step > 1 || step == 0 && e.At <= p.At {
			return fmt.Errorf("%s: journal entry %d at byte %d of bucket %d, entry %d at byte %d of bucket %d: %w",
				r.device(), p.Seq, p.At, p.Bucket, e.Seq, e.At, e.Bucket, ondisk.ErrCorrupt)
		}
	}
	return nil
}

// Shared adds what the shared mapping of a process that died holds for id, behind the newest entry, and returns how
// many entries that is: they are replayed like the others, and Open writes them to the ring. id has the superblock
// seq that the dead process ran with, the one that is found on the device. What does not continue the journal
// without a gap, or is another's, is left alone.
func (r *Recovery) Shared(s *Shared, id Identity) (entries int, err error) {
	list, err := s.read(id, r.Newest.Seq)
	if err != nil {
		return 0, err
	}
	if n := len(list); n > 0 && len(list[n-1].keys) == 0 {
		list = list[:n-1] // the open entry, just begun
	}
	if len(list) == 1 && len(list[0].keys) == 0 {
		list = nil
	}
	for _, e := range list {
		r.mapped = append(r.mapped, e)
		r.Entries = append(r.Entries, Entry{Seq: e.seq, Bucket: -1, Bytes: int32(ondisk.JSetHeaderBytes + len(e.keys))})
	}
	r.Mapped = len(r.mapped)
	return r.Mapped, nil
}

// EachKey calls fn with every key to be replayed, oldest first, and the entry it is in. It reads them from the
// device again, so that it may be called several times and takes no memory. It stops at the first error of fn. k is
// valid during the call.
func (r *Recovery) EachKey(ctx context.Context, fn func(seq uint64, k *ondisk.Key) error) error {
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	buf := pool.Get(readWindow)
	defer pool.Trim(0)
	defer buf.Release()
	var have []byte // of the device, from byte from on
	var from int64
	mapped := 0
	for i, e := range r.Entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		if e.Bucket < 0 {
			if err := eachKey(e.Seq, r.mapped[mapped].keys, fn); err != nil {
				return err
			}
			mapped++
			continue
		}
		at := r.src.at(e.Bucket, e.At)
		if at < from || at+int64(e.Bytes) > from+int64(len(have)) {
			end := at + int64(e.Bytes)
			for _, next := range r.Entries[i+1:] { // as many as one read gets
				to := r.src.at(max(next.Bucket, 0), next.At) + int64(next.Bytes)
				if next.Bucket != e.Bucket || to > at+readWindow {
					break
				}
				end = to
			}
			block := int64(r.src.Geometry.BlockBytes())
			from, have = at, buf.Data[:(end-at+block-1)&^(block-1)]
			if err := r.src.IO.ReadAt(have, at); err != nil {
				return fmt.Errorf("journal entry %d: %w", e.Seq, err)
			}
		}
		b := have[at-from:][:e.Bytes]
		if binary.LittleEndian.Uint64(b) != ondisk.Checksum(b[8:]) || binary.LittleEndian.Uint64(b[16:]) != e.Seq {
			return fmt.Errorf("%s: journal entry %d has changed since it was read: %w", r.device(), e.Seq, ondisk.ErrCorrupt)
		}
		if err := eachKey(e.Seq, b[ondisk.JSetHeaderBytes:], fn); err != nil {
			return ondisk.At(err, r.device(), at/ondisk.SectorSize)
		}
	}
	return nil
}

// eachKey calls fn with the keys in b.
func eachKey(seq uint64, b []byte, fn func(seq uint64, k *ondisk.Key) error) error {
	j := ondisk.JSet{Seq: seq, Data: b}
	var stop error
	err := j.EachKey(func(k *ondisk.Key) bool {
		stop = fn(seq, k)
		return stop == nil
	})
	if stop != nil {
		return stop
	}
	return err
}

// Erase makes a ring hold no entry, and this durable: what a set needs before its first entry, or those of an
// earlier life of the same set uuid would be taken for newer ones. It clears whole buckets. (F 6.3 asks for their
// first blocks only, but what remains behind those comes back as soon as a first entry of the right length is
// written.)
func Erase(ctx context.Context, src Source) error {
	io := src.IO.WithPurpose(blockdev.ForJournal)
	for i := range src.Buckets {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := io.WriteZeroes(src.at(int32(i), 0), src.Geometry.BucketBytes(), 0); err != nil {
			return err
		}
	}
	return io.Flush()
}
