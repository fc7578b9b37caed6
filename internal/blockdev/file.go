package blockdev

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/rt"
)

// maxSyscall is the most that one read or write asks the kernel for; its own limit is a page less than 2 GiB.
const maxSyscall = 1 << 30

// A file is an open block device or regular file. Its methods do one operation at a time, waiting for it; the
// engines call them from goroutines that may wait, and leave the rest to the ring.
type file struct {
	fd   int
	path string
	info Info
	rt   *rt.Runtime
	log  *slog.Logger
	most int // bytes asked for in one system call; less in tests

	block       bool // a block device, not a regular file
	buffered    bool // the caller asked for the page cache
	deviceBlock int  // the block device's own logical block
	dmaAlign    int  // how the block device wants memory aligned
	zeroOffload bool // the block device zeroes without being sent zeroes

	mayFallBack bool // to threads, where a ring cannot be made

	// What turned out not to work, so that it is not tried again.
	noDsync, noZeroRange, noPunch atomic.Bool

	refs atomic.Int64 // 1 for the open device, 1 per queue; the descriptor is closed at 0
	shut atomic.Bool
}

// Info describes the device.
func (f *file) Info() Info { return f.info }

// Runtime returns the runtime given to Open.
func (f *file) Runtime() *rt.Runtime { return f.rt }

// chooseEngine settles Info.Engine; available says whether there is io_uring.
func (f *file) chooseEngine(want string, available func() error) error {
	if f.rt.Simulated() {
		want = EngineInline
	}
	if want == EngineAuto || want == EngineUring {
		f.mayFallBack = want == EngineAuto
		err := available()
		switch {
		case err == nil:
			want = EngineUring
		case want == EngineUring:
			return fmt.Errorf("engine uring: %w", err)
		default:
			f.log.Info("no io_uring; using threads", "dev", f.path, "err", err)
			want = EnginePread
		}
	}
	if want == EnginePread {
		raiseProcs()
	}
	f.info.Engine = want
	return nil
}

// NewQueue makes a queue of the device's engine.
func (f *file) NewQueue(depth int, complete func(done []*Request)) (Queue, error) {
	if f.shut.Load() {
		return nil, ErrClosed
	}
	f.refs.Add(1)
	depth = min(max(depth, 1), maxDepth)
	switch f.info.Engine {
	case EngineUring:
		q, err := newRingQueue(f, depth, complete)
		if err == nil {
			return q, nil
		}
		if f.mayFallBack { // too many rings or descriptors; threads need neither
			f.log.Warn("no io_uring for this queue; using threads", "dev", f.path, "err", err)
			raiseProcs()
			return newThreadQueue(f, depth, complete), nil
		}
		f.release()
		return nil, fmt.Errorf("queue of %s: %w", f.path, err)
	case EnginePread:
		return newThreadQueue(f, depth, complete), nil
	default:
		return newInlineQueue(f, complete), nil
	}
}

// maxDepth bounds what NewQueue is asked for.
const maxDepth = 4096

// Close closes the device; its lock goes with the last queue.
func (f *file) Close() error {
	if f.shut.Swap(true) {
		return ErrClosed
	}
	return f.release()
}

func (f *file) release() error {
	if f.refs.Add(-1) > 0 {
		return nil
	}
	unlock(f.fd)
	return unix.Close(f.fd)
}

// do works on one request, from where r.done says, until it is finished, and sets r.Err. The request has been
// checked.
func (f *file) do(r *Request) {
	var err error
	switch {
	case f.nothingToDo(r):
	case r.Op == OpRead:
		err = f.read(r)
	case r.Op == OpWrite:
		err = f.write(r)
	case r.Op == OpFlush:
		err = f.sync()
	default:
		if r.done != stepFlush {
			if r.Op == OpDiscard {
				err = f.discard(r.Off, r.Len)
			} else {
				err = f.zero(r)
			}
		}
		if err == nil && r.Flags&FUA != 0 {
			err = f.sync()
		}
	}
	r.Err = f.wrap(r, err)
}

// wrap makes the error of a request from the system's. Sentinels stay as they are.
func (f *file) wrap(r *Request, err error) error {
	if err == nil || err == ErrNotSupported {
		return err
	}
	return ioError(f.path, r, err)
}

func (f *file) read(r *Request) error {
	for r.done < len(r.Buf) {
		p := r.Buf[r.done:min(len(r.Buf), r.done+f.most)]
		n, err := unix.Pread(f.fd, p, r.Off+int64(r.done))
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 { // shrunk since it was opened
			return io.ErrUnexpectedEOF
		}
		r.done += n
	}
	return nil
}

func (f *file) write(r *Request) error {
	for r.done < len(r.Buf) {
		p := r.Buf[r.done:min(len(r.Buf), r.done+f.most)]
		var n int
		var err error
		if r.Flags&FUA != 0 && !f.noDsync.Load() {
			n, err = pwriteDsync(f.fd, p, r.Off+int64(r.done))
			if err == unix.EOPNOTSUPP || err == unix.ENOSYS {
				f.noDsync.Store(true)
				continue
			}
		} else {
			n, err = unix.Pwrite(f.fd, p, r.Off+int64(r.done))
		}
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrShortWrite
		}
		r.done += n
	}
	if r.Flags&FUA != 0 && f.noDsync.Load() {
		return f.sync()
	}
	return nil
}

