package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/ubcache/ubcache/internal/offline"
)

// newCatCommand makes "ubcache cat".
func newCatCommand(env *environment) *cobra.Command {
	var devices deviceFlags
	cmd := &cobra.Command{
		Use:   "cat [--cache DEV [--runtime-dir FOLDER]] (--backing DEV | --flash NAME)",
		Short: "Write the content of a volume to standard output",
		Args:  wantArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case len(devices.Backing)+btoi(devices.Flash != "") != 1:
				return usageErrorf("which volume? Give one --backing DEV or one --flash NAME")
			case devices.Cache == "" && devices.Flash != "":
				return usageErrorf("a flash-only volume lies on a cache device: give --cache DEV too")
			}
			if f := env.outputFile(); f != nil && term.IsTerminal(int(f.Fd())) {
				return usageErrorf("standard output is a terminal: send it to a file or a program")
			}
			return cat(cmd, env, &devices)
		},
	}
	devices.add(cmd, roleCache, roleOneBacking, roleFlash)
	runtimeDirFlag(cmd, &devices.RuntimeDir)
	return describe(cmd, help{
		long: `
Write what a reader of the volume would see - backing device and cache together, the journal replayed - to standard
output, byte for byte. The devices are at rest, and only read.

` + runtimeDirHelp + `

The cache device may be left out for a backing device that is not attached to any (state none or stale).

Where a part cannot be read, or the index of the cache is damaged so that nobody knows what belongs there, zeroes are
written in its place, and the parts are listed on standard error.`,
		example: "ubcache cat --cache /dev/nvme0n1p4 --backing /dev/sdb > volume.img",
		exit: map[int]string{
			exitRefused: "refused: what could be given might be old data",
			exitPartial: "some parts could not be read; they are listed, and zeroes stand in their place",
		},
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func cat(cmd *cobra.Command, env *environment, d *deviceFlags) error {
	if err := checkOutput(env, d); err != nil {
		return err
	}
	defer endSoon(cmd.Context(), env)()
	open, err := openDevices(env, d)
	if err != nil {
		return err
	}
	defer open.Close()
	v, release, err := openVolume(cmd.Context(), env, &open, d)
	defer release()
	if err != nil {
		return atRestError(err)
	}
	bar := newProgress(env, v.Info().Name, true)
	bad, err := offline.Copy(cmd.Context(), env.stdout, v, offline.CopyOptions{Progress: bar.set})
	bar.end()
	if len(bad) > 0 {
		fmt.Fprintf(env.stderr, "%s: could not be read, and is zeroes in the output:\n", v.Info().Name)
		total := listRanges(env.stderr, bad)
		if err == nil {
			return partialErrorf("%d of %d bytes could not be read", total, v.Info().Size)
		}
	}
	return err
}
