package volume

import "time"

// A warning is something that may happen with every request: the log has it at once, and again once a minute at most,
// with how often it was.
type warning uint8

const (
	warnCacheRead warning = iota
	warnCacheWrite
	warnNoSpace
	warnWriteback
	warnings
)

var warningTexts = [warnings]string{
	warnCacheRead:  "the cache device could not be read",
	warnCacheWrite: "the cache device could not be written",
	warnWriteback:  "dirty data could not be written back, and stays dirty",
	warnNoSpace:    "the cache has no room for what is written to a flash-only volume",
}

const warnEvery = time.Minute

// warned is what there is to say about a warning.
type warned struct {
	times uint64 // not told yet
	next  time.Duration
}

// warn notes that something went wrong, and logs it if it is time to.
func (v *Volume) warn(w warning, err error) {
	v.set.Lock()
	times := v.warnedLocked(w)
	v.set.Unlock()
	v.tell(w, times, err)
}

// warnedLocked counts a warning, and returns how often it was since it was told last, 0 if that is not to be told yet.
func (v *Volume) warnedLocked(w warning) (times uint64) {
	e, now := &v.warned[w], v.rt.Now()
	e.times++
	if now < e.next {
		return 0
	}
	times = e.times
	*e = warned{next: now + warnEvery}
	return times
}

func (v *Volume) tell(w warning, times uint64, err error) {
	if times > 0 {
		v.log.Warn(warningTexts[w], "volume", v.name, "times", times, "err", err)
	}
}

// cacheFailed counts parts of a request that the cache device did not take.
func (v *Volume) cacheFailed(err error) {
	v.set.Lock()
	v.stats.CacheWriteErrors++
	times := v.warnedLocked(warnCacheWrite)
	v.set.Unlock()
	v.tell(warnCacheWrite, times, err)
}
