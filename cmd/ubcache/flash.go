package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/control"
	"github.com/ubcache/ubcache/internal/daemon"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// flashFlags are what a command line of "ubcache flash" says besides its words.
type flashFlags struct {
	devices       deviceFlags // the cache alone; empty: the running daemon is asked
	socket        string
	asJSON, force bool
}

// newFlashCommand makes "ubcache flash".
func newFlashCommand(env *environment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "flash COMMAND",
		Short: "Make, grow, delete and list flash-only volumes",
		Args:  cobra.ArbitraryArgs,
		RunE:  chooseCommand,
	}
	cmd.AddCommand(newFlashCreateCommand(env), newFlashGrowCommand(env), newFlashDeleteCommand(env), newFlashListCommand(env))
	return describe(cmd, help{
		long: `
A flash-only volume has no backing device: its data lies in the cache alone, takes space there until it is discarded or
the volume is deleted, and is lost with the cache device. Its size is a limit, not a reservation.

` + flashHelp,
		example: "ubcache flash create scratch 10GiB\nubcache flash list",
		exit:    flashExits,
	})
}

const flashHelp = `The running daemon does it, and serves what was made at once. With --cache the set on DEV, which nobody serves, is
opened for it, and closed again. NAME is a volume's label, or its slot number where no label is the same.`

var flashExits = map[int]string{
	exitFailed:  "no daemon answers, or it could not be done",
	exitUsage:   "wrong usage, no such volume, or a size that cannot be; nothing was done",
	exitRefused: "refused: clients are connected to the volume, or the cache device is in use",
}

// add gives cmd the flags that say which set.
func (o *flashFlags) add(cmd *cobra.Command) {
	o.devices.add(cmd, roleCache)
	socketFlag(cmd, &o.socket)
	cmd.Flags().Var(&onceValue{to: &o.devices.RuntimeDir}, "runtime-dir", "with --cache: the `FOLDER` that \"ubcache serve\" had; default: as there")
}

// check finds what makes no sense together.
func (o *flashFlags) check() error {
	switch {
	case o.devices.Cache != "" && o.socket != "":
		return usageErrorf("--cache names a set that nobody serves, --socket a daemon: not both")
	case o.devices.Cache == "" && o.devices.RuntimeDir != "":
		return usageErrorf("--runtime-dir is of use with --cache only")
	}
	return nil
}

const flashSynopsis = " [--cache DEV [--runtime-dir FOLDER] | --socket PATH] [--json]"

// newFlashCreateCommand makes "ubcache flash create".
func newFlashCreateCommand(env *environment) *cobra.Command {
	o := &flashFlags{}
	cmd := &cobra.Command{
		Use:   "create NAME SIZE" + flashSynopsis,
		Short: "Make a flash-only volume",
		Args:  wantArgs(2, 2, "name and size"),
		RunE: func(cmd *cobra.Command, args []string) error {
			size, err := flashSize(args[1])
			if err == nil {
				err = o.check()
			}
			if err != nil {
				return err
			}
			if err := daemon.CheckFlashLabel(args[0]); err != nil {
				return usageErrorf("%w", err)
			}
			return o.change(cmd.Context(), env, "created", func(ctx context.Context, c *control.Client) (*control.FlashVolume, error) {
				return c.CreateFlash(ctx, args[0], size)
			}, func(ctx context.Context, f daemon.Flash) (*control.FlashVolume, error) {
				return f.Create(ctx, args[0], size)
			})
		},
	}
	o.add(cmd)
	jsonFlag(cmd, &o.asJSON)
	return describe(cmd, help{
		long: `
Make a flash-only volume of SIZE bytes, which reads as zeroes. NAME is its label, of at most 32 bytes, and the name under
which the daemon serves it; digits alone would name a slot. After a restart of the daemon it is served only if "ubcache serve"
is given --flash NAME.

` + flashHelp,
		example: "ubcache flash create scratch 10GiB\nubcache flash create scratch 10GiB --cache /dev/nvme0n1p4",
		exit:    flashExits,
	})
}

