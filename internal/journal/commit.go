package journal

import (
	"context"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Acknowledge returns when the change whose keys went into entry seq may be acknowledged: at once where a shared
// mapping holds the open entry, else when the entry is on disk. It fails if the journal has failed.
func (j *Journal) Acknowledge(ctx context.Context, seq uint64) error {
	if j.lasting {
		return j.Err()
	}
	return j.WaitDurable(ctx, seq)
}

// WaitDurable has the entries up to seq written without delay and returns when they are durable. Entries behind seq
// are not waited for. No lock and no Reservation may be held.
func (j *Journal) WaitDurable(ctx context.Context, seq uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, err := j.WaitDurableLocked(ctx, seq)
	return err
}

// Sync returns when all keys appended before the call are durable, and with them the data that they point to: what a
// flush asks of the cache device. It writes nothing if they are. No lock and no Reservation may be held.
func (j *Journal) Sync(ctx context.Context) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, err := j.WaitDurableLocked(ctx, j.NewestLocked())
	return err
}

// NewestLocked returns the newest entry that may have keys: when it is durable, all that were appended until now are. The
// set's lock is held.
func (j *Journal) NewestLocked() uint64 {
	if j.words == 0 {
		return j.seq - 1
	}
	return j.seq
}

// RequestEntryLocked has an entry written, empty if there are no keys, because the header has changed (root, gens,
// uuid array). Its seq, for WaitDurable, is that of an entry whose header is asked for after this call. The set's
// lock is held.
//
// An urgent entry may use the room that is kept: Owner.WriteOldest has it on behalf of all that it has to wait for,
// and so has whoever it waits for. It waits for no pin to go. A single urgent request serves everybody who waits for the same entry. During
// start all requests are urgent.
func (j *Journal) RequestEntryLocked(urgent bool) (seq uint64) {
	j.wanted = j.seq
	if urgent {
		j.wantedRoom = j.seq
	}
	j.work.Signal()
	return j.seq
}

// WriteEntry writes an entry, empty if there are no keys, and waits until it is durable. No lock may be held.
func (j *Journal) WriteEntry(ctx context.Context) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, err := j.WaitDurableLocked(ctx, j.RequestEntryLocked(false))
	return err
}

// OpenLocked returns the seq of the open entry: the next key is appended to it. The set's lock is held.
func (j *Journal) OpenLocked() uint64 { return j.seq }

// DurableLocked returns the greatest entry that is on disk, and its last_seq: no older entry will be replayed.
func (j *Journal) DurableLocked() (seq, lastSeq uint64) {
	if j.flying {
		return j.durable, j.flight.lastDurable
	}
	return j.durable, j.lastSeq
}

// NeededLocked returns how long the part of the ring is that the newest durable entry needs, in bytes: what a start replays.
func (j *Journal) NeededLocked() int64 { return int64(j.ring.used(j.pos)) * int64(j.ring.blockSize) }

// WaitDurableLocked is WaitDurable with the set's lock held, which it lets go of while it waits. It returns how long that
// was.
func (j *Journal) WaitDurableLocked(ctx context.Context, seq uint64) (waited time.Duration, err error) {
	if seq > j.seq {
		panic("journal: waiting for an entry that is not open yet")
	}
	if j.durable >= seq {
		return 0, j.errLocked()
	}
	begin := j.rt.Now()
	if seq > j.wanted {
		j.wanted = seq
		j.work.Signal()
	}
	for j.durable < seq && err == nil {
		if err = j.errLocked(); err == nil {
			err = j.done[seq&1].WaitContext(ctx)
		}
	}
	waited = j.rt.Now() - begin
	j.stats.DurableWaits++
	j.stats.DurableWait += waited
	if j.durable >= seq {
		err = nil
	}
	return waited, err
}

// timeout is called when the keys of the open entry have waited for company long enough.
func (j *Journal) timeout() {
	j.mu.Lock()
	j.work.Signal()
	j.mu.Unlock()
}

// write is the goroutine that closes entries and writes them, one at a time.
func (j *Journal) write() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for {
		where := nowhere
		for j.errLocked() == nil {
			if where = j.shouldCloseLocked(); where != nowhere {
				break
			}
			j.work.Wait()
		}
		switch {
		case j.errLocked() != nil:
			return
		case where == inPlace:
			j.amendLocked()
		default:
			j.closeEntryLocked()
		}
		begin := j.rt.Now()
		j.mu.Unlock()

		f := &j.flight // nobody else touches it while it flies
		err := j.put(&f.set, f.off, f.amends)

		j.mu.Lock()
		j.stats.Commit += j.rt.Now() - begin
		if err != nil {
			j.failLocked(f.set.Seq, err)
			return
		}
		j.landedLocked()
	}
}

// Where the open entry goes now.
const (
	nowhere = iota // it stays open
	behind         // behind the newest
	inPlace        // into the header of the newest: see amendLocked
)

