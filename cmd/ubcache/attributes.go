package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/control"
)

const (
	attributesLimit = time.Minute            // for a daemon to answer
	completionLimit = 500 * time.Millisecond // the same, while somebody waits with a finger on the tab key
)

const attributeNames = `OBJECT is set, cache, or the name of a volume. ATTR is what the kernel calls it in its sysfs: of a volume, in
/sys/block/bcacheN/bcache; of set, in /sys/fs/bcache/UUID; of cache, in the cache device's folder bcache. Values have
the kernel's form: 4.0M rounds, a list has the active word in brackets. A name that does not exist is answered with
those that do.`

// newGetCommand makes "ubcache get".
func newGetCommand(env *environment) *cobra.Command {
	var asJSON bool
	var socket string
	cmd := &cobra.Command{
		Use:   "get OBJECT [ATTR] [--json] [--socket PATH]",
		Short: "Show attributes of the set, the cache or a volume",
		Args:  wantArgs(1, 2, "object, and perhaps an attribute"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withDaemon(cmd.Context(), socket, func(ctx context.Context, c *control.Client) error {
				if len(args) == 1 {
					return getAll(ctx, env, c, args[0], asJSON)
				}
				return getOne(ctx, env, c, args[0], args[1], asJSON)
			})
		},
		ValidArgsFunction: completeAttributes(&socket, false),
	}
	jsonFlag(cmd, &asJSON)
	socketFlag(cmd, &socket)
	return describe(cmd, help{
		long: `
Show one attribute of a running daemon as its bare value, or all attributes of an object, each with its name.

` + attributeNames + `

With --json the output is an object with name and value, or an array of those, which also say what can be set.`,
		example: "ubcache get data cache_mode\nubcache get set",
		exit:    attributeExits,
	})
}

// newSetCommand makes "ubcache set".
func newSetCommand(env *environment) *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use:   "set OBJECT ATTR VALUE [--socket PATH]",
		Short: "Change an attribute of the set, the cache or a volume",
		Args:  wantArgs(3, 3, "object, attribute and value"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withDaemon(cmd.Context(), socket, func(ctx context.Context, c *control.Client) error {
				value, err := c.SetAttribute(ctx, args[0], args[1], args[2])
				if err == nil && value != "" {
					fmt.Fprintln(env.stdout, strings.TrimSuffix(value, "\n"))
				}
				return err
			})
		},
		ValidArgsFunction: completeAttributes(&socket, true),
	}
	socketFlag(cmd, &socket)
	return describe(cmd, help{
		long: `
Change one attribute of a running daemon, and print the value that it has then. Attributes that do something, such as
detach, do it whatever the value, as with the kernel.

` + attributeNames + ` So is a value that the attribute does not take.`,
		example: "ubcache set data cache_mode writearound\nubcache set data sequential_cutoff 0",
		exit:    attributeExits,
	})
}

var attributeExits = map[int]string{
	exitFailed: "no daemon answers, or it could not do it",
	exitUsage:  "wrong usage, or no such object, attribute or value; nothing was done",
}

// withDaemon lets fn ask the daemon. What the daemon says is wrong with names and values is wrong usage.
func withDaemon(ctx context.Context, socket string, fn func(context.Context, *control.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, attributesLimit)
	defer cancel()
	c, err := dialDaemon(ctx, socket)
	if err != nil {
		return err
	}
	defer c.Close()
	return usageOf(fn(ctx, c))
}

// usageOf gives what the daemon says is wrong with names and values the status of wrong usage.
func usageOf(err error) error {
	for _, usage := range []error{control.ErrNoObject, control.ErrNoAttribute, control.ErrReadOnly, control.ErrValue, control.ErrNoVolume} {
		if errors.Is(err, usage) {
			return usageErrorf("%w", err)
		}
	}
	return err
}

// namedValue is an attribute in the JSON of "get".
type namedValue struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func getOne(ctx context.Context, env *environment, c *control.Client, object, name string, asJSON bool) error {
	value, err := c.Attribute(ctx, object, name)
	if err != nil {
		return err
	}
	if asJSON {
		return writeJSON(env.stdout, namedValue{name, value})
	}
	fmt.Fprintln(env.stdout, strings.TrimSuffix(value, "\n"))
	return nil
}

func getAll(ctx context.Context, env *environment, c *control.Client, object string, asJSON bool) error {
	list, err := c.Attributes(ctx, object)
	if err != nil {
		return err
	}
	if asJSON {
		return writeJSON(env.stdout, list)
	}
	for _, a := range list {
		value := strings.TrimSuffix(a.Value, "\n")
		switch {
		case value == "":
			fmt.Fprintf(env.stdout, "%s:\n", a.Name)
		case strings.Contains(value, "\n"):
			fmt.Fprintf(env.stdout, "%s:\n%s\n", a.Name, indentText(value))
		default:
			fmt.Fprintf(env.stdout, "%s: %s\n", a.Name, value)
		}
	}
	return nil
}

// completeAttributes completes OBJECT ATTR, and with values also what a list attribute takes, from what the running
// daemon says. Nobody who cannot be asked at once is waited for.
func completeAttributes(socket *string, values bool) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(context.Background(), completionLimit)
		defer cancel()
		c, err := control.Dial(ctx, control.Sockets(*socket, os.Getenv))
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		defer c.Close()
		var list []cobra.Completion
		switch {
		case len(args) == 0:
			list, _ = c.Objects(ctx)
		case len(args) == 1:
			attributes, _ := c.Attributes(ctx, args[0])
			for _, a := range attributes {
				if a.Writable || !values {
					first, _, _ := strings.Cut(a.Value, "\n")
					list = append(list, cobra.CompletionWithDesc(a.Name, first))
				}
			}
		case len(args) == 2 && values:
			value, _ := c.Attribute(ctx, args[0], args[1])
			list = listWords(value)
		}
		return list, cobra.ShellCompDirectiveNoFileComp
	}
}

// listWords returns the words of a list attribute, which has one of them in brackets; nil if value is no list.
func listWords(value string) []string {
	words, active := strings.Fields(value), 0
	for i, w := range words {
		if len(w) > 2 && w[0] == '[' && w[len(w)-1] == ']' {
			words[i] = w[1 : len(w)-1]
			active++
		}
	}
	if active != 1 || len(words) < 2 {
		return nil
	}
	return words
}
