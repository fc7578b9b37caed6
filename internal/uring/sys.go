package uring

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Operations that this project uses.
const (
	OpNop       = 0
	OpFsync     = 3
	OpFallocate = 17
	OpRead      = 22
	OpWrite     = 23
	OpURingCmd  = 46
)

// SQE.Flags.
const (
	FixedFile = 1 << 0 // FD is an index into the registered files
	Async     = 1 << 4 // hand it to a kernel thread at once
)

// Features of the kernel, as Ring.Features returns them.
const (
	FeatSingleMmap    = 1 << 0
	FeatNoDrop        = 1 << 1
	FeatSubmitStable  = 1 << 2
	FeatNativeWorkers = 1 << 9
)

// Flags of io_uring_setup.
const (
	setupCQSize = 1 << 3
	setupClamp  = 1 << 4
	setupSQE128 = 1 << 10
)

const (
	enterGetEvents = 1 << 0 // of io_uring_enter
	sqCQOverflow   = 1 << 1 // of the SQ ring's flags

	registerFiles   = 2 // of io_uring_register
	unregisterFiles = 3
	registerEventFD = 4
	registerProbe   = 8

	offSQRing = 0 // for mmap
	offCQRing = 0x8000000
	offSQEs   = 0x10000000
)

// An SQE is one operation for the kernel, 64 bytes:
//
//	0 opcode u8   1 flags u8   2 ioprio u16   4 fd s32   8 off u64   16 addr u64   24 len u32   28 op flags u32
//	32 user_data u64   40 buf_index u16   42 personality u16   44 file_index s32   48 addr3 u64   56 -
//
// With Options.SQE128 each is 128 bytes, of which those from 48 are the argument of OpURingCmd; see Cmd.
type SQE struct {
	Opcode      uint8
	Flags       uint8
	IOPrio      uint16
	FD          int32
	Off         uint64 // OpURingCmd: see SetCmdOp
	Addr        uint64
	Len         uint32
	OpFlags     uint32 // RWF_* and the like
	UserData    uint64 // returned in the CQE
	BufIndex    uint16
	Personality uint16
	FileIndex   int32
	Addr3       uint64
	_           uint64
}

// A CQE is the result of one operation.
type CQE struct {
	UserData uint64
	Res      int32 // what the system call would return; negative: an errno
	Flags    uint32
}

// ReadAt makes s read into p from byte off of file fd.
func (s *SQE) ReadAt(fd int, p []byte, off int64) {
	s.Opcode, s.FD, s.Off = OpRead, int32(fd), uint64(off)
	s.Addr, s.Len = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))), uint32(len(p))
}

// WriteAt makes s write p to byte off of file fd; flags are RWF_* of pwritev2.
func (s *SQE) WriteAt(fd int, p []byte, off int64, flags uint32) {
	s.Opcode, s.FD, s.Off, s.OpFlags = OpWrite, int32(fd), uint64(off), flags
	s.Addr, s.Len = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))), uint32(len(p))
}

// SetCmdOp sets the command of OpURingCmd, which shares its place with Off.
func (s *SQE) SetCmdOp(op uint32) { *(*uint32)(unsafe.Pointer(&s.Off)) = op }

// Fdatasync makes s flush the data of file fd.
func (s *SQE) Fdatasync(fd int) {
	s.Opcode, s.FD, s.OpFlags = OpFsync, int32(fd), 1
}

// Fallocate makes s call fallocate on file fd; mode is FALLOC_FL_*.
func (s *SQE) Fallocate(fd int, mode uint32, off, n int64) {
	s.Opcode, s.FD, s.Off, s.Len, s.Addr = OpFallocate, int32(fd), uint64(off), mode, uint64(n)
}

// Cmd returns the argument area of OpURingCmd. The ring must have been made with Options.SQE128.
func (s *SQE) Cmd() *[80]byte { return (*[80]byte)(unsafe.Add(unsafe.Pointer(s), 48)) }

// params is struct io_uring_params, 120 bytes.
type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32

	_  [3]uint32
	sq sqOffsets
	cq cqOffsets
}

// sqOffsets says where in the SQ ring's mapping its parts are.
type sqOffsets struct {
	head, tail, ringMask, ringEntries, flags, dropped, array, _ uint32

	userAddr uint64
}

// cqOffsets says where in the CQ ring's mapping its parts are.
type cqOffsets struct {
	head, tail, ringMask, ringEntries, overflow, cqes, flags, _ uint32

	userAddr uint64
}

// probe is struct io_uring_probe with room for all operations.
type probe struct {
	lastOp, opsLen uint8

	_   uint16
	_   [3]uint32
	ops [256]struct {
		op, _ uint8
		flags uint16
		_     uint32
	}
}

func sysSetup(entries uint32, p *params) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

func sysEnter(fd int, submit, wait, flags uint32) (int, error) {
	n, _, e := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(submit), uintptr(wait), uintptr(flags), 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

func sysRegister(fd int, op uint32, arg unsafe.Pointer, n uint32) error {
	for {
		_, _, e := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), uintptr(op), uintptr(arg), uintptr(n), 0, 0)
		if e == 0 {
			return nil
		}
		if e != unix.EINTR {
			return e
		}
	}
}
