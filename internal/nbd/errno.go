package nbd

import (
	"errors"
	"syscall"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// Error numbers of the protocol. They are those of Linux.
const (
	errnoOK       = 0
	errnoPerm     = 1
	errnoIO       = 5
	errnoNoMem    = 12
	errnoInval    = 22
	errnoNoSpace  = 28
	errnoOverflow = 75
	errnoNotSup   = 95
	errnoShutdown = 108
)

// errnoTable gives the protocol's error for what a device may answer; the first that errors.Is finds counts.
var errnoTable = []struct {
	err   error
	errno uint32
}{
	{blockdev.ErrNotSupported, errnoNotSup},
	{blockdev.ErrReadOnly, errnoPerm},
	{blockdev.ErrUnaligned, errnoInval},
	{blockdev.ErrOutOfRange, errnoInval},
	{blockdev.ErrClosed, errnoShutdown},
	{syscall.ENOSPC, errnoNoSpace},
	{syscall.EDQUOT, errnoNoSpace},
	{syscall.EFBIG, errnoNoSpace},
	{syscall.EPERM, errnoPerm},
	{syscall.EACCES, errnoPerm},
	{syscall.EROFS, errnoPerm},
	{syscall.ENOMEM, errnoNoMem},
	{syscall.EINVAL, errnoInval},
	{syscall.EOPNOTSUPP, errnoNotSup},
	{syscall.EOVERFLOW, errnoOverflow},
	{syscall.ESHUTDOWN, errnoShutdown},
}

// errnoOf returns the protocol's number for err: 0 for nil, EIO for what is in no table.
func errnoOf(err error) uint32 {
	if err == nil {
		return errnoOK
	}
	for i := range errnoTable {
		if errors.Is(err, errnoTable[i].err) {
			return errnoTable[i].errno
		}
	}
	return errnoIO
}

// errorOf is the client's side of the table: what a server's error number means here. It wraps the errno of the
// system, and blockdev's sentinel where there is one.
func errorOf(errno uint32) error {
	switch errno {
	case errnoOK:
		return nil
	case errnoNotSup:
		return blockdev.ErrNotSupported
	case errnoPerm, errnoIO, errnoNoMem, errnoInval, errnoNoSpace, errnoOverflow, errnoShutdown:
		return syscall.Errno(errno)
	default: // the protocol says: treat as EINVAL
		return syscall.EINVAL
	}
}
