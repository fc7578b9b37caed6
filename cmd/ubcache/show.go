package main

import "github.com/spf13/cobra"

// newShowCommand makes "ubcache show".
func newShowCommand(env *environment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show DEV...",
		Short: "Show superblocks of both kinds",
		Args:  wantArgs(1, -1, "device"),
		RunE:  func(*cobra.Command, []string) error { return usageErrorf("not ready yet") },
	}
	return describe(cmd, help{})
}
