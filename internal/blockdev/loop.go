package blockdev

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// loopHolders finds the loop devices whose backing file (or device) st describes, each with what it is used for.
// With writersOnly, those that are read-only do not count.
//
// A loop device takes no lock on its file, and none keeps it from being set up, so this sees only those that are
// there already.
func loopHolders(st *unix.Stat_t, writersOnly bool) []Holder {
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") // there is one only while it is set up
	var found []Holder
	for _, attr := range backing {
		dir := filepath.Dir(filepath.Dir(attr))
		if writersOnly && firstLine(dir+"/ro") == "1" || !backedBy(dir, st) {
			continue
		}
		what := "/dev/" + filepath.Base(dir)
		var uses []string
		if dev, ok := parseDev(firstLine(dir + "/dev")); ok {
			for _, h := range blockHolders(dev) {
				uses = append(uses, h.What)
			}
		}
		if len(uses) > 0 {
			what = fmt.Sprintf("%s (%s)", what, strings.Join(uses, ", "))
		}
		found = append(found, Holder{What: what})
	}
	return found
}

// backedBy reports whether the loop device of a directory of /sys/block has what st describes behind it. The
// device itself knows exactly. Where it cannot be asked, the path that it was set up with must do, which is another
// process's: it may have been seen from another root.
func backedBy(dir string, st *unix.Stat_t) bool {
	isBlock := st.Mode&unix.S_IFMT == unix.S_IFBLK
	if info, err := loopStatus(dir); err == nil {
		if isBlock {
			return info.Rdevice == st.Rdev
		}
		return info.Device == st.Dev && info.Inode == st.Ino
	}
	var s unix.Stat_t
	path := firstLine(dir + "/loop/backing_file")
	return path != "" && unix.Stat(path, &s) == nil && sameDisk(&s, st)
}

// loopStatus asks the loop device of a directory of /sys/block for its state.
func loopStatus(dir string) (*unix.LoopInfo64, error) {
	fd, err := openRetry("/dev/"+filepath.Base(dir), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	// Within a container, /dev may be made of anything.
	if dev, ok := parseDev(firstLine(dir + "/dev")); !ok || st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != dev {
		return nil, unix.ENXIO
	}
	return unix.IoctlLoopGetStatus64(fd)
}

// parseDev undoes the "major:minor" of /sys.
func parseDev(s string) (uint64, bool) {
	a, b, _ := strings.Cut(s, ":")
	major, err1 := strconv.ParseUint(a, 10, 32)
	minor, err2 := strconv.ParseUint(b, 10, 32)
	return unix.Mkdev(uint32(major), uint32(minor)), err1 == nil && err2 == nil
}

// firstLine returns what a file of /sys says, without the end of its line; nothing if it cannot be read.
func firstLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(b), "\n")
}
