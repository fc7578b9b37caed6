package main

import (
	"github.com/spf13/cobra"
)

// newVersionCommand makes "ubcache version".
func newVersionCommand(env *environment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version [--json]",
		Short: "Print the version, the format versions known, and what this kernel offers",
		Args:  wantArgs(0, 0, ""),
		RunE:  func(*cobra.Command, []string) error { return nil },
	}
	return describe(cmd, help{example: "ubcache version --json"})
}
