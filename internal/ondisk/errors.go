package ondisk

import (
	"errors"
	"fmt"
)

// ErrCorrupt is matched by every error that says bytes on disk break the format.
var ErrCorrupt = errors.New("corrupt")

// CorruptError says which structure is bad, where, and why. It matches ErrCorrupt.
//
// Decoders fill Structure, Offset, Field and Reason; whoever read the bytes adds Device and Sector.
type CorruptError struct {
	Structure string // "superblock", "jset", "bset", "prio_set", "uuid", "key"
	Device    string // path, "" when not known
	Sector    int64  // of the structure on Device, -1 when not known
	Offset    int    // byte offset of the bad field in the bytes decoded
	Field     string // "csum", "magic", "keys"
	Reason    string // "is 1f00, want 9a31"
}

func (e *CorruptError) Error() string {
	s := e.Structure
	if e.Device != "" {
		s = e.Device + ": " + s
	}
	if e.Sector >= 0 {
		s += fmt.Sprintf(" at sector %d", e.Sector)
	}
	return s + ": " + e.Field + " " + e.Reason
}

// Unwrap makes errors.Is(err, ErrCorrupt) true.
func (e *CorruptError) Unwrap() error { return ErrCorrupt }

func corrupt(structure string, offset int, field, reason string, args ...any) *CorruptError {
	return &CorruptError{Structure: structure, Sector: -1, Offset: offset, Field: field, Reason: fmt.Sprintf(reason, args...)}
}

// At returns a copy of err, if it is a *CorruptError, that says which device and sector the bytes came from.
func At(err error, device string, sector int64) error {
	var c *CorruptError
	if !errors.As(err, &c) {
		return err
	}
	d := *c
	d.Device, d.Sector = device, sector
	return &d
}