// shouldCloseLocked decides whether the open entry is to be closed and written now, and where. While it is wanted and has
// no place, it says so in j.blocked and has room made.
func (j *Journal) shouldCloseLocked() (where int) {
	last := j.OldestPinLocked() // at most j.seq
	j.grantLocked()
	wanted := j.wanted >= j.seq || j.words > 0 && j.rt.Now() >= j.due
	room := j.wantedRoom >= j.seq || j.start && wanted
	waiting := j.waiters.head != nil
	j.blocked = false
	if !room && !wanted && !waiting {
		return nowhere
	}
	next, ok := j.ring.after(j.pos, j.words, last)
	span := j.number - j.renum.disk(last)
	ok = ok && span <= maxSpan
	after := j.ring.space(next)
	// However this entry came to be closed, what is reserved must have a place in the next, also if a next process must
	// write both. Where it has none, one entry has a place for all, and what is reserved will be keys, or go back, by itself.
	hosted := after
	if ok && j.reserved > 0 {
		if hosted, ok = j.ring.put(after, j.reserved); ok {
			_, ok = j.ring.restart(j.pos, j.words, j.reserved)
		}
	}
	if room && ok {
		return behind
	}
	plain := ok && j.ring.free(hosted) >= j.ring.kept && span < maxSpan-spanKept
	if wanted && plain {
		return behind
	}
	if waiting && plain && j.words > 0 && j.closingHelpsLocked(next) {
		return behind
	}
	amendable := j.amendableLocked(last)
	if (room || wanted) && amendable {
		return inPlace
	}
	j.blocked = true
	// An entry written now may itself free a bucket, by its last_seq.
	if ok && j.freesLocked(last) {
		return behind
	}
	if amendable && j.freesLocked(j.amendedLastLocked(last)) {
		return inPlace
	}
	j.tight.Signal()
	return nowhere
}

// closingHelpsLocked reports whether the first who waits for room would get it if the open entry were closed, and
// the ring stood at next then.
func (j *Journal) closingHelpsLocked(next position) bool {
	n := j.reserved + j.waiters.head.words
	s, ok := j.ring.put(j.ring.space(next), n)
	return ok && n <= j.ring.maxReserved() && j.ring.free(s) >= j.ring.kept
}

// freesLocked reports whether an entry with that last_seq needs fewer buckets than the last one.
func (j *Journal) freesLocked(last uint64) bool {
	return j.ring.oldestNeeded(j.pos, last) != j.pos.oldest
}

// headLocked returns the entry without seq and keys.
func (j *Journal) headLocked(last uint64) ondisk.JSet {
	if last < j.lastSeq {
		panic("journal: last_seq would go back")
	}
	h := &j.header
	*h = Header{}
	j.owner.JournalHeader(h)
	set := ondisk.JSet{
		Magic: j.geo.JSetMagic(), Version: 1, LastSeq: j.renum.disk(last), UUIDBucket: h.UUIDBucket, Root: h.Root, Level: h.Level,
	}
	set.PrioBucket[j.dev] = h.Prio
	return set
}

// closeEntryLocked closes the open entry, for which there is a place, and opens the next. Nothing is in flight.
func (j *Journal) closeEntryLocked() {
	last := j.OldestPinLocked()
	pos, ok := j.ring.after(j.pos, j.words, last)
	if !ok {
		panic("journal: an entry is closed that has no place")
	}
	f := &j.flight
	f.seq, f.set = j.seq, j.headLocked(last)
	f.set.Seq, f.set.Data = j.number, j.shared.keys(j.slot)[:8*j.words]
	f.pos, f.off, f.amends = pos, j.ring.offset(&j.geo, pos.cur, pos.used-j.ring.blocksFor(j.words)), false
	f.lastDurable = j.lastSeq
	j.flying = true
	j.placed = place{seq: j.seq, off: f.off, bytes: ondisk.JSetHeaderBytes + 8*j.words}

	j.ring.last[pos.cur] = j.seq
	j.pos, j.lastSeq = pos, last
	j.seq++
	j.number++
	j.slot ^= 1
	j.words = 0
	j.shared.publish(j.slot, j.number, 0) // what the slot held is durable, or something would be in flight still
	j.grantLocked()
}

// put writes an entry to byte off of the device: what it refers to is flushed before, and it is durable on return. Of one
// that amends, whose keys are there, it writes the sector with the header. Source: F 6.5.
func (j *Journal) put(set *ondisk.JSet, off int64, amends bool) error {
	b := j.buf.Data
	n := set.Encode(b)
	size := (n + j.ring.blockSize - 1) / j.ring.blockSize * j.ring.blockSize
	clear(b[n:size])
	if amends {
		size = j.sector
	}
	if err := j.io.Flush(); err != nil {
		return err
	}
	return j.io.WriteAt(b[:size], off, blockdev.FUA)
}

// landedLocked takes note that the entry in flight is durable.
func (j *Journal) landedLocked() {
	f := &j.flight
	j.flying = false
	j.durable, j.durablePos = f.seq, f.pos
	if f.amends {
		j.stats.Amended++
		j.stats.Bytes += uint64(j.sector)
	} else {
		j.stats.Entries++
		if len(f.set.Data) == 0 {
			j.stats.EmptyEntries++
		}
		j.stats.Bytes += uint64(j.ring.blocksFor(len(f.set.Data)/8) * j.ring.blockSize)
	}
	j.grantLocked()
	j.done[f.seq&1].Broadcast()
	if upTo, _ := j.needsReclaimLocked(); upTo != 0 {
		j.tight.Signal()
	}
}
