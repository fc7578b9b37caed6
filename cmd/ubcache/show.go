package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
)

// newShowCommand makes "ubcache show".
func newShowCommand(env *environment) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show DEV... [--json]",
		Short: "Show superblocks of both kinds",
		Args:  wantArgs(1, -1, "device"),
		RunE: func(_ *cobra.Command, args []string) error {
			return show(env, args, asJSON)
		},
	}
	jsonFlag(cmd, &asJSON)
	return describe(cmd, help{
		long: `
Show the superblocks of cache and backing devices: the lines of bcache-super-show, then sizes in bytes, what follows
from the fields, and every rule that is broken. The fields of a superblock that is damaged, or of a version that is
not known, are shown as they are. It only reads, and does not mind who has the device in use.

With --json the output is an array with one object for each device, in which every field is found.`,
		example: "ubcache show /dev/nvme0n1p4 /dev/sdb",
		exit:    map[int]string{exitFailed: "a device cannot be read, has no superblock, or has one that is refused"},
	})
}

// shownError stands in the JSON for a device of which there is nothing to show.
type shownError struct {
	Device string `json:"device"`
	Error  string `json:"error"`
}

func show(env *environment, paths []string, asJSON bool) error {
	out := []any{}
	failed := false
	for i, path := range paths {
		s, err := showDevice(path)
		if err != nil {
			failed = true
			out = append(out, shownError{path, err.Error()})
			fmt.Fprintf(env.stderr, "%s: %v\n", env.name, err)
			continue
		}
		out = append(out, s)
		failed = failed || s.Refused()
		if asJSON {
			continue
		}
		if len(paths) > 1 {
			if i > 0 {
				fmt.Fprintln(env.stdout)
			}
			fmt.Fprintf(env.stdout, "%s:\n", path)
		}
		if s.Super == nil {
			fmt.Fprintf(env.stderr, "%s: %s: no bcache superblock at byte 4096\n", env.name, path)
			continue
		}
		fmt.Fprint(env.stdout, s.Text())
		if s.Refused() {
			fmt.Fprintf(env.stderr, "%s: %s: the superblock is refused: %s\n", env.name, path, s.Problems[0].Message)
		}
	}
	if asJSON {
		if err := writeJSON(env.stdout, out); err != nil {
			return err
		}
	}
	if failed {
		return silentError(exitFailed)
	}
	return nil
}

func showDevice(path string) (*offline.Shown, error) {
	dev, err := blockdev.Open(path, blockdev.Options{ReadOnly: true, NoLock: true})
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	s, err := offline.Show(dev)
	if err != nil {
		return nil, fmt.Errorf("show %s: %w", path, err)
	}
	return s, nil
}
