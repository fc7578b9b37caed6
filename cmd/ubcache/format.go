package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Options of format that a refusal names.
const (
	forceFlag     = "force"
	unflushedFlag = "force-discard-unflushed"
)

// formatFlags are the options of format.
type formatFlags struct {
	devices       deviceFlags
	setUUID, uuid string
	replacement   string
	writeback     bool
	force         bool
	json          bool
	o             offline.FormatOptions
}

// newFormatCommand makes "ubcache format".
func newFormatCommand(env *environment) *cobra.Command {
	var f formatFlags
	cmd := &cobra.Command{
		Use:   "format [--cache DEV] [--backing DEV]... [OPTIONS]",
		Short: "Make the superblocks of a cache set",
		Args:  wantArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.fill(); err != nil {
				return err
			}
			made, err := formatDevices(cmd.Context(), f.devices.Cache, f.devices.Backing, f.o)
			if err != nil {
				return formatFailure(err, func(r *offline.FormatRefusal) string { return "use " + permission(r) })
			}
			return f.print(env.stdout, made)
		},
	}
	f.devices.add(cmd, roleCache, roleBacking)
	fl := cmd.Flags()
	fl.Var(&sizeValue{to: &f.o.Bucket, least: 1}, "bucket", "bucket `SIZE` of the cache device, a power of two (default 512KiB)")
	fl.Var(&sizeValue{to: &f.o.Block, least: 1}, "block", "block `SIZE`, 512 to 4096 (default: the largest logical block of the devices)")
	fl.Var(&sizeValue{to: &f.o.DataOffset, least: 1}, "data-offset", "where the data of a backing device begins, a `SIZE` (default 8KiB; 16s is 16 sectors)")
	fl.StringVar(&f.setUUID, "set-uuid", "", "`UUID` of the cache set (default: random)")
	fl.StringVar(&f.uuid, "uuid", "", "`UUID` of the device, where there is only one (default: random)")
	fl.StringVar(&f.o.Label, "label", "", "`TEXT` of up to 32 bytes for the backing device, or for the cache device where there is none (default: none)")
	fl.BoolVar(&f.writeback, "writeback", false, "backing devices start in writeback mode (default: writethrough)")
	fl.BoolVar(&f.o.Discard, "discard", false, "discard freed buckets of the cache device (default: no)")
	fl.StringVar(&f.replacement, "replacement", "lru", "replacement `POLICY` of the cache device: lru, fifo or random")
	fl.BoolVar(&f.force, forceFlag, false, "overwrite what is on the devices, but not unflushed data")
	fl.BoolVar(&f.o.DiscardUnflushed, unflushedFlag, false, "together with --force: also where there is, or may be, data that only the cache has")
	jsonFlag(cmd, &f.json)
	return describe(cmd, help{
		long: `
Make the superblocks of a cache device, of backing devices, or of both, so that they are one set when they are next
activated by ubcache or by a kernel. Backing devices that are made together with their cache device, or with the
--set-uuid of one, attach by themselves. What a device held before is lost: the data of a backing device
begins at the data offset, behind what is written here.

All devices are looked at before anything is written, and either all are made or none. A device that carries
something, or that cannot be read where something could be, is refused, and the message says what is there. A device
that anyone has in use is refused, whatever the options.

On a backing device only what lies below the data offset is written; marks further on that other programs could
find are named. On a cache device no earlier mark is left.

Buckets larger than 16MiB need Linux 5.9 or later. At least 513 buckets are needed. To attach to a set, the block of a
backing device must not be smaller than that of the cache device.`,
		example: `
ubcache format --cache /dev/nvme0n1p4 --backing /dev/sdb --writeback
ubcache format --backing /dev/sdc --set-uuid 4b9a8a0c-4d31-4c5a-b2c0-0f8f7d3a6a51 --block 4k`,
		exit: map[int]string{exitFailed: "failed; the message says what became of the devices", exitRefused: exitWords[exitRefused]},
	})
}

// fill completes the options of the library.
func (f *formatFlags) fill() (err error) {
	if f.devices.Cache == "" && len(f.devices.Backing) == 0 {
		return usageErrorf("which devices? Give --cache DEV, --backing DEV, or both")
	}
	if slices.Contains(f.devices.Backing, "") {
		return usageErrorf("--backing is empty")
	}
	if err := new(ondisk.Superblock).SetLabel(f.o.Label); err != nil {
		return usageErrorf("--label: %w", err)
	}
	if f.o.SetUUID, err = flagUUID("set-uuid", f.setUUID); err != nil {
		return err
	}
	if f.o.UUID, err = flagUUID("uuid", f.uuid); err != nil {
		return err
	}
	if f.o.Replacement, err = parseReplacement(f.replacement); err != nil {
		return usageErrorf("--replacement: %w", err)
	}
	if f.writeback {
		f.o.CacheMode = ondisk.Writeback
	}
	if f.o.DiscardUnflushed && !f.force {
		return usageErrorf("--%s needs --%s too", unflushedFlag, forceFlag)
	}
	if f.force {
		f.o.Overwrite = offline.OverwriteAnything
	}
	return nil
}

