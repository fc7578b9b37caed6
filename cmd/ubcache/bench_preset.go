package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ubcache/ubcache/internal/lab"
)

func presetNames() (names []string) {
	for _, f := range lab.Presets() {
		names = append(names, f.Name)
	}
	return names
}

// presetOptions are those that go with --preset.
var presetOptions = []string{"preset", "policy", "json", "html", "png", "seed"}

// runPreset makes an experiment of the field again, and writes the reports.
func (f *benchFlags) runPreset(cmd *cobra.Command, env *environment) (err error) {
	field, err := lab.FieldByName(f.preset)
	if err != nil {
		return usageErrorf("--preset: %w", err)
	}
	var others []string
	cmd.Flags().Visit(func(fl *pflag.Flag) {
		if !slices.Contains(presetOptions, fl.Name) {
			others = append(others, "--"+fl.Name)
		}
	})
	if len(others) > 0 {
		return usageErrorf("%s: with --preset there are only --policy, --json, --html, --png and --seed", strings.Join(others, ", "))
	}
	if cmd.Flags().Changed("seed") {
		field.Seed = f.setup.Seed
	}
	policies := lab.Policies
	if !slices.Equal(f.policies, []string{"all"}) {
		policies = f.policies
	}
	if len(policies) == 0 {
		return usageErrorf("no policy is given")
	}
	for i, p := range policies {
		switch {
		case !slices.Contains(lab.Policies, p):
			return usageErrorf("no policy %q: there are %s", p, strings.Join(lab.Policies, ", "))
		case slices.Contains(policies[:i], p):
			return usageErrorf("policy %s is given twice", p)
		}
	}
	var files reportFiles
	defer func() { err = errors.Join(err, files.abandon()) }()
	var report *lab.FieldReport
	err = f.addReports(&files, func(w io.Writer) error { return report.WriteJSON(w) }, func(w io.Writer) error { return report.WriteHTML(w) },
		func(w io.Writer) error { return report.WritePNG(w) })
	if err != nil {
		return err
	}
	p := newProgress(env, "bench gc", false)
	variants := max(len(field.Variants), 1)
	done, last := 0, ""
	report, err = lab.RunField(cmd.Context(), field, policies, func(x lab.FieldProgress) {
		what := strings.Join(strings.Fields(field.Name+" "+x.Policy+" "+x.Variant+" "+x.Stage), " ")
		if one := x.Policy + x.Variant; one != "" && one != last {
			done, last = done+1, one
		}
		share := float64(max(done-1, 0)) / float64(variants*len(policies)) // the fill is before the first
		p.say(fmt.Sprintf("%s, %d %%", what, x.Percent), what, share)
	})
	p.end()
	if report == nil || len(report.Rows) == 0 {
		if errors.Is(err, context.Canceled) {
			return partialErrorf("interrupted before anything was measured")
		}
		return err
	}
	werr := errors.Join(report.WriteText(env.stdout), files.write())
	if errors.Is(err, context.Canceled) {
		if werr != nil {
			return werr
		}
		return partialErrorf("interrupted: %d of %d runs were made", len(report.Rows), variants*len(policies))
	}
	return errors.Join(err, werr)
}
