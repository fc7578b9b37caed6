package blockdev

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/uring"
)

// Values of Options.Engine.
const (
	EngineAuto   = ""       // uring where the system has it, else pread
	EngineUring  = "uring"  // one io_uring per queue: one system call per batch
	EnginePread  = "pread"  // a bounded pool of threads in pread and pwrite; raises GOMAXPROCS, see Open
	EngineInline = "inline" // within Submit, one after the other: for a simulated runtime, and for measuring
)

// Options modify Open. The zero value opens for reading and writing, with whatever is fastest.
type Options struct {
	ReadOnly bool // no writes, and a shared lock: other readers may have it open, writers may not

	// NoLock opens without regard to who has it open, and without keeping anyone out: for looking at a device
	// in use. It requires ReadOnly.
	NoLock bool

	// Buffered goes through the page cache even where direct transfers would be possible.
	Buffered bool

	// LogicalBlock is the unit of offsets and lengths in bytes, a power of two not below the device's own.
	// Default: the device's own, which for a file is 512.
	LogicalBlock int

	Engine string // default EngineAuto

	Runtime *rt.Runtime  // default: the real one. With a simulated one the engine is EngineInline.
	Logger  *slog.Logger // for notices; default: none
}

// Open opens a block device or a regular file, whose size stays as it is.
//
// Opened for writing, it is locked against everybody else, also within this process, as far as they look:
// openers of a block device that use O_EXCL (mount, swap, dm, md, bcache), and programs that use flock or
// fcntl locks, qemu's scheme among them. Opened for reading it is locked against those that write. Who comes
// second gets a *BusyError, which matches ErrBusy. So does who opens the file behind a loop device, except for
// reading if that is read-only; a loop device that is set up later is not kept out.
//
// Where direct transfers (O_DIRECT) are refused, or would need units larger than the logical block, Open goes
// on through the page cache, says so to the Logger, and Info.Direct is false.
//
// EnginePread needs threads to wait in the kernel while others run. The first device opened with it therefore
// raises GOMAXPROCS to max(8, NumCPU), unless the environment sets GOMAXPROCS.
func Open(path string, o Options) (Device, error) {
	if o.Runtime == nil {
		o.Runtime = rt.New()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	fd, err := openLocked(path, o)
	if err != nil {
		return nil, err
	}
	f := &file{fd: fd, path: path, buffered: o.Buffered, rt: o.Runtime, log: o.Logger, most: maxSyscall}
	f.refs.Store(1)
	if err = f.describe(o); err == nil {
		err = f.chooseEngine(o.Engine, uring.Available)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return f, nil
}

func (o *Options) check() error {
	switch o.Engine {
	case EngineAuto, EngineUring, EnginePread, EngineInline:
	default:
		return fmt.Errorf("unknown engine %q: want %s", o.Engine, strings.Join([]string{EngineUring, EnginePread}, ", "))
	}
	if o.NoLock && !o.ReadOnly {
		return errors.New("NoLock is for reading only")
	}
	if b := o.LogicalBlock; b != 0 && (b < 512 || b > 1<<20 || b&(b-1) != 0) {
		return fmt.Errorf("logical block of %d bytes: want a power of two from 512", b)
	}
	return nil
}

// openLocked opens path and takes its lock. A file that is replaced between the two is opened again, so that
// whoever comes by the same path meets the same lock.
func openLocked(path string, o Options) (int, error) {
	for {
		fd, st, err := openPlain(path, o)
		if err != nil {
			return -1, err
		}
		if o.NoLock {
			return fd, nil
		}
		if err := lock(fd, path, &st, o); err != nil {
			unix.Close(fd)
			return -1, err
		}
		var now unix.Stat_t
		if err := unix.Stat(path, &now); err == nil && now.Dev == st.Dev && now.Ino == st.Ino {
			return fd, nil
		}
		unix.Close(fd)
	}
}

// openPlain opens path with O_DIRECT where possible, and for block devices O_EXCL where it is to be written.
func openPlain(path string, o Options) (int, unix.Stat_t, error) {
	flags := unix.O_CLOEXEC | unix.O_RDWR
	if o.ReadOnly {
		flags = unix.O_CLOEXEC | unix.O_RDONLY
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return -1, st, &os.PathError{Op: "open", Path: path, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFBLK:
		if !o.ReadOnly {
			flags |= unix.O_EXCL
		}
	default: // do not open: that alone may do something, or wait
		return -1, st, fmt.Errorf("open %s: %w", path, errNotADisk)
	}
	direct := unix.O_DIRECT
	if o.Buffered {
		direct = 0
	}
	fd, err := openRetry(path, flags|direct)
	for try := 1; err == unix.EBUSY && try < lockTries; try++ {
		time.Sleep(lockPatience)
		fd, err = openRetry(path, flags|direct)
	}
	if err == unix.EINVAL && direct != 0 {
		fd, err = openRetry(path, flags)
	}
	if err == unix.EBUSY && st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return -1, st, busy(path, &st, -1)
	}
	if err != nil {
		return -1, st, &os.PathError{Op: "open", Path: path, Err: err}
	}
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return -1, st, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFBLK {
		unix.Close(fd)
		return -1, st, fmt.Errorf("open %s: %w", path, errNotADisk)
	}
	return fd, st, nil
}

var errNotADisk = errors.New("neither a block device nor a regular file")

func openRetry(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}
