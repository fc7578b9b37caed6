package offline

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// formatUnit is what is cleared around a mark, where the device's block is not larger.
const formatUnit = 4096

// formatRounds bounds how often a cache device is looked at again: each round clears all that was found, and
// more only shows up where one mark had hidden another.
const formatRounds = 16

// A formatSaved is what was on a device before Format wrote to it.
type formatSaved struct {
	off int64
	old []byte
}

// A FormatError says that a device failed while it was formatted, and what became of the devices. Whatever had
// been written was undone as far as possible: what is not named in Lost is as it was.
type FormatError struct {
	Device string
	Doing  string // "clear", "write", "verify"
	Err    error
	Lost   []string // devices that may have neither their old content nor a superblock
}

func (e *FormatError) Error() string {
	s := fmt.Sprintf("format %s: %s: %v", e.Device, e.Doing, e.Err)
	if len(e.Lost) == 0 {
		return s + "; everything is as it was"
	}
	return s + "; the old content could not be put back on " + strings.Join(e.Lost, ", ")
}

func (e *FormatError) Unwrap() error { return e.Err }

// writeAll formats devices that may be overwritten, all or none of them.
//
//	for each device   clear bytes 0 to 8191 and every mark found, on a backing device below the data offset only
//	                  on a cache device of a set uuid that was given: clear the start of each journal bucket to be
//	                  flush
//	for each device   write the superblock, durably
//	for each device   read back, look for marks once more
//
// So at a power cut a device has its old marks, or some, or none, and never a new superblock beside an old mark
// that was to go. Journal entries of an earlier life of the same set would win over new ones (F 6.3); they are gone
// before there is a superblock through which they could be found.
func writeAll(ctx context.Context, targets []*formatTarget) ([]Formatted, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for _, t := range targets {
		io, err := blockdev.NewIO(t.dev, 4)
		if err != nil {
			return nil, fmt.Errorf("format %s: %w", t.info.Name, err)
		}
		t.io = io.WithPurpose(blockdev.ForSuperblock)
	}
	ctx = context.WithoutCancel(ctx) // from here on it is short, and better ended than broken off
	results := make([]Formatted, len(targets))
	for _, step := range []struct {
		doing string
		do    func(context.Context, *formatTarget) (*Formatted, error)
	}{
		{"clear", clearTarget}, {"write", writeTarget}, {"verify", verifyTarget},
	} {
		for i, t := range targets {
			r, err := step.do(ctx, t)
			if err != nil {
				return nil, undoAll(targets, &FormatError{Device: t.info.Name, Doing: step.doing, Err: err})
			}
			if r != nil {
				results[i] = *r
			}
		}
	}
	return results, nil
}

// clearTarget removes all that could be found before, or beside, the new superblock.
func clearTarget(ctx context.Context, t *formatTarget) (*Formatted, error) {
	if err := t.clear(0, ondisk.SuperblockOffset+ondisk.SuperblockBytes); err != nil {
		return nil, err
	}
	if t.sb.IsCache() && t.journal {
		for i := range ondisk.JournalBuckets(t.sb.NBuckets()) {
			bucket := int64(t.sb.FirstBucket) + int64(i)
			if err := t.clear(bucket*int64(t.sb.BucketSectors())*ondisk.SectorSize, formatUnit); err != nil {
				return nil, err
			}
		}
	}
	found := t.probed
	for range formatRounds {
		cleared := false
		for _, s := range found.Signatures {
			if s.Offset >= t.limit {
				continue // the user's
			}
			if err := t.clear(s.Offset, s.Length); err != nil {
				return nil, err
			}
			cleared = true
		}
		for _, u := range found.Unread {
			// A write may well heal it. If not, the superblock's own place is what must work.
			if u.Offset < t.limit && t.clear(u.Offset, u.Length) == nil {
				cleared = true
			}
		}
		if !cleared {
			break
		}
		if err := t.io.Flush(); err != nil {
			return nil, err
		}
		var err error
		if found, err = Probe(ctx, t.dev, nil); err != nil {
			return nil, err
		}
		found.Unread = nil // once is enough
	}
	return nil, t.io.Flush()
}

