package blockdev

import (
	"errors"
	"fmt"
)

// A caller's mistakes. The request has done nothing.
var (
	// ErrUnaligned: the offset or length is no multiple of Info.LogicalBlock, or the buffer is not aligned in
	// memory to Info.BufferAlign.
	ErrUnaligned = errors.New("blockdev: unaligned")
	// ErrOutOfRange: the range does not lie within the device, or the length is negative.
	ErrOutOfRange = errors.New("blockdev: beyond the end of the device")
	// ErrReadOnly: the device was opened for reading only.
	ErrReadOnly = errors.New("blockdev: opened for reading only")
	// ErrClosed: the queue or device has been closed.
	ErrClosed = errors.New("blockdev: closed")
)

// States of a device.
var (
	// ErrNotSupported: the device cannot do this operation (discard), or not in the way asked for (FastZero).
	ErrNotSupported = errors.New("blockdev: not supported by the device")
	// ErrBusy: another program, or another part of this one, has the device open. See BusyError.
	ErrBusy = errors.New("blockdev: in use")
	// ErrPowerCut: a Crashable has lost its power.
	ErrPowerCut = errors.New("blockdev: the power has been cut")
)

// An IOError says what failed on which device. It wraps the cause: an errno, io.ErrUnexpectedEOF where the
// device turned out shorter than it said, or a sentinel of this package.
type IOError struct {
	Device   string
	Op       Op
	Off, Len int64 // bytes
	Err      error
}

func (e *IOError) Error() string {
	if e.Op == OpFlush {
		return fmt.Sprintf("%s: flush: %v", e.Device, e.Err)
	}
	return fmt.Sprintf("%s: %v %d bytes at %d: %v", e.Device, e.Op, e.Len, e.Off, e.Err)
}

func (e *IOError) Unwrap() error { return e.Err }

// ioError wraps a failure of r on the named device.
func ioError(device string, r *Request, err error) error {
	return &IOError{Device: device, Op: r.Op, Off: r.Off, Len: r.Length(), Err: err}
}
