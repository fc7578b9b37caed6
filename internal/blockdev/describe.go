package blockdev

import (
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// defaultTransfer is MaxTransfer where the device does not say.
const defaultTransfer = 1 << 20

// describe finds out what the opened file is and can do, and gives up direct transfers where they do not fit.
func (f *file) describe(o Options) error {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return fmt.Errorf("stat: %w", err)
	}
	f.info = Info{Name: f.path, ReadOnly: o.ReadOnly, MaxTransfer: defaultTransfer}
	var err error
	if f.block = st.Mode&unix.S_IFMT == unix.S_IFBLK; f.block {
		err = f.describeBlock(&st)
	} else {
		f.describeFile(&st)
	}
	if err != nil {
		return err
	}
	if b := o.LogicalBlock; b != 0 {
		if b < f.info.LogicalBlock {
			return fmt.Errorf("logical block of %d bytes, the device has %d", b, f.info.LogicalBlock)
		}
		f.info.LogicalBlock = b
		f.info.PhysicalBlock = max(f.info.PhysicalBlock, b)
	}
	if rest := f.info.Size & int64(f.info.LogicalBlock-1); rest != 0 {
		f.log.Info("the size is not a multiple of the block size; the rest is not used", "dev", f.path, "bytes", rest)
		f.info.Size -= rest
	}
	return f.describeDirect()
}

// describeFile fills in a regular file.
func (f *file) describeFile(st *unix.Stat_t) {
	f.info.Size = st.Size
	f.info.LogicalBlock = 512 // never st_blksize, which is only what the file system likes best
	f.info.PhysicalBlock = 4096
	if n := int(st.Blksize); n > 4096 && n <= 1<<20 && n&(n-1) == 0 {
		f.info.PhysicalBlock = n
	}
	if !f.info.ReadOnly {
		// Beyond the end there is nothing to lose: this only asks whether holes can be made at all.
		beyond := (st.Size + 1<<20) &^ (1<<20 - 1)
		err := f.fallocate(unix.FALLOC_FL_PUNCH_HOLE, beyond, 1<<20)
		f.info.CanDiscard = err == nil
		f.info.DiscardZeroes = err == nil
	}
	// A file is as rotational as what it lies on, where that is a block device.
	f.info.Rotational = sysfsInt(sysfsQueue(st.Dev), "rotational") == 1
}

// describeBlock fills in a block device.
func (f *file) describeBlock(st *unix.Stat_t) error {
	var size uint64
	if err := ioctl(f.fd, unix.BLKGETSIZE64, unsafe.Pointer(&size)); err != nil {
		return fmt.Errorf("size: %w", err)
	}
	var logical, physical, optimal uint32
	if err := ioctl(f.fd, unix.BLKSSZGET, unsafe.Pointer(&logical)); err != nil {
		return fmt.Errorf("block size: %w", err)
	}
	if logical < 512 || logical&(logical-1) != 0 {
		return fmt.Errorf("block size of %d bytes", logical)
	}
	if ioctl(f.fd, unix.BLKPBSZGET, unsafe.Pointer(&physical)) != nil || physical < logical {
		physical = logical
	}
	if ioctl(f.fd, unix.BLKIOOPT, unsafe.Pointer(&optimal)) != nil {
		optimal = 0
	}
	queue := sysfsQueue(st.Rdev)
	f.info.Size = int64(min(size, 1<<63-1))
	f.info.LogicalBlock = int(logical)
	f.info.PhysicalBlock = int(physical)
	f.info.OptimalIO = int(optimal)
	f.info.PartialStripe = parityRAID(filepath.Dir(queue))
	f.info.Rotational = sysfsInt(queue, "rotational") == 1
	f.info.CanDiscard = sysfsInt(queue, "discard_max_bytes") > 0
	if kb := sysfsInt(queue, "max_sectors_kb"); kb > 0 {
		f.info.MaxTransfer = max(int(kb)<<10, int(logical))
	}
	f.zeroOffload = sysfsInt(queue, "write_zeroes_max_bytes") > 0
	f.deviceBlock, f.dmaAlign = int(logical), 512
	if n := int(sysfsInt(queue, "dma_alignment")); n > 0 && n < 4096 && n&(n+1) == 0 {
		f.dmaAlign = n + 1
	}
	var readOnly uint32
	if !f.info.ReadOnly && ioctl(f.fd, unix.BLKROGET, unsafe.Pointer(&readOnly)) == nil && readOnly != 0 {
		return unix.EROFS
	}
	return nil
}

