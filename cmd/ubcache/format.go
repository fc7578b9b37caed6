package main

import "github.com/spf13/cobra"

// newFormatCommand makes "ubcache format".
func newFormatCommand(env *environment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "format [--cache DEV] [--backing DEV]...",
		Short: "Make the superblocks of a cache set",
		Args:  wantArgs(0, 0, ""),
		RunE:  func(*cobra.Command, []string) error { return usageErrorf("not ready yet") },
	}
	return describe(cmd, help{})
}
