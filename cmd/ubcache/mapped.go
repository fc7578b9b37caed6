package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/control"
	"github.com/ubcache/ubcache/internal/offline"
)

// runtimeDirFlag adds --runtime-dir to a command that reads a set at rest.
func runtimeDirFlag(cmd *cobra.Command, to *string) {
	cmd.Flags().Var(&onceValue{to: to}, "runtime-dir", "the `FOLDER` that \"ubcache serve\" had, where it may have left what it had acknowledged\n"+
		"when it was killed; default: /run/ubcache and $XDG_RUNTIME_DIR/ubcache")
}

const runtimeDirHelp = `If "ubcache serve" was killed, the last of what it had acknowledged is in its runtime folder (--runtime-dir), as long as
the machine has not been started anew. It is taken from there too, and standard error says so.`

// runtimeDirs returns the folders in which a process that served a set may have left something: the one that is given,
// else those that serve takes by itself.
func runtimeDirs(given string) (list []string, err error) {
	if given != "" {
		info, err := os.Stat(given)
		switch {
		case err != nil:
			return nil, usageErrorf("--runtime-dir: %w", err)
		case !info.IsDir():
			return nil, usageErrorf("--runtime-dir: %s is not a folder", given)
		}
		return []string{given}, nil
	}
	for _, dir := range control.Folders(os.Getenv) {
		if unix.Access(dir, unix.X_OK) == nil {
			list = append(list, dir)
		}
	}
	return list, nil
}

// noteMapped says what of a set was taken from a runtime folder, and what was not.
func noteMapped(env *environment, m *offline.Mapped) {
	if n := len(m.Entries); n > 0 {
		fmt.Fprintf(env.stderr, "%s: %d entries of the process that died, from %s\n", env.name, n, m.Path)
	}
	for _, err := range m.Unused {
		fmt.Fprintf(env.stderr, "%s: warning: %v; nothing is taken from it: writes that were acknowledged last may be missing\n", env.name, err)
	}
}
