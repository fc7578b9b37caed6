package blockdev

import "unsafe"

// Check returns the sentinel that a device with this Info answers r with, or nil if r is a request that it can
// be asked. Devices call it on all they get.
func (i *Info) Check(r *Request) error {
	switch r.Op {
	case OpFlush:
		return nil
	case OpRead, OpWrite, OpDiscard, OpWriteZeroes:
	default:
		return ErrNotSupported
	}
	n := r.Length()
	if r.Off < 0 || n < 0 || n > i.Size || r.Off > i.Size-n { // written so that nothing can overflow
		return ErrOutOfRange
	}
	if (r.Off|n)&int64(i.LogicalBlock-1) != 0 {
		return ErrUnaligned
	}
	if r.Op.Writes() && i.ReadOnly {
		return ErrReadOnly
	}
	if (r.Op == OpRead || r.Op == OpWrite) && !aligned(r.Buf, i.BufferAlign) {
		return ErrUnaligned
	}
	if r.Op == OpDiscard && !i.CanDiscard {
		return ErrNotSupported
	}
	return nil
}

// aligned reports whether p starts at a multiple of align (a power of two) in memory.
func aligned(p []byte, align int) bool {
	return len(p) == 0 || uintptr(unsafe.Pointer(unsafe.SliceData(p)))&uintptr(align-1) == 0
}
