package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"unsafe"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// version is set by the linker for a release; else it comes from what the build was made of.
var version = ""

// versionFacts is what "ubcache version" tells.
type versionFacts struct {
	Version string          `json:"version"`
	Go      string          `json:"go"`
	Formats formatsKnown    `json:"superblock_versions"`
	Kernel  string          `json:"kernel"`
	Found   []kernelFeature `json:"kernel_features"`
}

type formatsKnown struct {
	Cache   []int `json:"cache"`
	Backing []int `json:"backing"`
}

type kernelFeature struct {
	Name  string `json:"name"`
	Found bool   `json:"found"`
	Note  string `json:"note,omitempty"`
}

// newVersionCommand makes "ubcache version".
func newVersionCommand(env *environment) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version [--json]",
		Short: "Print the version, the format versions known, and what this kernel offers",
		Args:  wantArgs(0, 0, ""),
		RunE: func(*cobra.Command, []string) error {
			v := facts()
			if asJSON {
				return writeJSON(env.stdout, v)
			}
			fmt.Fprintf(env.stdout, "ubcache %s (%s)\n", v.Version, v.Go)
			fmt.Fprintf(env.stdout, "superblock versions: cache %s; backing %s\n", numbers(v.Formats.Cache), numbers(v.Formats.Backing))
			fmt.Fprintf(env.stdout, "kernel: %s\n", v.Kernel)
			for _, f := range v.Found {
				word := "no"
				if f.Found {
					word = "yes"
				}
				if f.Note != "" {
					word += " (" + f.Note + ")"
				}
				fmt.Fprintf(env.stdout, "  %-10s %s\n", f.Name, word)
			}
			return nil
		},
	}
	jsonFlag(cmd, &asJSON)
	return describe(cmd, help{
		long: `
Print the version, which versions of superblocks are known, and what was found of the kernel that makes things
faster or possible: io_uring (fast I/O), ublk (volumes as block devices), nbd (the kernel as a client), O_DIRECT (I/O
round the page cache, tried in the folder for temporary files), bcache (disks that the kernel may hold).`,
		example: "ubcache version --json",
	})
}

func numbers(n []int) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(n), " ", ", "), "[]")
}

func facts() versionFacts {
	v := versionFacts{
		Version: buildVersion(), Go: runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH,
		Formats: formatsKnown{Cache: []int{0, 3, 5}, Backing: []int{1, 4, 6}},
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		v.Kernel = unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
	}
	v.Found = []kernelFeature{
		feature("io_uring", ioUring()), feature("ublk", deviceNode("/dev/ublk-control", "module ublk_drv")),
		feature("nbd", deviceNode("/dev/nbd0", "module nbd")), feature("O_DIRECT", direct(os.TempDir())),
		feature("bcache", deviceNode("/sys/fs/bcache/register", "module bcache")),
	}
	return v
}

// buildVersion finds out what was built: a release, a module version, or a revision.
func buildVersion() string {
	if version != "" {
		return version
	}
	b, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := b.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	s := "devel"
	for _, kv := range b.Settings {
		switch {
		case kv.Key == "vcs.revision":
			s += " " + kv.Value[:min(12, len(kv.Value))]
		case kv.Key == "vcs.modified" && kv.Value == "true":
			s += " with changes"
		}
	}
	return s
}

func feature(name string, err error) kernelFeature {
	f := kernelFeature{Name: name, Found: err == nil}
	if err != nil {
		f.Note = err.Error()
	}
	return f
}

// ioUring makes a ring and drops it.
func ioUring() error {
	var params [120]byte // struct io_uring_params
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params[0])), 0)
	switch errno {
	case 0:
		return unix.Close(int(fd))
	case unix.EPERM:
		return fmt.Errorf("forbidden here: %w", errno)
	}
	return errno
}

func deviceNode(path, comesWith string) error {
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("no %s; it comes with %s", path, comesWith)
	}
	return nil
}

// direct tries to open a file for transfers round the page cache; the file has no name.
func direct(dir string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("in %s: %w", dir, err)
	}
	return unix.Close(fd)
}