// newFlashGrowCommand makes "ubcache flash grow".
func newFlashGrowCommand(env *environment) *cobra.Command {
	o := &flashFlags{}
	cmd := &cobra.Command{
		Use:   "grow NAME SIZE" + flashSynopsis,
		Short: "Make a flash-only volume larger",
		Args:  wantArgs(2, 2, "name and size"),
		RunE: func(cmd *cobra.Command, args []string) error {
			size, err := flashSize(args[1])
			if err == nil {
				err = o.check()
			}
			if err != nil {
				return err
			}
			return o.change(cmd.Context(), env, "grown", func(ctx context.Context, c *control.Client) (*control.FlashVolume, error) {
				return c.GrowFlash(ctx, args[0], size)
			}, func(ctx context.Context, f daemon.Flash) (*control.FlashVolume, error) {
				return f.Grow(ctx, args[0], size)
			})
		},
	}
	o.add(cmd)
	jsonFlag(cmd, &o.asJSON)
	return describe(cmd, help{
		long: `
Make a flash-only volume SIZE bytes large in all; what is new reads as zeroes. A volume does not shrink. Connections that
exist go on with the size that they were told, new ones are told the new one.

` + flashHelp,
		example: "ubcache flash grow scratch 20GiB",
		exit:    flashExits,
	})
}

// newFlashDeleteCommand makes "ubcache flash delete".
func newFlashDeleteCommand(env *environment) *cobra.Command {
	o := &flashFlags{}
	cmd := &cobra.Command{
		Use:   "delete NAME [--force]" + flashSynopsis,
		Short: "Delete a flash-only volume and all that is in it",
		Args:  wantArgs(1, 1, "name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			return o.change(cmd.Context(), env, "deleted", func(ctx context.Context, c *control.Client) (*control.FlashVolume, error) {
				return c.DeleteFlash(ctx, args[0], o.force)
			}, func(ctx context.Context, f daemon.Flash) (*control.FlashVolume, error) {
				return f.Delete(ctx, args[0])
			})
		},
	}
	cmd.Flags().BoolVar(&o.force, "force", false, "also while clients are connected: their connections end")
	o.add(cmd)
	jsonFlag(cmd, &o.asJSON)
	return describe(cmd, help{
		long: `
Delete a flash-only volume. All data in it is lost, and its space is free again. While clients are connected to it this is
refused, unless --force is given. Printed is what the volume was.

` + flashHelp,
		example: "ubcache flash delete scratch",
		exit:    flashExits,
	})
}

// newFlashListCommand makes "ubcache flash list".
func newFlashListCommand(env *environment) *cobra.Command {
	o := &flashFlags{}
	cmd := &cobra.Command{
		Use:   "list" + flashSynopsis,
		Short: "List flash-only volumes",
		Args:  wantArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			list, err := o.list(cmd.Context(), env)
			switch {
			case err != nil:
				return err
			case o.asJSON:
				return writeJSON(env.stdout, list)
			}
			for i := range list {
				fmt.Fprintln(env.stdout, flashText(&list[i]))
			}
			return nil
		},
	}
	o.add(cmd)
	jsonFlag(cmd, &o.asJSON)
	return describe(cmd, help{
		long: `
List the flash-only volumes of the set, those too that are not served: slot, label, size, and how much they hold, which is
nowhere else. With --cache the set on DEV, which nobody serves, is read, and not changed.`,
		example: "ubcache flash list\nubcache flash list --cache /dev/nvme0n1p4 --json",
		exit: map[int]string{
			exitFailed:  flashExits[exitFailed],
			exitRefused: "refused: the cache device is in use",
		},
	})
}

func flashSize(s string) (int64, error) {
	n, err := parseSize(s)
	if err == nil && n == 0 {
		err = errors.New("a size of 0")
	}
	if err != nil {
		return 0, usageErrorf("%w", err)
	}
	return n, nil
}

