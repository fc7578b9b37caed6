package journal

import (
	"errors"
	"fmt"
	"strings"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A caller's mistakes.
var (
	// ErrClosed: the journal has been closed.
	ErrClosed = errors.New("journal: closed")
	// ErrTooLarge: a reservation of more than MaxReserve words would wait for ever.
	ErrTooLarge = errors.New("journal: reservation larger than the journal ever has room for")
	// ErrFewBuckets: a ring of fewer than four buckets does not advance at run time (F 6.6); it can be read.
	ErrFewBuckets = errors.New("journal: too few buckets to write to")
)

// What reading can find.
var (
	// ErrEmpty: no bucket of the ring holds an entry.
	ErrEmpty = errors.New("no journal entries found")
	// ErrMissing is matched by every MissingError.
	ErrMissing = errors.New("journal entries missing")
)

// ErrNoRoom: the ring has no bucket left in which a start could write what the last process acknowledged. Nothing
// was written.
var ErrNoRoom = errors.New("journal: no bucket free at start")

// ErrFailed is matched by every FailedError.
var ErrFailed = errors.New("journal failed")

// A Range is the entries from From to To, both included.
type Range struct{ From, To uint64 }

func (r Range) String() string { return fmt.Sprintf("%d-%d", r.From, r.To) }

// A MissingError names the entries that the newest one needs and that are not there. It matches ErrMissing and
// ondisk.ErrCorrupt.
type MissingError struct {
	Device  string
	Missing []Range // in order
	Needed  Range
}

func (e *MissingError) Error() string {
	var list []string
	for _, r := range e.Missing {
		list = append(list, r.String())
	}
	return fmt.Sprintf("%s: journal entries %s missing! (replaying %v)", e.Device, strings.Join(list, ", "), e.Needed)
}

// Unwrap makes errors.Is find ErrMissing and ondisk.ErrCorrupt.
func (e *MissingError) Unwrap() []error { return []error{ErrMissing, ondisk.ErrCorrupt} }

// A FailedError says why the journal has stopped: from its moment on nothing is acknowledged any more. It matches
// ErrFailed and its cause.
type FailedError struct {
	Seq uint64 // the entry that could not be written; 0: it was not a write
	Err error
}

func (e *FailedError) Error() string {
	if e.Seq == 0 {
		return fmt.Sprintf("journal failed: making room: %v", e.Err)
	}
	return fmt.Sprintf("journal failed: write entry %d: %v", e.Seq, e.Err)
}

// Unwrap makes errors.Is find ErrFailed and the cause.
func (e *FailedError) Unwrap() []error { return []error{ErrFailed, e.Err} }

// A SharedError says that a shared mapping carries the right names and cannot be read all the same: what the last
// process acknowledged may be in there. It matches ondisk.ErrCorrupt.
type SharedError struct {
	Path   string
	Reason string
}

func (e *SharedError) Error() string {
	return fmt.Sprintf("shared journal entry %s: %s; removing the file gives up what only it holds", e.Path, e.Reason)
}

// Unwrap makes errors.Is(err, ondisk.ErrCorrupt) true.
func (e *SharedError) Unwrap() error { return ondisk.ErrCorrupt }