// pwriteDsync is pwrite whose data is durable on return.
func pwriteDsync(fd int, p []byte, off int64) (int, error) {
	iov := unix.Iovec{Base: unsafe.SliceData(p), Len: uint64(len(p))}
	n, _, e := unix.Syscall6(unix.SYS_PWRITEV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1,
		uintptr(off), uintptr(uint64(off)>>32), unix.RWF_DSYNC)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

func (f *file) sync() error {
	for {
		if err := unix.Fdatasync(f.fd); err != unix.EINTR {
			return err
		}
	}
}

// discard forgets a range, or returns ErrNotSupported.
func (f *file) discard(off, n int64) error {
	if !f.block {
		return unsupported(f.fallocate(unix.FALLOC_FL_PUNCH_HOLE, off, n))
	}
	return unsupported(f.blockRange(unix.BLKDISCARD, off, n))
}

// zero makes a range read as zeroes, in the best way that the system has:
//
//	             may unmap             must stay allocated
//	file         punch a hole          ZERO_RANGE
//	block        unmap, if it zeroes   the device's write of zeroes
//	else, unless it has to be fast     write zeroes (block devices: the kernel does, BLKZEROOUT)
func (f *file) zero(r *Request) error {
	for mode := f.allocMode(r); mode != 0; mode = f.allocMode(r) {
		err := f.fallocate(mode, r.Off, r.Len)
		if !isUnsupported(err) {
			return err
		}
		if mode == unix.FALLOC_FL_PUNCH_HOLE {
			f.noPunch.Store(true)
		} else {
			f.noZeroRange.Store(true)
		}
	}
	fast := r.Flags&FastZero != 0
	switch {
	case fast && !(f.block && f.zeroOffload):
		return ErrNotSupported
	case f.block:
		return unsupported(f.blockRange(unix.BLKZEROOUT, r.Off, r.Len))
	default:
		return f.writeZeroes(r.Off, r.Len)
	}
}

// allocMode returns the mode of fallocate that does r, a discard or a write of zeroes; 0: none does.
func (f *file) allocMode(r *Request) uint32 {
	switch {
	case r.Op == OpDiscard && !f.block,
		r.Op == OpWriteZeroes && r.Flags&NoUnmap == 0 && !f.noPunch.Load():
		return unix.FALLOC_FL_PUNCH_HOLE
	case r.Op == OpWriteZeroes && !f.block && !f.noZeroRange.Load():
		return unix.FALLOC_FL_ZERO_RANGE
	}
	return 0
}

// ringCan reports whether a ring can do r, at least the first attempt.
func (f *file) ringCan(r *Request) bool {
	switch r.Op {
	case OpRead, OpFlush:
		return true
	case OpWrite:
		return r.Flags&FUA == 0 || !f.noDsync.Load()
	default:
		return f.allocMode(r) != 0
	}
}

// nothingToDo reports whether r is done without asking the system.
func (f *file) nothingToDo(r *Request) bool {
	if r.Op == OpFlush {
		return f.info.ReadOnly
	}
	return r.Length() == 0
}

// stepFlush, in Request.done, says that a discard or write of zeroes is done and its flush remains.
const stepFlush = 1

// blockRange calls BLKDISCARD or BLKZEROOUT.
func (f *file) blockRange(what uint, off, n int64) error {
	span := [2]uint64{uint64(off), uint64(n)}
	for {
		if err := ioctl(f.fd, what, unsafe.Pointer(&span)); err != unix.EINTR {
			return err
		}
	}
}

func (f *file) fallocate(mode uint32, off, n int64) error {
	for {
		if err := unix.Fallocate(f.fd, mode|unix.FALLOC_FL_KEEP_SIZE, off, n); err != unix.EINTR {
			return err
		}
	}
}

// writeZeroes sends zeroes, from memory mapped for the purpose: this is the last resort.
func (f *file) writeZeroes(off, n int64) error {
	size := min(n, defaultTransfer)
	zeroes, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	defer unix.Munmap(zeroes)
	for n > 0 {
		r := Request{Op: OpWrite, Off: off, Buf: zeroes[:min(n, size)]}
		if err := f.write(&r); err != nil {
			return err
		}
		off += int64(len(r.Buf))
		n -= int64(len(r.Buf))
	}
	return nil
}

func isUnsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOTTY)
}

// unsupported turns the system's ways of saying so into ErrNotSupported.
func unsupported(err error) error {
	if isUnsupported(err) {
		return ErrNotSupported
	}
	return err
}

// raiseProcs lets more threads run Go code than there are processors, once: a thread in pread keeps its place
// until the scheduler looks, which on few processors makes all others wait (see the package comment).
var raiseProcs = sync.OnceFunc(func() {
	if os.Getenv("GOMAXPROCS") != "" {
		return
	}
	if want := max(8, runtime.NumCPU()); runtime.GOMAXPROCS(0) < want {
		runtime.GOMAXPROCS(want)
	}
})

// An inlineQueue does each request within Submit.
type inlineQueue struct {
	completer
	f *file
}

func newInlineQueue(f *file, complete func([]*Request)) *inlineQueue {
	q := &inlineQueue{f: f}
	q.completer.init(f.rt, complete)
	return q
}

func (q *inlineQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	for _, r := range reqs {
		r.done = 0
		if r.Err = q.f.info.Check(r); r.Err == nil {
			q.f.do(r)
		}
	}
	q.finish(reqs...)
}

func (q *inlineQueue) Close() error {
	if !q.close() {
		return ErrClosed
	}
	return q.f.release()
}
