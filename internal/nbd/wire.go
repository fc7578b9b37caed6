package nbd

import (
	"errors"
	"io"
	"net"
	"syscall"
	"unsafe"
)

// maxIOV is the most pieces that one writev takes on Linux.
const maxIOV = 1024

// A wire moves bytes between a connection and memory, without allocating. One goroutine at a time may read, and one
// at a time may write.
type wire interface {
	// readv waits until something is there and reads it, first into a, then into b, one of which may be empty.
	// Before it waits it calls dry, and looks again if that returns true; then it tries as often again as tries
	// says, for what must be on its way already.
	readv(a, b []byte, tries int) (int, error)

	// writev sends the pieces in order. When not all can be sent without waiting it returns how many bytes
	// went, and again, unless block is set: then it waits until at least one byte is sent.
	writev(pieces [][]byte, block bool) (n int, again bool, err error)
}

// newWire returns the fast wire for a connection that is a socket, the plain one for others (TLS, pipes in tests),
// which calls dry before each read, since it cannot tell whether that will wait.
func newWire(c net.Conn, dry func() bool) wire {
	if _, ok := c.(interface{ NetConn() net.Conn }); !ok {
		if sc, ok := c.(syscall.Conn); ok {
			if raw, err := sc.SyscallConn(); err == nil {
				return newSocketWire(raw, dry)
			}
		}
	}
	return plainWire{c, dry}
}

// socketWire calls readv and writev itself, inside the runtime's poller. The closures are made once and take their
// arguments from fields, since a closure that captures variables would be allocated for each call.
type socketWire struct {
	raw    syscall.RawConn
	readFn func(fd uintptr) bool
	rd     struct {
		iov [2]syscall.Iovec
		n   int // used entries of iov
		try int
		got int
		err syscall.Errno
	}
	writeFn func(fd uintptr) bool
	wr      struct {
		iov   []syscall.Iovec // as long as was needed so far
		n     int
		sent  int
		block bool
		again bool
		err   syscall.Errno
	}
}

func newSocketWire(raw syscall.RawConn, dry func() bool) *socketWire {
	w := &socketWire{raw: raw}
	w.readFn = func(fd uintptr) bool {
		for {
			n, _, errno := syscall.Syscall(syscall.SYS_READV, fd, uintptr(unsafe.Pointer(&w.rd.iov[0])), uintptr(w.rd.n))
			switch errno {
			case syscall.EINTR:
				continue
			case syscall.EAGAIN:
				if dry() {
					continue
				}
				if w.rd.try--; w.rd.try >= 0 {
					continue
				}
				return false
			}
			w.rd.got, w.rd.err = int(n), errno
			return true
		}
	}
	w.writeFn = func(fd uintptr) bool {
		for {
			n, _, errno := syscall.Syscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&w.wr.iov[0])), uintptr(w.wr.n))
			switch errno {
			case syscall.EINTR:
				continue
			case syscall.EAGAIN:
				w.wr.again = true
				return !w.wr.block
			}
			w.wr.sent, w.wr.err, w.wr.again = int(n), errno, false
			return true
		}
	}
	return w
}

func (w *socketWire) readv(a, b []byte, tries int) (int, error) {
	w.rd.n, w.rd.try = 0, tries
	if len(a) > 0 {
		w.rd.iov[0] = iovec(a)
		w.rd.n = 1
	}
	if len(b) > 0 {
		w.rd.iov[w.rd.n] = iovec(b)
		w.rd.n++
	}
	if w.rd.n == 0 {
		return 0, io.ErrShortBuffer
	}
	err := w.raw.Read(w.readFn)
	w.rd.iov = [2]syscall.Iovec{}
	switch {
	case err != nil:
		return 0, err
	case w.rd.err != 0:
		return 0, w.rd.err
	case w.rd.got == 0:
		return 0, io.EOF
	}
	return w.rd.got, nil
}

func (w *socketWire) writev(pieces [][]byte, block bool) (int, bool, error) {
	if len(pieces) > maxIOV {
		pieces = pieces[:maxIOV]
	}
	if len(pieces) > len(w.wr.iov) {
		w.wr.iov = make([]syscall.Iovec, min(maxIOV, max(16, 2*len(pieces))))
	}
	for i, p := range pieces {
		w.wr.iov[i] = iovec(p)
	}
	w.wr.n, w.wr.block, w.wr.sent, w.wr.again = len(pieces), block, 0, false
	err := w.raw.Write(w.writeFn)
	clear(w.wr.iov[:len(pieces)])
	if err != nil {
		return 0, false, err
	}
	if w.wr.err != 0 {
		return 0, false, w.wr.err
	}
	return w.wr.sent, w.wr.again, nil
}

func iovec(p []byte) syscall.Iovec {
	return syscall.Iovec{Base: unsafe.SliceData(p), Len: uint64(len(p))}
}

// plainWire works over any connection. It cannot write without waiting, so all its writes happen in the writer
// goroutine.
type plainWire struct {
	c   net.Conn
	dry func() bool
}

func (w plainWire) readv(a, b []byte, _ int) (int, error) {
	if len(a) == 0 {
		a = b
	}
	w.dry()
	for {
		n, err := w.c.Read(a)
		if n > 0 {
			return n, nil
		}
		if err != nil {
			return 0, err
		}
	}
}

func (w plainWire) writev(pieces [][]byte, block bool) (int, bool, error) {
	if !block {
		return 0, true, nil
	}
	n, err := w.c.Write(pieces[0])
	return n, false, err
}

// skip removes n bytes from the front of pieces.
func skip(pieces [][]byte, n int) [][]byte {
	for n > 0 && n >= len(pieces[0]) {
		n -= len(pieces[0])
		pieces = pieces[1:]
	}
	if n > 0 {
		pieces[0] = pieces[0][n:]
	}
	return pieces
}

// disconnected reports whether err is the ordinary end of a connection, by either side.
func disconnected(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
