package journal

import (
	"context"
	"fmt"

	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// keyWords is the most that a leaf key takes: two words and one pointer. Writers use no more.
const keyWords = 3

// A Reservation is room for keys in the journal, not bound to a particular entry. The zero value is none. It belongs
// to one goroutine; what is left of it goes back by Release. It must not be kept while its holder waits for an entry
// to be written (WaitDurable, Sync), since a small journal may have to wait for it to be used.
type Reservation struct{ words int }

// Words returns how many words are left.
func (r *Reservation) Words() int { return r.words }

// MaxReserve returns the most words that one Reserve can ask for, those for leaves (three each) included. It is some
// 480 in the smallest geometry and 4066 in usual ones.
func (j *Journal) MaxReserve() int { return j.ring.maxReserved() }

// Reserve makes room for keys of that many words and one more key for each leaf crossed, where a key is cut in two.
// It waits while there is none: in memory, since the entry before is not on disk yet, or in the ring, since nodes
// that pin old entries must be written first. No lock may be held.
//
// Requests are served in order. Errors: ErrTooLarge, ErrClosed, a *FailedError, or ctx's.
func (j *Journal) Reserve(ctx context.Context, words, leaves int) (Reservation, error) {
	n := words + keyWords*leaves
	if n > j.ring.maxReserved() {
		return Reservation{}, fmt.Errorf("%w: %d words, the most is %d", ErrTooLarge, n, j.ring.maxReserved())
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.errLocked(); err != nil {
		return Reservation{}, err
	}
	if j.waiters.head == nil && j.admitsLocked(n) {
		j.reserved += n
		return Reservation{n}, nil
	}
	if err := j.waitRoomLocked(ctx, n); err != nil {
		return Reservation{}, err
	}
	return Reservation{n}, nil
}

// TryReserveLocked is Reserve that does not wait: false if it would have to, or would fail. The set's lock is held.
func (j *Journal) TryReserveLocked(words, leaves int) (Reservation, bool) {
	n := words + keyWords*leaves
	if j.errLocked() != nil || j.waiters.head != nil || !j.admitsLocked(n) {
		return Reservation{}, false
	}
	j.reserved += n
	return Reservation{n}, true
}

// Release gives back what is left of r.
func (j *Journal) Release(r *Reservation) {
	if r.words == 0 {
		return
	}
	j.mu.Lock()
	j.ReleaseLocked(r)
	j.mu.Unlock()
}

// ReleaseLocked is Release with the set's lock held.
func (j *Journal) ReleaseLocked(r *Reservation) {
	j.reserved -= r.words
	r.words = 0
	if j.blocked {
		j.grantLocked()
		j.work.Signal()
	}
}

// admitsLocked reports whether n more words can be reserved: whether all that is reserved fits into the open entry,
// that entry into the ring without touching what is kept, and whether a process that died with all of it only in
// the shared mapping would leave room for the next. See doc.go for why that is enough.
func (j *Journal) admitsLocked(n int) bool {
	r := &j.ring
	reserved := j.reserved + n
	total := j.words + reserved
	if j.start || reserved > r.maxReserved() || total > r.mostWords || j.seq-j.pins.tail >= maxSpan-spanKept && j.spanLocked() {
		return false
	}
	s, ok := r.put(r.space(j.pos), total)
	if !ok || r.free(s) < r.kept {
		return false
	}
	s, ok = r.restart(j.durablePos, j.flyingWordsLocked(), total)
	return ok && r.free(s) >= r.startKept
}

// flyingWordsLocked returns how many words of keys the entry has that a next process would have to write before those
// of the open one, negative if there is no such entry.
func (j *Journal) flyingWordsLocked() int {
	if !j.flying || j.flight.amends {
		return -1
	}
	return len(j.flight.set.Data) / 8
}

// spanLocked reports whether the entries that are pinned are too many for more keys.
func (j *Journal) spanLocked() bool { return j.seq-j.OldestPinLocked() >= maxSpan-spanKept }

// AppendLocked appends keys to the open entry and returns its seq. It takes their words from r, which must have
// them, and neither waits nor allocates. The set's lock is held, and has been since the keys were inserted into the
// tree: so the journal's order is the index's.
//
// Keys are leaf keys as the format has them: a size above zero, not larger than the end, and at most one pointer. The
// caller pins the entry (PinLocked) before it lets go of the lock. The change may be acknowledged when Acknowledge
// returns.
func (j *Journal) AppendLocked(r *Reservation, keys []ondisk.Key) (seq uint64) {
	slot := j.shared.keys(j.slot)
	n := j.words
	for i := range keys {
		k := &keys[i]
		if k.Ptrs() > 1 || k.Size() == 0 || uint64(k.Size()) > k.End() || k.End() > ondisk.MaxOffset {
			panic(fmt.Sprintf("journal: key %v would break a kernel's replay", k)) // F 6.1
		}
		ondisk.AppendKey(slot[:8*n], k)
		n += k.Words()
	}
	took := n - j.words
	if took > r.words {
		panic(fmt.Sprintf("journal: %d words appended with %d reserved", took, r.words))
	}
	r.words -= took
	j.reserved -= took
	if j.words == 0 && took > 0 {
		j.due = j.rt.Now() + j.delay
		j.timer.Reset(j.delay)
	}
	j.words = n
	j.stats.Keys += uint64(len(keys))
	j.shared.publish(j.slot, j.number, n) // from here on the death of the process does not lose them
	if j.blocked {
		j.work.Signal()
	}
	return j.seq
}

// A waiter is a Reserve that waits.
type waiter struct {
	words   int
	granted rt.Cond
	ok      bool
	next    *waiter
}

// A waiterList is those who wait for room, in order, and unused waiters.
type waiterList struct {
	head, tail *waiter
	spare      *waiter
}

func (l *waiterList) push(w *waiter) {
	w.next = nil
	if l.tail == nil {
		l.head = w
	} else {
		l.tail.next = w
	}
	l.tail = w
}

func (l *waiterList) pop() {
	l.head = l.head.next
	if l.head == nil {
		l.tail = nil
	}
}

// remove takes out one that gives up.
func (l *waiterList) remove(w *waiter) {
	var before *waiter
	for at := l.head; at != w; at = at.next {
		before = at
	}
	if before == nil {
		l.pop()
		return
	}
	before.next = w.next
	if l.tail == w {
		l.tail = before
	}
}

// waitRoomLocked waits until n words have been reserved for the caller.
func (j *Journal) waitRoomLocked(ctx context.Context, n int) error {
	l := &j.waiters
	w := l.spare
	if w == nil {
		w = new(waiter)
		w.granted.Init(j.mu)
	} else {
		l.spare = w.next
	}
	w.words, w.ok = n, false
	l.push(w)
	begin := j.rt.Now()
	j.work.Signal()
	var err error
	for !w.ok && err == nil {
		err = w.granted.WaitContext(ctx)
		if err == nil && !w.ok {
			err = j.errLocked()
		}
	}
	if w.ok {
		err = nil // it came just in time
	} else {
		l.remove(w)
		j.work.Signal() // whoever is behind may need less
	}
	w.next, l.spare = l.spare, w
	j.stats.ReserveWaits++
	j.stats.ReserveWait += j.rt.Now() - begin
	return err
}

// grantLocked reserves room for those who wait, as far as there is some.
func (j *Journal) grantLocked() {
	for w := j.waiters.head; w != nil && j.admitsLocked(w.words); w = j.waiters.head {
		j.reserved += w.words
		w.ok = true
		j.waiters.pop()
		w.granted.Signal()
	}
}