// writeTarget writes the superblock. It is valid or not as one sector, the first, is there: no field that is set
// lies beyond, and the rest was cleared before.
func writeTarget(_ context.Context, t *formatTarget) (*Formatted, error) {
	b := make([]byte, ondisk.SuperblockBytes) // a logical block is never larger
	t.sb.Encode(b)
	t.undo = append(t.undo, formatSaved{off: ondisk.SuperblockOffset, old: make([]byte, len(b))})
	t.written = true
	if err := t.io.WriteAt(b, ondisk.SuperblockOffset, blockdev.FUA); err != nil {
		return nil, err
	}
	return nil, t.io.Flush()
}

// verifyTarget reads everything back.
func verifyTarget(ctx context.Context, t *formatTarget) (*Formatted, error) {
	want := make([]byte, ondisk.SuperblockOffset+ondisk.SuperblockBytes)
	t.sb.Encode(want[ondisk.SuperblockOffset:])
	got := make([]byte, len(want))
	if err := t.io.ReadAt(got, 0); err != nil {
		return nil, err
	}
	if !bytes.Equal(got, want) {
		at := 0
		for got[at] == want[at] {
			at++
		}
		return nil, fmt.Errorf("byte %d reads as %#02x and was written as %#02x", at, got[at], want[at])
	}
	now, err := Probe(ctx, t.dev, nil)
	if err != nil {
		return nil, err
	}
	r := &Formatted{Device: t.info.Name, Super: t.sb, info: t.info}
	for _, s := range now.Signatures {
		switch {
		case s.Bcache != nil && s.Bcache.UUID == t.sb.UUID:
		case s.Offset < t.limit:
			return nil, fmt.Errorf("%v is still there after it was cleared", &s)
		default:
			r.Left = append(r.Left, s)
		}
	}
	for _, s := range t.probed.Signatures {
		if !slices.ContainsFunc(r.Left, func(l Signature) bool { return l.Name == s.Name && l.Offset == s.Offset }) {
			r.Overwritten = append(r.Overwritten, s)
		}
	}
	return r, nil
}

// clear makes n bytes at off zero, and what lies with them in whole units, up to the target's limit. Where all
// is zero already nothing is written.
func (t *formatTarget) clear(off, n int64) error {
	unit := max(formatUnit, int64(t.info.LogicalBlock))
	from := off &^ (unit - 1)
	to := min((off+n+unit-1)&^(unit-1), t.limit, t.info.Size)
	for ; from < to; from += formatUnit {
		b := make([]byte, min(formatUnit, to-from))
		readable := t.io.ReadAt(b, from) == nil
		if readable && len(bytes.Trim(b, "\x00")) == 0 {
			continue
		}
		if readable {
			t.undo = append(t.undo, formatSaved{off: from, old: bytes.Clone(b)})
		} else {
			t.lost = true
		}
		clear(b)
		t.written = true
		if err := t.io.WriteAt(b, from, 0); err != nil {
			return err
		}
	}
	return nil
}

// undoAll puts back what was there, the first overwritten last, so that a superblock comes back only after what
// it leads to.
func undoAll(targets []*formatTarget, e *FormatError) error {
	for _, t := range targets {
		if !t.written {
			continue
		}
		bad := t.lost
		for _, s := range slices.Backward(t.undo) {
			bad = t.io.WriteAt(s.old, s.off, 0) != nil || bad
		}
		if t.io.Flush() != nil || bad {
			e.Lost = append(e.Lost, t.info.Name)
		}
	}
	return e
}

func (t *formatTarget) close() {
	if t.io != nil {
		t.io.Close()
	}
}
