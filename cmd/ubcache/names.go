package main

import "context"

// oldName returns what the program does when it is called by the name of one of bcache-tools' programs, or nil.
func oldName(name string) func(ctx context.Context, env *environment, args []string) int {
	return nil
}
