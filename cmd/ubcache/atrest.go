package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
)

// opened are the devices that a command at rest has open, for reading only.
type opened struct {
	cache    blockdev.Device // nil: none named
	backings []blockdev.Device

	runtimeDirs []string // where a process that served the set may have left something
}

// openDevices opens what the flags name.
func openDevices(env *environment, d *deviceFlags) (o opened, err error) {
	defer func() {
		if err != nil {
			o.Close()
		}
	}()
	if o.runtimeDirs, err = runtimeDirs(d.RuntimeDir); err != nil {
		return o, err
	}
	if slices.Contains(d.Backing, "") {
		return o, usageErrorf("--backing is empty")
	}
	if err := noneTwice(d.paths()); err != nil {
		return o, err
	}
	open := func(path string) (blockdev.Device, error) {
		return blockdev.Open(path, blockdev.Options{ReadOnly: true, Logger: newLogger(env.stderr)})
	}
	if d.Cache != "" {
		if o.cache, err = open(d.Cache); err != nil {
			return o, err
		}
	}
	for _, path := range d.Backing {
		dev, err := open(path)
		if err != nil {
			return o, err
		}
		o.backings = append(o.backings, dev)
	}
	return o, nil
}

func (o *opened) Close() {
	for _, dev := range append(o.backings, o.cache) {
		if dev != nil {
			dev.Close()
		}
	}
}

// newLogger logs for people: one line each, without time.
func newLogger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}}))
}

// atRestError gives an error of package offline the exit status that goes with it.
func atRestError(err error) error {
	var refused *offline.RefusedError
	if errors.As(err, &refused) {
		return refusedError(err)
	}
	return err
}

// listRanges prints ranges of a volume, offset and length in bytes.
func listRanges(w io.Writer, ranges [][2]int64) (total int64) {
	for _, r := range ranges {
		fmt.Fprintf(w, "  offset %d length %d\n", r[0], r[1])
		total += r[1]
	}
	return total
}

// openVolume opens the volume that the flags name: the one backing device, or the flash-only volume. What is wrong
// with the set beyond the harmless is printed to standard error. Call release in any case.
func openVolume(ctx context.Context, env *environment, o *opened, d *deviceFlags) (v *offline.Volume, release func(), err error) {
	release = func() {}
	var set *offline.Set
	if o.cache != nil {
		set, err = offline.Open(ctx, o.cache, offline.Options{RuntimeDirs: o.runtimeDirs})
		release = func() { set.Close() }
		noteMapped(env, &set.Mapped)
		if err != nil {
			return nil, release, err
		}
		for _, f := range set.Report.Findings() {
			if f.Severity > offline.Harmless {
				fmt.Fprintf(env.stderr, "%s: %s\n", env.name, f.String())
			}
		}
	}
	if d.Flash != "" {
		v, err = offline.OpenFlash(set, d.Flash)
		return v, release, err
	}
	b, err := offline.OpenBacking(set, o.backings[0])
	if err != nil {
		return nil, release, err
	}
	if set == nil {
		v, err = offline.OpenAlone(b)
	} else {
		v, err = offline.OpenVolume(set, b)
	}
	return v, release, err
}

func hashFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

// indentText puts three spaces before each line that is not empty.
func indentText(s string) string {
	var out strings.Builder
	for line := range strings.Lines(s) {
		if line != "\n" {
			out.WriteString("   ")
		}
		out.WriteString(line)
	}
	return out.String()
}

// outputFile returns the file that standard output is, nil where it is none.
func (env *environment) outputFile() *os.File {
	w := env.stdout
	if c, ok := w.(*checkedWriter); ok {
		w = c.w
	}
	f, _ := w.(*os.File)
	return f
}

// checkOutput refuses a standard output that is one of the devices that are read, by whatever name, and one that was
// closed when the program began, in whose place the runtime has opened the null device.
func checkOutput(env *environment, d *deviceFlags) error {
	f := env.outputFile()
	if f == nil {
		return nil
	}
	var out unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &out); err != nil {
		return fmt.Errorf("standard output: %w", err)
	}
	const null = 1<<8 | 3 // major 1, minor 3
	if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0); err == nil && flags&unix.O_ACCMODE == unix.O_RDWR && out.Mode&unix.S_IFMT == unix.S_IFCHR && out.Rdev == null {
		return errors.New("standard output is closed")
	}
	for _, path := range append([]string{d.Cache}, d.Backing...) {
		var in unix.Stat_t
		if path == "" || unix.Stat(path, &in) != nil {
			continue
		}
		same := in.Dev == out.Dev && in.Ino == out.Ino
		if in.Mode&unix.S_IFMT == unix.S_IFBLK && out.Mode&unix.S_IFMT == unix.S_IFBLK {
			same = in.Rdev == out.Rdev
		}
		if same {
			return refusedErrorf("%s is standard output too: it would be overwritten while it is read; no option overrides this", path)
		}
	}
	return nil
}

// interruptGrace is how long a command that only reads may take to end after a signal.
const interruptGrace = 2 * time.Second

// endSoon ends the process a moment after ctx ends, in case the command is stuck in writing to someone who does not
// read. For commands that change nothing. Call what it returns when the command has ended.
func endSoon(ctx context.Context, env *environment) (ended func() bool) {
	return context.AfterFunc(ctx, func() {
		time.Sleep(interruptGrace)
		fmt.Fprintf(env.stderr, "%s: interrupted while standard output did not take any more\n", env.name)
		os.Exit(exitFailed)
	})
}