// describeDirect decides about direct transfers: where the system refuses them, or wants larger units than the
// logical block, transfers go through the page cache.
func (f *file) describeDirect() error {
	f.info.BufferAlign = 1
	flags, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
	if err != nil {
		return fmt.Errorf("fcntl: %w", err)
	}
	if flags&unix.O_DIRECT == 0 {
		if !f.buffered {
			f.log.Warn("no direct transfers here; using the page cache", "dev", f.path)
		}
		return nil
	}
	memory, unit := f.directAlign()
	if unit != 0 && unit <= f.info.LogicalBlock {
		f.info.Direct, f.info.BufferAlign = true, memory
		return nil
	}
	f.log.Warn("direct transfers do not fit; using the page cache", "dev", f.path, "need", unit, "block", f.info.LogicalBlock)
	if _, err := unix.FcntlInt(uintptr(f.fd), unix.F_SETFL, flags&^unix.O_DIRECT); err != nil {
		return fmt.Errorf("leave direct mode: %w", err)
	}
	return nil
}

// directAlign returns how memory and offsets must be aligned for direct transfers, in bytes; unit 0 means that
// there are none.
func (f *file) directAlign() (memory, unit int) {
	if f.block {
		return f.dmaAlign, f.deviceBlock
	}
	var sx unix.Statx_t
	err := unix.Statx(f.fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &sx)
	if err == nil && sx.Mask&unix.STATX_DIOALIGN != 0 {
		memory, unit = int(sx.Dio_mem_align), int(sx.Dio_offset_align)
		if unit == 0 || bits.OnesCount(uint(unit)) != 1 || bits.OnesCount(uint(memory)) != 1 {
			return 0, 0
		}
		return memory, unit
	}
	// An older kernel: try. A read at 512 tells whether blocks of 512 will do.
	mem, err := unix.Mmap(-1, 0, 2*pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return 0, 0
	}
	defer unix.Munmap(mem)
	for _, unit := range []int{512, 1024, 2048, 4096} {
		if f.info.Size < 2*int64(unit) {
			break
		}
		if _, err := unix.Pread(f.fd, mem[:unit], int64(unit)); err == nil {
			return max(unit, 512), unit
		} else if err != unix.EINVAL {
			return 0, 0
		}
	}
	return 0, 0
}

// sysfsQueue returns the directory that describes the request queue of a block device. A partition has its
// disk's.
func sysfsQueue(dev uint64) string {
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev))
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	if _, err := os.Stat(dir + "/partition"); err == nil {
		dir = filepath.Dir(dir)
	}
	return dir + "/queue"
}

// parityRAID reports whether a device, by its folder in sysfs, is an array with parity. Of others below it nothing is
// known: the kernel tells only itself.
func parityRAID(dir string) bool {
	level, err := os.ReadFile(filepath.Join(dir, "md/level"))
	if err != nil {
		return false
	}
	switch strings.TrimSpace(string(level)) {
	case "raid4", "raid5", "raid6":
		return true
	}
	return false
}

// sysfsInt reads a number, or -1 where there is none.
func sysfsInt(dir, name string) int64 {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return -1
	}
	return n
}

func ioctl(fd int, req uint, arg unsafe.Pointer) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg)); e != 0 {
		return e
	}
	return nil
}