func flagUUID(flag, s string) (u ondisk.UUID, err error) {
	if s == "" {
		return u, nil
	}
	if u, err = ondisk.ParseUUID(s); err != nil {
		return u, usageErrorf("--%s: %w", flag, err)
	}
	if u.IsZero() {
		return u, usageErrorf("--%s: all zero is no UUID", flag)
	}
	return u, nil
}

func parseReplacement(s string) (ondisk.Replacement, error) {
	for _, r := range []ondisk.Replacement{ondisk.LRU, ondisk.FIFO, ondisk.Random} {
		if s == r.String() {
			return r, nil
		}
	}
	return 0, fmt.Errorf("%q is no replacement policy: want lru, fifo or random", s)
}

// formatDevices opens the devices for itself alone and formats them.
func formatDevices(ctx context.Context, cache string, backing []string, o offline.FormatOptions) (made []offline.Formatted, err error) {
	paths := backing
	if cache != "" {
		paths = append([]string{cache}, backing...)
	}
	if err := noneTwice(paths); err != nil {
		return nil, err
	}
	if !o.DiscardUnflushed {
		dirs, err := runtimeDirs("")
		if err != nil {
			return nil, err
		}
		o.Unflushed = offline.ScanDirtyWith(dirs...)
	}
	for i, path := range paths {
		// No ring: the kernel takes one apart after the process has ended, and the lock goes only then.
		dev, openErr := blockdev.Open(path, blockdev.Options{Engine: blockdev.EnginePread})
		if errors.Is(openErr, blockdev.ErrBusy) {
			return nil, refusedErrorf("%w; end that first, no option overrides it. Nothing was written", openErr)
		}
		if openErr != nil {
			return nil, openErr
		}
		defer func() {
			if closeErr := dev.Close(); err == nil {
				err = closeErr
			}
		}()
		if i == 0 && cache != "" {
			o.Cache = dev
		} else {
			o.Backing = append(o.Backing, dev)
		}
	}
	return offline.Format(ctx, o)
}

// noneTwice refuses a device that is named twice, by whatever names.
func noneTwice(paths []string) error {
	var seen []unix.Stat_t
	for _, path := range paths {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return &os.PathError{Op: "open", Path: path, Err: err}
		}
		for j, s := range seen {
			same := s.Dev == st.Dev && s.Ino == st.Ino
			if s.Mode&unix.S_IFMT == unix.S_IFBLK && st.Mode&unix.S_IFMT == unix.S_IFBLK {
				same = s.Rdev == st.Rdev
			}
			if same {
				return usageErrorf("%s and %s are the same device", paths[j], path)
			}
		}
		seen = append(seen, st)
	}
	return nil
}

// formatFailure gives an error of Format its status. A refusal says how to override it, in the words of remedy.
func formatFailure(err error, remedy func(*offline.FormatRefusal) string) error {
	var all []error
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		all = j.Unwrap()
	} else {
		all = []error{err}
	}
	status := exitFailed
	var lines []string
	for _, err := range all {
		var refusal *offline.FormatRefusal
		var rule *offline.FormatRuleError
		var code *exitError
		switch {
		case errors.As(err, &refusal):
			status = exitRefused
			lines = append(lines, fmt.Sprintf("%v; to overwrite it, %s", err, remedy(refusal)))
			continue
		case errors.As(err, &rule) && rule.Device == "":
			status = max(status, exitUsage)
		case errors.As(err, &code):
			status = max(status, code.code)
		}
		lines = append(lines, err.Error())
	}
	return &exitError{status, errors.New(strings.Join(lines, "\n"))}
}

// permission names the options that allow what was refused.
func permission(r *offline.FormatRefusal) string {
	if r.NeedsDiscardUnflushed {
		return fmt.Sprintf("--%s and --%s, which gives up the unflushed data", forceFlag, unflushedFlag)
	}
	return "--" + forceFlag
}

// print says what was made.
func (f *formatFlags) print(w io.Writer, made []offline.Formatted) error {
	if f.json {
		type device struct {
			*offline.Shown
			Overwritten []offline.Signature `json:"overwritten"`
			Left        []offline.Signature `json:"left"`
		}
		out := struct {
			SetUUID ondisk.UUID `json:"set_uuid"`
			Devices []device    `json:"devices"`
		}{SetUUID: made[0].Super.SetUUID}
		for i := range made {
			m := &made[i]
			out.Devices = append(out.Devices, device{m.Shown(), append([]offline.Signature{}, m.Overwritten...), append([]offline.Signature{}, m.Left...)})
		}
		return writeJSON(w, out)
	}
	for i := range made {
		m := &made[i]
		role := "cache device"
		if m.Super.IsBacking() {
			role = "backing device"
		}
		fmt.Fprintf(w, "%s: %s\n%s", m.Device, role, makeBcacheText(m.Super))
		printMarks(w, m)
	}
	return nil
}

// printMarks says what a format has overwritten and what it has left.
func printMarks(w io.Writer, m *offline.Formatted) {
	for i := range m.Overwritten {
		fmt.Fprintf(w, "%s: overwritten: %v\n", m.Device, &m.Overwritten[i])
	}
	for i := range m.Left {
		fmt.Fprintf(w, "%s: still there, beyond the data offset: %v; other programs may take the device for that\n", m.Device, &m.Left[i])
	}
}
