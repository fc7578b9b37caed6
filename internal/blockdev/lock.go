package blockdev

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Locks are advisory: they bind those who look. Two kinds are in use for disks and neither sees the other, so
// both are taken. They belong to the open file and go when its last descriptor is closed, however the process
// ends.
//
//	                 flock      fcntl (open file description) locks, bytes of the file
//	file, writing    exclusive  exclusive on all
//	file, reading    shared     shared on all but 101-200, and nobody may hold 101-199
//	block, writing   shared     as for a file, and the open itself is exclusive (O_EXCL)
//	block, reading   shared     as for a file, and nobody may have it open exclusively
//
// The gap is qemu's scheme: who uses an image holds shared locks on byte 100+i for each thing i that it does, and
// on 200+i for each that it allows nobody else (0 read consistently, 1 write, 2 write the same, 3 resize), and
// looks whether someone holds the other's byte. So a reader of ours and one of theirs do not disturb each other,
// and every other pair does. The flock of a block device stays shared even for writing because udev wants to
// share it now and then, while tools that repartition or format a disk want it for themselves.
//
// A loop device locks nothing. Whoever has one is looked for, and counts as a writer, or if it is read-only as a
// reader.
const (
	qemuWrites = 101 // first byte of those who write
	qemuShares = 200 // byte of those who let nobody read
)

// lockPatience is for devices that others hold for a moment only: udev looking at one, another opener asking whether
// anyone has it open exclusively, or the kernel tearing down a ring: that of a process which was killed holds its files
// for 15 to 70 ms.
const (
	lockPatience = 20 * time.Millisecond
	lockTries    = 10
)

// lock takes the locks of an opened device, or returns a *BusyError.
func lock(fd int, path string, st *unix.Stat_t, o Options) error {
	isBlock := st.Mode&unix.S_IFMT == unix.S_IFBLK
	for try := 1; ; try++ {
		err := tryLock(fd, path, isBlock, o)
		switch {
		case err == nil:
			loops := loopHolders(st, o.ReadOnly)
			if len(loops) == 0 {
				return nil
			}
			if try == lockTries { // one that is being detached goes by itself
				return &BusyError{Device: path, Holders: loops}
			}
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EBUSY):
			return fmt.Errorf("lock %s: %w", path, err)
		case try == lockTries:
			return busy(path, st, fd)
		}
		time.Sleep(lockPatience)
	}
}

func tryLock(fd int, path string, isBlock bool, o Options) error {
	how := unix.LOCK_EX
	if o.ReadOnly || isBlock {
		how = unix.LOCK_SH
	}
	if !onNFS(fd) { // there, both kinds are the same to the server, and we would be in our own way
		if err := lockable(flock(fd, how|unix.LOCK_NB), path, o); err != nil {
			return err
		}
	}
	if !o.ReadOnly {
		return lockable(ofdLock(fd, unix.F_WRLCK, 0, 0), path, o)
	}
	if err := lockable(ofdLock(fd, unix.F_RDLCK, 0, qemuWrites), path, o); err != nil {
		return err
	}
	if err := lockable(ofdLock(fd, unix.F_RDLCK, qemuShares+1, 0), path, o); err != nil {
		return err
	}
	held, err := ofdHeld(fd, qemuWrites, qemuShares-qemuWrites)
	if err = lockable(err, path, o); err != nil {
		return err
	}
	if held {
		return unix.EAGAIN
	}
	if isBlock { // does anyone have it open exclusively? We hold it so for a moment only
		probe, err := openRetry(path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NONBLOCK)
		if err != nil {
			return err
		}
		unix.Close(probe)
	}
	return nil
}

// unlock lets the locks go. Closing would do, but a ring that is being torn down may keep the file open for a
// moment longer, and the next opener should not have to wait for that.
func unlock(fd int) {
	_ = ofdLock(fd, unix.F_UNLCK, 0, 0)
	_ = flock(fd, unix.LOCK_UN)
}

// lockable lets file systems without locks pass, with a notice.
func lockable(err error, path string, o Options) error {
	switch err {
	case unix.ENOLCK, unix.EOPNOTSUPP, unix.ENOSYS, unix.EINVAL:
		o.Logger.Warn("the file system has no locks; nothing keeps others out", "dev", path, "err", err)
		return nil
	}
	return err
}

func flock(fd, how int) error {
	for {
		if err := unix.Flock(fd, how); err != unix.EINTR {
			return err
		}
	}
}

// ofdLock locks n bytes from start, or all from start if n is 0, without waiting.
func ofdLock(fd int, kind int16, start, n int64) error {
	lk := unix.Flock_t{Type: kind, Start: start, Len: n}
	for {
		if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk); err != unix.EINTR {
			return err
		}
	}
}

// ofdGetlk asks who holds a lock; golang.org/x/sys lacks the number.
const ofdGetlk = 36

// ofdHeld reports whether anyone else holds a lock of any kind on the n bytes.
func ofdHeld(fd int, start, n int64) (bool, error) {
	lk := unix.Flock_t{Type: unix.F_WRLCK, Start: start, Len: n}
	if err := unix.FcntlFlock(uintptr(fd), ofdGetlk, &lk); err != nil {
		return false, err
	}
	return lk.Type != unix.F_UNLCK, nil
}

func onNFS(fd int) bool {
	var fs unix.Statfs_t
	return unix.Fstatfs(fd, &fs) == nil && fs.Type == unix.NFS_SUPER_MAGIC
}
