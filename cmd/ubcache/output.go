package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// help is what a command's --help says besides its flags and their defaults.
type help struct {
	long    string         // paragraphs; default: the Short of the command
	example string         // command lines, without indentation
	exit    map[int]string // what a status means here, where the usual words do not do; "" leaves it out
}

// The usual meanings of the statuses.
var exitWords = map[int]string{
	exitDone:    "done",
	exitFailed:  "failed",
	exitUsage:   "wrong usage; nothing was done",
	exitRefused: "refused to protect data; the message says which option overrides",
	exitPartial: "done in part; the message lists what was not",
}

const exitAnnotation = "exit status"

// describe composes the help of cmd, with an EXIT STATUS section. Statuses 0 to 2 are always listed, the others
// where h.exit has them.
func describe(cmd *cobra.Command, h help) *cobra.Command {
	if h.long != "" {
		cmd.Long = strings.TrimSpace(h.long)
	}
	if cmd.Long == "" {
		cmd.Long = cmd.Short + "."
	}
	cmd.Example = indent(h.example)
	cmd.DisableFlagsInUseLine = true
	var lines []string
	for code := exitDone; code <= exitPartial; code++ {
		text, own := h.exit[code]
		if !own && code > exitUsage || own && text == "" {
			continue
		}
		if !own {
			text = exitWords[code]
		}
		lines = append(lines, fmt.Sprintf("%d  %s", code, strings.ReplaceAll(text, "\n", "\n   ")))
	}
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[exitAnnotation] = indent(strings.Join(lines, "\n"))
	return cmd
}

func indent(s string) string {
	s = strings.TrimSpace(s)
	if s == "" {
		return ""
	}
	return "  " + strings.ReplaceAll(s, "\n", "\n  ")
}

// usageTemplate is cobra's, shortened, with EXIT STATUS at the end.
const usageTemplate = `USAGE
  {{if .HasAvailableSubCommands}}{{.CommandPath}} COMMAND [OPTIONS]{{else}}{{.UseLine}}{{end}}
{{- if .HasAvailableSubCommands}}

COMMANDS{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}
{{- if .HasAvailableLocalFlags}}

OPTIONS
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}
{{- if .HasExample}}

EXAMPLE
{{.Example}}{{end}}
{{- with index .Annotations "` + exitAnnotation + `"}}

EXIT STATUS
{{.}}{{end}}
{{- if .HasAvailableSubCommands}}

"{{.CommandPath}} COMMAND --help" says more about a command.{{end}}
`

// wantArgs accepts at least min and at most max arguments (max -1: any number), which what names.
func wantArgs(min, max int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < min && len(args) == 0:
			return usageErrorf("which %s? See %s --help", what, cmd.CommandPath())
		case len(args) < min:
			return usageErrorf("too few arguments: want %s; see %s --help", what, cmd.CommandPath())
		case max == 0 && len(args) > 0:
			return usageErrorf("unexpected argument %q; see %s --help", args[0], cmd.CommandPath())
		case max > 0 && len(args) > max:
			return usageErrorf("unexpected argument %q: want %s; see %s --help", args[max], what, cmd.CommandPath())
		}
		return nil
	}
}

// jsonFlag adds --json.
func jsonFlag(cmd *cobra.Command, to *bool) {
	cmd.Flags().BoolVar(to, "json", false, "print JSON")
}

// writeJSON prints v, indented. Text is not escaped for HTML.
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// A role is a way in which commands name a device.
type role int

const (
	roleCache      role = iota // --cache DEV, once
	roleBacking                // --backing DEV, repeated
	roleOneBacking             // the same, once
	roleFlash                  // --flash NAME, once
	roleVolume                 // --volume NAME=DEV, repeated
)

// A namedDevice is one --volume.
type namedDevice struct{ Name, Device string }

// deviceFlags are the devices that a command line names.
type deviceFlags struct {
	Cache   string
	Backing []string
	Flash   string
	Volumes []namedDevice

	RuntimeDir string // see runtimeDirs
}

// add gives cmd the flags for the roles it knows.
func (d *deviceFlags) add(cmd *cobra.Command, roles ...role) {
	f := cmd.Flags()
	for _, r := range roles {
		switch r {
		case roleCache:
			f.Var(&onceValue{to: &d.Cache}, "cache", "cache device `DEV`: a block device or a file")
		case roleBacking:
			f.StringArrayVar(&d.Backing, "backing", nil, "backing device `DEV`; may be repeated")
		case roleOneBacking:
			f.StringArrayVar(&d.Backing, "backing", nil, "backing device `DEV`")
		case roleFlash:
			f.Var(&onceValue{to: &d.Flash}, "flash", "flash-only volume `NAME`: its label, or its slot number")
		case roleVolume:
			f.Var(&volumesValue{&d.Volumes}, "volume", "serve backing device DEV as NAME, `NAME=DEV`; may be repeated")
		}
	}
}

// paths returns those of all devices that are named.
func (d *deviceFlags) paths() (list []string) {
	if d.Cache != "" {
		list = append(list, d.Cache)
	}
	list = append(list, d.Backing...)
	for _, v := range d.Volumes {
		list = append(list, v.Device)
	}
	return list
}

// onceValue is a text that may be given once and not be empty: the second would silently replace the first.
type onceValue struct {
	to  *string
	set bool
}

func (v *onceValue) Set(s string) error {
	if v.set {
		return fmt.Errorf("given twice (%s and %s)", *v.to, s)
	}
	if s == "" {
		return errors.New("is empty")
	}
	*v.to, v.set = s, true
	return nil
}

func (v *onceValue) String() string {
	if v.to == nil {
		return ""
	}
	return *v.to
}
func (v *onceValue) Type() string { return "string" }

type volumesValue struct{ to *[]namedDevice }

func (v *volumesValue) Set(s string) error {
	name, dev, ok := strings.Cut(s, "=")
	if !ok || name == "" || dev == "" {
		return fmt.Errorf("%q is not NAME=DEV", s)
	}
	if slices.ContainsFunc(*v.to, func(n namedDevice) bool { return n.Name == name }) {
		return fmt.Errorf("the name %q is given twice", name)
	}
	*v.to = append(*v.to, namedDevice{name, dev})
	return nil
}

func (v *volumesValue) String() string {
	if v.to == nil || len(*v.to) == 0 {
		return ""
	}
	var s []string
	for _, n := range *v.to {
		s = append(s, n.Name+"="+n.Device)
	}
	return strings.Join(s, " ")
}
func (v *volumesValue) Type() string { return "NAME=DEV" }
