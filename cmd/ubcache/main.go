// Command ubcache is a block cache in user space on bcache's on-disk format, with the tools for it.
//
// One file holds one subcommand. What they share: the environment and the list of commands (this file), exit
// statuses (exit.go), help texts, output and device flags (output.go, flags in names of roles), sizes (size.go).
// Called make-bcache or bcache-super-show, the program does what these do (names.go).
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// environment is what a command sees of the world besides devices. Tests make their own.
type environment struct {
	name           string // by which the program was called: args[0], its directory cut off
	stdin          io.Reader
	stdout, stderr io.Writer
}

func main() {
	os.Exit(run(&environment{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}, os.Args))
}

// run carries out one command line and returns the exit status. SIGINT and SIGTERM end the context that the
// command gets from cmd.Context; a second one kills the process, as if nobody had asked for signals.
func run(env *environment, args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)

	env.name = filepath.Base(args[0])
	out := &checkedWriter{w: env.stdout}
	env = &environment{name: env.name, stdin: env.stdin, stdout: out, stderr: env.stderr}
	var code int
	if old := oldName(env.name); old != nil {
		code = old(ctx, env, args[1:])
	} else {
		root := newRootCommand(env)
		root.SetArgs(markNegatives(args[1:]))
		code = report(env, root.ExecuteContext(ctx))
	}
	if code == exitDone && out.err != nil {
		return report(env, began(fmt.Errorf("standard output: %w", out.err)))
	}
	return code
}

// A checkedWriter remembers the first error of what it writes to, so that output which is lost is no success even
// where a command does not look at each write.
type checkedWriter struct {
	w   io.Writer
	err error
}

func (c *checkedWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	if c.err == nil {
		c.err = err
	}
	return n, err
}

// report prints an error the one way in which all commands do, and returns the exit status.
func report(env *environment, err error) int {
	if err == nil {
		return exitDone
	}
	code := exitStatus(err)
	if text := err.Error(); text != "" {
		fmt.Fprintf(env.stderr, "%s: %s\n", env.name, text)
	}
	return code
}

// newRootCommand makes the command with all subcommands.
func newRootCommand(env *environment) *cobra.Command {
	root := &cobra.Command{
		Use:   "ubcache COMMAND",
		Short: "A block cache in user space on bcache's on-disk format",
		Long: `ubcache puts an SSD in front of a slow or remote disk, on the very on-disk format of the kernel's bcache.
It serves volumes, and shows, checks and rescues bcache disks, those that the kernel wrote too.`,
		RunE:                       chooseCommand,
		Args:                       cobra.ArbitraryArgs,
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
	}
	describe(root, help{
		example: "ubcache format --cache /dev/nvme0n1p4 --backing /dev/sdb\nubcache check --cache /dev/nvme0n1p4 --backing /dev/sdb",
		exit: map[int]string{
			exitFailed: "failed, or errors were found", exitRefused: exitWords[exitRefused], exitPartial: exitWords[exitPartial],
		},
	})
	root.AddCommand(
		newFormatCommand(env),
		newShowCommand(env),
		newCatCommand(env),
		newCheckCommand(env),
		newDumpCommand(env),
		newServeCommand(env),
		newStatusCommand(env),
		newGetCommand(env),
		newSetCommand(env),
		newFlushCommand(env),
		newDetachCommand(env),
		newFlashCommand(env),
		newBenchCommand(env),
		newDemoCommand(env),
		newVersionCommand(env),
	)
	prepare(env, root)
	return root
}

// negativeMark stands before arguments that begin like negative numbers, so that they are not taken for options: no
// option is a digit.
const negativeMark = "\x00"

var negative = regexp.MustCompile(`^-[0-9.]`)

// markNegatives marks what looks like a negative number, but for values of options.
func markNegatives(args []string) []string {
	args = slices.Clone(args)
	for i := range args {
		if args[i] == "--" {
			break
		}
		if negative.MatchString(args[i]) && (i == 0 || !strings.HasPrefix(args[i-1], "--") || strings.Contains(args[i-1], "=")) {
			args[i] = negativeMark + args[i]
		}
	}
	return args
}

// chooseCommand is what a command that only has others below it does by itself.
func chooseCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usageErrorf("which command? See %s --help", cmd.CommandPath())
	}
	hint := ""
	if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
		hint = "; did you mean " + strings.Join(s, ", ") + "?"
	}
	return usageErrorf("unknown command %q%s", args[0], hint)
}

// prepare gives a command and those below it what all have in common: where they read and write, the layout of
// help, and that what goes wrong before they start to work is wrong usage.
func prepare(env *environment, cmd *cobra.Command) {
	cmd.SetIn(env.stdin)
	cmd.SetOut(env.stdout)
	cmd.SetErr(env.stderr)
	cmd.SetUsageTemplate(usageTemplate)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageErrorf("%w; see %s --help", err, cmd.CommandPath())
	})
	var each func(*cobra.Command)
	each = func(c *cobra.Command) {
		if valid := c.Args; valid != nil {
			c.Args = func(cmd *cobra.Command, args []string) error {
				for i := range args {
					args[i] = strings.TrimPrefix(args[i], negativeMark)
				}
				return valid(cmd, args)
			}
		}
		if c.RunE != nil {
			work := c.RunE
			c.RunE = func(cmd *cobra.Command, args []string) error { return began(work(cmd, args)) }
		}
		for _, sub := range c.Commands() {
			each(sub)
		}
	}
	each(cmd)
}
