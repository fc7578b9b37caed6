package ubcache

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/volume"
)

// A caller's mistakes.
var (
	ErrClosed     = cacheset.ErrClosed     // the set was closed
	ErrUnaligned  = blockdev.ErrUnaligned  // offset or length is no multiple of the block size
	ErrOutOfRange = blockdev.ErrOutOfRange // a range that does not lie in the volume
)

// What can be wrong with devices.
var (
	ErrCorrupt   = ondisk.ErrCorrupt   // bad bytes in the set's metadata
	ErrFailed    = cacheset.ErrFailed  // the set has stopped: its metadata could not be written
	ErrAttached  = volume.ErrAttached  // a volume with that uuid is open already
	ErrOtherSet  = volume.ErrOtherSet  // the backing device is attached to another set
	ErrUnflushed = volume.ErrUnflushed // the backing device misses data that this set does not have
	ErrBlockSize = volume.ErrBlockSize // the backing device's blocks are smaller than the set's
	ErrNoVolume  = volume.ErrNoVolume  // no such flash-only volume
	ErrNoSpace   = volume.ErrNoSpace   // a flash-only volume found no room in the cache
	ErrNoSlot    = cacheset.ErrNoSlot  // the set has as many volumes as it can have
)

// What can be wrong with changes of volumes.
var (
	ErrDetached    = volume.ErrDetached    // not attached, or a detach is under way
	ErrNoBacking   = volume.ErrNoBacking   // a flash-only volume has none
	ErrFlashExists = volume.ErrFlashExists // there is one of that label
	ErrFlashSize   = volume.ErrFlashSize   // no multiple of the block, too large, or less than before
	ErrFlashLabel  = volume.ErrFlashLabel  // empty, too long, or a number
)

// What can be wrong with attributes.
var (
	ErrNoObject          = fmt.Errorf("no such object")
	ErrNoAttribute       = fmt.Errorf("no such attribute")
	ErrReadOnlyAttribute = fmt.Errorf("the attribute cannot be set")
	ErrNoDiscard         = cacheset.ErrNoDiscard // the cache device does not support discards
)

// A ValueError says what an attribute takes.
type ValueError struct{ Attribute, Value, Want string }

func (e *ValueError) Error() string {
	return fmt.Sprintf("%s: %q is no value; it takes %s", e.Attribute, e.Value, e.Want)
}
