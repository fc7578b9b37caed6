package volume

import (
	"github.com/ubcache/ubcache/internal/rt"
)

// A span is a range of key sectors.
type span struct{ start, end uint64 }

func (a span) overlaps(b span) bool { return a.start < b.end && b.start < a.end }

// ranges are what is under way on a volume. They are guarded by the set's lock. There are as many as there are
// requests, so they are searched one by one.
type ranges struct {
	writes  []underWay
	waiting []waiter
	last    uint64 // number of the newest write
	fills   []*fill
	ended   rt.Cond // a write has
}

// An underWay is a write that is being made.
type underWay struct {
	span
	cache bool // it goes to the cache alone; until that is decided, it may go to the backing device
}

// A waiter is a write that waits for others.
type waiter struct {
	span
	number uint64
}

// A fill is a range that missed and is being read for the cache.
type fill struct {
	span
	void bool
}

// WantedLocked reports whether nobody has written to the range meanwhile, and the backing device has lost nothing.
func (f *fill) WantedLocked() bool { return !f.void }

// beginWriteLocked waits until no write overlaps w, registers it, and voids the fills that it overlaps. Who waits goes
// before whoever comes later and overlaps.
func (r *ranges) beginWriteLocked(w span) {
	r.last++
	me := r.last
	for waited := false; r.writing(w) || r.before(w, me); waited = true {
		if !waited {
			r.waiting = append(r.waiting, waiter{w, me})
		}
		r.ended.Wait()
	}
	for i := range r.waiting {
		if r.waiting[i].number == me {
			r.waiting = append(r.waiting[:i], r.waiting[i+1:]...)
			break
		}
	}
	r.addWriteLocked(w)
}

// tryBeginWriteLocked is beginWriteLocked that does not wait: false if it would have to.
func (r *ranges) tryBeginWriteLocked(w span) bool {
	if r.writing(w) || r.before(w, r.last+1) {
		return false
	}
	r.addWriteLocked(w)
	return true
}

func (r *ranges) addWriteLocked(w span) {
	r.writes = append(r.writes, underWay{span: w})
	for _, f := range r.fills {
		if f.overlaps(w) {
			f.void = true
		}
	}
}

// before reports whether a write with a lower number waits and overlaps w.
func (r *ranges) before(w span, number uint64) bool {
	for i := range r.waiting {
		if o := &r.waiting[i]; o.number < number && o.overlaps(w) {
			return true
		}
	}
	return false
}

func (r *ranges) writing(w span) bool {
	for _, o := range r.writes {
		if o.overlaps(w) {
			return true
		}
	}
	return false
}

// toCacheLocked says whether a write that is under way goes to the cache alone.
func (r *ranges) toCacheLocked(w span, yes bool) {
	for i := range r.writes {
		if o := &r.writes[i]; o.span == w {
			o.cache = yes
			return
		}
	}
}

// belowLocked returns the first part of s that a write under way may be writing to the backing device; ok says that there
// is one.
func (r *ranges) belowLocked(s span) (part span, ok bool) {
	for i := range r.writes {
		if o := &r.writes[i]; !o.cache && o.overlaps(s) && (!ok || o.start < part.start) {
			part, ok = o.span, true
		}
	}
	return span{max(part.start, s.start), min(part.end, s.end)}, ok
}

func (r *ranges) endWriteLocked(w span) {
	for i, o := range r.writes {
		if o.span == w {
			last := len(r.writes) - 1
			r.writes[i] = r.writes[last]
			r.writes = r.writes[:last]
			break
		}
	}
	r.ended.Broadcast()
}

// beginFillLocked registers a fill, if nothing under way overlaps it.
func (r *ranges) beginFillLocked(f *fill) bool {
	if r.writing(f.span) {
		return false
	}
	for _, o := range r.fills {
		if o.overlaps(f.span) {
			return false
		}
	}
	f.void = false
	r.fills = append(r.fills, f)
	return true
}

// voidFillsLocked voids all fills under way.
func (r *ranges) voidFillsLocked() {
	for _, f := range r.fills {
		f.void = true
	}
}

func (r *ranges) endFillLocked(f *fill) {
	for i, o := range r.fills {
		if o == f {
			last := len(r.fills) - 1
			r.fills[i] = r.fills[last]
			r.fills[last] = nil
			r.fills = r.fills[:last]
			return
		}
	}
}
