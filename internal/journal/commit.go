package journal

import (
	"context"

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
	return j.waitLocked(ctx, seq)
}

// Sync returns when all keys appended before the call are durable, and with them the data that they point to: what a
// flush asks of the cache device. It writes nothing if they are. No lock and no Reservation may be held.
func (j *Journal) Sync(ctx context.Context) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.waitLocked(ctx, j.NewestLocked())
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
// and so has whoever it waits for. A single urgent request serves everybody who waits for the same entry. During
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
	return j.waitLocked(ctx, j.RequestEntryLocked(false))
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

// waitLocked waits until entry seq is durable.
func (j *Journal) waitLocked(ctx context.Context, seq uint64) error {
	if seq > j.seq {
		panic("journal: waiting for an entry that is not open yet")
	}
	if j.durable >= seq {
		return j.errLocked()
	}
	begin := j.rt.Now()
	if seq > j.wanted {
		j.wanted = seq
		j.work.Signal()
	}
	var err error
	for j.durable < seq && err == nil {
		if err = j.errLocked(); err == nil {
			err = j.done[seq&1].WaitContext(ctx)
		}
	}
	j.stats.DurableWaits++
	j.stats.DurableWait += j.rt.Now() - begin
	if j.durable >= seq {
		return nil
	}
	return err
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
		for j.errLocked() == nil && !j.shouldCloseLocked() {
			j.work.Wait()
		}
		if j.errLocked() != nil {
			return
		}
		j.closeEntryLocked()
		begin := j.rt.Now()
		j.mu.Unlock()

		f := &j.flight // nobody else touches it while it flies
		err := j.put(&f.set, f.off, f.short)

		j.mu.Lock()
		j.stats.Commit += j.rt.Now() - begin
		if err != nil {
			j.failLocked(f.set.Seq, err)
			return
		}
		j.landedLocked()
	}
}

// shouldCloseLocked decides whether the open entry is to be closed and written now. While it is wanted and has no
// place, it says so in j.blocked and has room made.
func (j *Journal) shouldCloseLocked() bool {
	last := j.OldestPinLocked() // at most j.seq
	j.grantLocked()
	wanted := j.wanted >= j.seq || j.words > 0 && j.rt.Now() >= j.due
	room := j.wantedRoom >= j.seq || j.start && wanted
	waiting := j.waiters.head != nil
	j.blocked = false
	if !room && !wanted && !waiting {
		return false
	}
	next, ok := j.ring.after(j.pos, j.words, last)
	ok = ok && j.seq-last <= maxSpan
	after := j.ring.space(next)
	// However this entry came to be closed, what is reserved must have a place in the next.
	hosted, fits := j.ring.put(after, j.reserved)
	if j.reserved == 0 {
		hosted, fits = after, true
	}
	ok = ok && fits
	if room && ok {
		return true
	}
	plain := ok && j.ring.free(hosted) >= j.ring.kept && j.seq-last < maxSpan-spanKept
	if wanted && plain {
		return true
	}
	if waiting && plain && j.words > 0 && j.closingHelpsLocked(next) {
		return true
	}
	j.blocked = true
	// An entry written now may itself free a bucket, by its last_seq.
	if ok && j.freesLocked(last) {
		return true
	}
	j.tight.Signal()
	return false
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
	return j.ring.oldestNeeded(j.pos, last) != j.pos.oldest || j.ring.lastResort(j.pos, j.words, last)
}

// closeEntryLocked closes the open entry, for which there is a place, and opens the next. Nothing is in flight.
func (j *Journal) closeEntryLocked() {
	last := j.OldestPinLocked()
	if last < j.lastSeq {
		panic("journal: last_seq would go back")
	}
	pos, ok := j.ring.after(j.pos, j.words, last)
	if !ok {
		panic("journal: an entry is closed that has no place")
	}
	h := &j.header
	*h = Header{}
	j.owner.JournalHeader(h)
	f := &j.flight
	f.set = ondisk.JSet{
		Magic: j.geo.JSetMagic(), Seq: j.seq, Version: 1, LastSeq: last,
		UUIDBucket: h.UUIDBucket, Root: h.Root, Level: h.Level, Data: j.shared.keys(j.slot)[:8*j.words],
	}
	f.set.PrioBucket[j.dev] = h.Prio
	need := j.ring.blocksFor(j.words)
	f.pos, f.off = pos, j.ring.offset(&j.geo, pos.cur, pos.used-need)
	f.short = need > j.ring.blocks-j.pos.used && j.ring.distance(j.pos) == 1 // see lastResort
	f.lastDurable = j.lastSeq
	j.flying = true

	j.ring.last[pos.cur] = j.seq
	j.pos, j.lastSeq = pos, last
	j.seq++
	j.slot ^= 1
	j.words = 0
	j.shared.publish(j.slot, j.seq, 0) // what the slot held is durable, or something would be in flight still
	j.grantLocked()
}

// put writes an entry to byte off of the device: what it refers to is flushed before, and it is durable on return.
// Source: F 6.5.
func (j *Journal) put(set *ondisk.JSet, off int64, short bool) error {
	b := j.buf.Data
	n := set.Encode(b)
	size := (n + j.ring.blockSize - 1) / j.ring.blockSize * j.ring.blockSize
	clear(b[n:size])
	if short {
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
	j.durable, j.durablePos = f.set.Seq, f.pos
	j.stats.Entries++
	if len(f.set.Data) == 0 {
		j.stats.EmptyEntries++
	}
	j.stats.Bytes += uint64(j.ring.blocksFor(len(f.set.Data)/8) * j.ring.blockSize)
	j.grantLocked()
	j.done[f.set.Seq&1].Broadcast()
	if j.needsReclaimLocked() != 0 {
		j.tight.Signal()
	}
}
