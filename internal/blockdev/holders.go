package blockdev

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Holder is someone who has a device in use.
type Holder struct {
	PID     int    // 0: not a process
	Command string // of the process
	What    string // where not a process: "mounted at /srv", "bcache0"
}

func (h Holder) String() string {
	if h.PID == 0 {
		return h.What
	}
	return fmt.Sprintf("process %d (%s)", h.PID, h.Command)
}

// A BusyError says that a device is in use, and by whom as far as that can be found out: other users' processes
// show to root only, and processes in other containers not at all. It matches ErrBusy.
type BusyError struct {
	Device  string
	Holders []Holder // may be empty
}

func (e *BusyError) Error() string {
	if len(e.Holders) == 0 {
		return fmt.Sprintf("%s is in use", e.Device)
	}
	var who []string
	for _, h := range e.Holders {
		who = append(who, h.String())
	}
	return fmt.Sprintf("%s is in use by %s", e.Device, strings.Join(who, ", "))
}

func (e *BusyError) Unwrap() error { return ErrBusy }

// busy makes a BusyError for the device or file that st describes. The opener's own descriptor (or -1) does not
// count.
func busy(path string, st *unix.Stat_t, own int) error {
	e := &BusyError{Device: path}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		e.Holders = append(blockHolders(st.Rdev), processHolders(st, own)...)
	} else {
		e.Holders = processHolders(st, own)
	}
	return e
}

// blockHolders finds what the kernel itself uses a block device for: devices built on it or on its partitions,
// file systems, swap.
func blockHolders(dev uint64) []Holder {
	id := fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))
	dir := "/sys/dev/block/" + id
	var found []Holder
	nodes := []string{id}
	held, _ := filepath.Glob(dir + "/holders/*")
	parts, _ := filepath.Glob(dir + "/*/partition")
	for _, p := range parts {
		more, _ := filepath.Glob(filepath.Dir(p) + "/holders/*")
		held = append(held, more...)
		if b, err := os.ReadFile(filepath.Dir(p) + "/dev"); err == nil {
			nodes = append(nodes, strings.TrimSpace(string(b)))
		}
	}
	for _, h := range held {
		name := filepath.Base(h)
		if b, err := os.ReadFile(h + "/dm/name"); err == nil {
			name += " (" + strings.TrimSpace(string(b)) + ")"
		}
		found = append(found, Holder{What: name})
	}
	if _, err := os.Stat(dir + "/bcache"); err == nil && len(held) == 0 {
		found = append(found, Holder{What: "the kernel's bcache"})
	}
	for _, node := range nodes {
		eachLine("/proc/self/mountinfo", func(f []string) {
			if len(f) > 4 && f[2] == node {
				found = append(found, Holder{What: "mounted at " + unescape(f[4])})
			}
		})
	}
	eachLine("/proc/swaps", func(f []string) {
		var st unix.Stat_t
		if len(f) > 1 && strings.HasPrefix(f[0], "/") && unix.Stat(unescape(f[0]), &st) == nil && st.Rdev == dev {
			found = append(found, Holder{What: "swap"})
		}
	})
	return found
}

// processHolders finds the processes that hold a lock on what st describes. Where none is to be seen, as with a
// block device opened exclusively, it names those that have it open.
func processHolders(st *unix.Stat_t, own int) []Holder {
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	var locked, open []Holder
	for _, proc := range procs {
		pid, err := strconv.Atoi(filepath.Base(proc))
		if err != nil {
			continue
		}
		except := ""
		if pid == os.Getpid() {
			except = strconv.Itoa(own)
		}
		has, hasLock := openBy(proc, st, except)
		if !has {
			continue
		}
		comm, _ := os.ReadFile(proc + "/comm")
		h := Holder{PID: pid, Command: strings.TrimSpace(string(comm))}
		open = append(open, h)
		if hasLock {
			locked = append(locked, h)
		}
	}
	if len(locked) > 0 {
		return locked
	}
	return open
}

// openBy reports whether a process has the file open, and a lock on it, by other descriptors than one.
func openBy(proc string, st *unix.Stat_t, except string) (has, locked bool) {
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return false, false
	}
	for _, fd := range fds {
		var s unix.Stat_t
		if fd.Name() == except || unix.Stat(proc+"/fd/"+fd.Name(), &s) != nil || !sameDisk(&s, st) {
			continue
		}
		withLock := false
		eachLine(proc+"/fdinfo/"+fd.Name(), func(f []string) {
			// "lock: 1: OFDLCK ADVISORY WRITE -1 fe:00:12345 0 EOF"; one that waits has "->".
			withLock = withLock || len(f) > 2 && f[0] == "lock:" && f[2] != "->"
		})
		if withLock {
			return true, true
		}
		has = true
	}
	return has, false
}

// sameDisk: the same inode, or the same block device by another name.
func sameDisk(a, b *unix.Stat_t) bool {
	if a.Mode&unix.S_IFMT == unix.S_IFBLK && b.Mode&unix.S_IFMT == unix.S_IFBLK {
		return a.Rdev == b.Rdev
	}
	return a.Dev == b.Dev && a.Ino == b.Ino
}

// eachLine calls fn with the fields of each line of a file of /proc, if it can be read.
func eachLine(path string, fn func(fields []string)) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		fn(strings.Fields(s.Text()))
	}
}

// unescape undoes the octal escapes of /proc/self/mountinfo and /proc/swaps.
func unescape(s string) string {
	for _, c := range []string{"\\040", "\\011", "\\012", "\\134"} {
		n, _ := strconv.ParseUint(c[1:], 8, 8)
		s = strings.ReplaceAll(s, c, string(rune(n)))
	}
	return s
}