// change lets the daemon do something, or does it to the set at rest, and prints the volume.
func (o *flashFlags) change(
	ctx context.Context, env *environment, what string, ask func(context.Context, *control.Client) (*control.FlashVolume, error),
	do func(context.Context, daemon.Flash) (*control.FlashVolume, error),
) error {
	var v *control.FlashVolume
	work := func() (err error) {
		if o.devices.Cache == "" {
			return withDaemon(ctx, o.socket, func(ctx context.Context, c *control.Client) error {
				v, err = ask(ctx, c)
				return err
			})
		}
		// No ring: see formatDevices.
		c := daemon.Config{Cache: o.devices.Cache, RuntimeDir: o.devices.RuntimeDir, Engine: blockdev.EnginePread, Log: newLogger(env.stderr)}
		return daemon.FlashAtRest(ctx, c, func(f daemon.Flash) error {
			v, err = do(ctx, f)
			return err
		})
	}
	err := work()
	switch {
	case errors.Is(err, control.ErrConnected):
		return refusedErrorf("%w: give --force", err)
	case err != nil:
		return usageOf(inUseError(err))
	case o.asJSON:
		return writeJSON(env.stdout, v)
	}
	fmt.Fprintf(env.stdout, "%s: %s\n", what, flashText(v))
	return nil
}

// inUseError says what to do about a device that somebody else has.
func inUseError(err error) error {
	if errors.Is(err, blockdev.ErrBusy) {
		return refusedErrorf("%w; if \"ubcache serve\" has it, leave --cache out", err)
	}
	return err
}

// flashText is a volume on one line.
func flashText(v *control.FlashVolume) string {
	s := fmt.Sprintf("slot %v", v.Slot)
	if v.Label != "" {
		s += fmt.Sprintf(" label %q", v.Label)
	}
	s += fmt.Sprintf(": %v bytes", v.SizeBytes)
	if n, ok := v.SizeBytes.Value(); ok && n >= 1024 {
		s += " (" + roundSize(n) + ")"
	}
	s += fmt.Sprintf(", holds %v", v.DirtyBytes)
	if v.Volume != "" {
		s += fmt.Sprintf(", served as %s, %v connections %s", v.Volume, v.Connections, strings.Join(v.NBD, " "))
	}
	return strings.TrimSpace(s)
}

// list asks the daemon, or reads the set at rest.
func (o *flashFlags) list(ctx context.Context, env *environment) (list []control.FlashVolume, err error) {
	if o.devices.Cache == "" {
		err = withDaemon(ctx, o.socket, func(ctx context.Context, c *control.Client) error {
			list, err = c.FlashVolumes(ctx)
			return err
		})
		return list, err
	}
	open, err := openDevices(env, &o.devices)
	if err != nil {
		return nil, inUseError(err)
	}
	defer open.Close()
	set, err := offline.Open(ctx, open.cache, offline.Options{RuntimeDirs: open.runtimeDirs})
	noteMapped(env, &set.Mapped)
	if err != nil {
		return nil, errors.Join(atRestError(err), set.Close())
	}
	defer set.Close()
	held := map[uint32]int64{}
	for i := range set.Extents {
		if e := &set.Extents[i]; e.Live() && e.Dirty() {
			held[e.Inode] += int64(e.Size) * ondisk.SectorSize
		}
	}
	list = []control.FlashVolume{}
	for i := range set.Slots {
		if e := &set.Slots[i]; e.FlashOnly() && !e.Unused() && !e.Retired() {
			list = append(list, control.FlashVolume{
				Slot: control.Num(i), Label: e.LabelString(), SizeBytes: control.Num(int64(e.Sectors) * ondisk.SectorSize), DirtyBytes: control.Num(held[uint32(i)]),
			})
		}
	}
	return list, nil
}
