package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/control"
)

const (
	jobAtOnce = 250 * time.Millisecond // a job that ends in that time need not be waited for
	jobPoll   = 200 * time.Millisecond // how often the daemon is asked how far a job is
)

// jobFlags are what a command line of "ubcache flush" or "detach" says.
type jobFlags struct {
	kind         string // of control.Job
	wait, cancel bool
	timeout      time.Duration
	asJSON       bool
	socket       string
}

// newFlushCommand makes "ubcache flush".
func newFlushCommand(env *environment) *cobra.Command {
	o := &jobFlags{kind: control.Flush}
	return describe(o.command(env, "Write the dirty data of a volume back to its backing device"), help{
		long: `
Write back what is dirty of a volume that a running daemon serves: all that is so when the flush begins, as fast as the
backing device takes it. The volume is served meanwhile, and what is written to it then may stay dirty.

Without --wait the flush goes on in the daemon; the command says so and ends. With it the command waits, and shows how
much is left. A flush ends by itself; --cancel ends it earlier, and then dirty data goes back at its usual rate again.
Data that the backing device does not take stays dirty, and all else is written back.

` + jobHelp,
		example: "ubcache flush data\nubcache flush data --wait --timeout 10m",
		exit: map[int]string{
			exitFailed:  "no daemon answers, a detach of the volume runs, the flush failed as a whole or was cancelled; or Ctrl-C\nended the waiting, not the flush",
			exitUsage:   "wrong usage, or no such volume; nothing was done",
			exitPartial: "some data could not be written back, its ranges are listed; or the time is over",
		},
	})
}

// newDetachCommand makes "ubcache detach".
func newDetachCommand(env *environment) *cobra.Command {
	o := &jobFlags{kind: control.Detach}
	return describe(o.command(env, "Write all dirty data of a volume back, and serve it without a cache from then on"), help{
		long: `
Detach a volume that a running daemon serves from its cache set. No data is added to the cache any more, and what is
dirty is written back as fast as the backing device takes it. When nothing is dirty the backing device gets the state
none and forgets the set: all data is on it, and it can be used without the cache. The daemon serves the volume on, from
the backing device alone; the next start attaches it again.

Without --wait the detach goes on in the daemon; the command says so and ends. With it the command waits, and shows how
much is left. Until the detach is done --cancel gives it up, and the volume is as before. A detach that meets data which
the backing device does not take ends, the data stays dirty, and the volume attached.

` + jobHelp,
		example: "ubcache detach data --wait\nubcache detach data --cancel",
		exit: map[int]string{
			exitFailed:  "no daemon answers, the volume is not attached, a flush of it runs, the detach failed as a whole or was\ncancelled; or Ctrl-C ended the waiting, not the detach",
			exitUsage:   "wrong usage, or no such volume; nothing was done",
			exitPartial: "some data could not be written back, its ranges are listed; or the time is over",
		},
	})
}

const jobHelp = `A volume has one such job at a time: the same command again finds the one that runs. It does not end with the command
that began it, but the end of the daemon cancels it. "ubcache status" shows it too. Offsets and lengths of ranges are in
bytes of the volume.

With --json the output is the job as the daemon tells it (docs/control.md).`

// command makes the command of a kind of job.
func (o *jobFlags) command(env *environment, short string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   o.kind + " VOLUME [--wait [--timeout TIME] | --cancel] [--json] [--socket PATH]",
		Short: short,
		Args:  wantArgs(1, 1, "volume"),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.cancel && o.wait:
				return usageErrorf("--wait or --cancel, not both")
			case cmd.Flags().Changed("timeout") && !o.wait:
				return usageErrorf("--timeout limits --wait, which is missing")
			case cmd.Flags().Changed("timeout") && o.timeout <= 0:
				return usageErrorf("--timeout %v: must be above 0", o.timeout)
			}
			return o.run(cmd.Context(), env, args[0])
		},
		ValidArgsFunction: completeVolumes(&o.socket),
	}
	f := cmd.Flags()
	f.BoolVar(&o.wait, "wait", false, "wait for the end")
	f.DurationVar(&o.timeout, "timeout", 0, "wait no longer than `TIME`, such as 30s or 10m (default: no limit)")
	f.BoolVar(&o.cancel, "cancel", false, "end the "+o.kind+" that runs")
	jsonFlag(cmd, &o.asJSON)
	socketFlag(cmd, &o.socket)
	return cmd
}

// completeVolumes completes the name of a volume, from what the running daemon says.
func completeVolumes(socket *string) cobra.CompletionFunc {
	objects := completeAttributes(socket, false)
	return func(cmd *cobra.Command, args []string, to string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		list, directive := objects(cmd, nil, to)
		return slices.DeleteFunc(list, func(s string) bool { return s == "set" || s == "cache" }), directive
	}
}

func (o *jobFlags) run(ctx context.Context, env *environment, volume string) error {
	c, err := dialDaemon(ctx, o.socket)
	if err != nil {
		return err
	}
	defer c.Close()
	if o.cancel {
		return usageOf(o.end(ctx, env, c, volume))
	}
	j, err := c.StartJob(ctx, volume, o.kind)
	if o.kind == control.Detach && o.wait && errors.Is(err, control.ErrNotAttached) {
		// The detach to wait for may be over.
		if last, lerr := c.Job(ctx, volume); lerr == nil && last.Kind == control.Detach && last.State == control.Done {
			return o.report(env, volume, last)
		}
	}
	if err != nil {
		return usageOf(err)
	}
	if o.wait {
		return o.follow(ctx, env, c, volume, j)
	}
	for begin := time.Now(); j.State == control.Running && time.Since(begin) < jobAtOnce; {
		if err := sleep(ctx, jobAtOnce/10); err != nil {
			break
		}
		if j, err = o.again(ctx, c, volume, j); err != nil {
			return err
		}
	}
	return o.report(env, volume, j)
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// again asks how far a job is.
func (o *jobFlags) again(ctx context.Context, c *control.Client, volume string, j *control.Job) (*control.Job, error) {
	now, err := c.Job(ctx, volume)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s of %s: how it goes is not known any more: %w", o.kind, volume, err)
	case !now.Started.Equal(j.Started) || now.Kind != j.Kind:
		return nil, fmt.Errorf("%s of %s: it has ended, and somebody has begun a %s since", o.kind, volume, now.Kind)
	}
	return now, nil
}

// follow waits for the end of a job, and shows what is left.
func (o *jobFlags) follow(ctx context.Context, env *environment, c *control.Client, volume string, j *control.Job) error {
	limit := ctx
	if o.timeout > 0 {
		var cancel context.CancelFunc
		limit, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	bar := newProgress(env, volume, true)
	defer bar.end()
	most, _ := j.DirtyAtStart.Value()
	for j.State == control.Running {
		left, known := j.DirtyBytes.Value()
		if known {
			most = max(most, left)
			bar.left(left, most)
		}
		if sleep(limit, jobPoll) == nil {
			now, err := o.again(limit, c, volume, j)
			if err == nil {
				j = now
				continue
			}
			if limit.Err() == nil {
				return err
			}
		}
		bar.end()
		goesOn := fmt.Sprintf("%s bytes are dirty; the %s goes on: \"ubcache %[2]s %s --wait\" waits for its end, --cancel ends it", j.DirtyBytes, o.kind, volume)
		if o.asJSON {
			if err := writeJSON(env.stdout, j); err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s of %s: interrupted; %s", o.kind, volume, goesOn)
		}
		return partialErrorf("%s of %s: not done in %v; %s", o.kind, volume, o.timeout, goesOn)
	}
	bar.end()
	return o.report(env, volume, j)
}

// end cancels the job that runs.
func (o *jobFlags) end(ctx context.Context, env *environment, c *control.Client, volume string) error {
	j, err := c.Job(ctx, volume)
	if errors.Is(err, control.ErrNoJob) || err == nil && (j.Kind != o.kind || j.State != control.Running) {
		return fmt.Errorf("no %s of %s is running", o.kind, volume)
	}
	if err == nil {
		j, err = c.CancelJob(ctx, volume)
	}
	if err != nil {
		return err
	}
	if j.State != control.Cancelled { // it was done before
		return o.report(env, volume, j)
	}
	if o.asJSON {
		return writeJSON(env.stdout, j)
	}
	note := "dirty data goes back at its usual rate"
	switch {
	case o.kind == control.Detach:
		note = "the volume is attached, as before"
	case frozen(ctx, c, volume):
		note = "dirty data stays, since writeback_running is 0"
	}
	fmt.Fprintf(env.stdout, "%s: %s cancelled, %s; %s\n", volume, o.kind, dirtyText(j), note)
	return nil
}

// frozen reports whether dirty data of a volume does not go back by itself.
func frozen(ctx context.Context, c *control.Client, volume string) bool {
	s, err := c.Status(ctx)
	if err != nil {
		return false
	}
	i := slices.IndexFunc(s.Volumes, func(v control.Volume) bool { return v.Name == volume })
	return i >= 0 && s.Volumes[i].Writeback != nil && !s.Volumes[i].Writeback.Running
}

// report prints how a job is, and returns what that means for the command.
func (o *jobFlags) report(env *environment, volume string, j *control.Job) error {
	if o.asJSON {
		if err := writeJSON(env.stdout, j); err != nil {
			return err
		}
	}
	say := func(format string, args ...any) {
		if !o.asJSON {
			fmt.Fprintf(env.stdout, volume+": "+format+"\n", args...)
		}
	}
	switch j.State {
	case control.Running:
		say("%s in progress, %s; \"ubcache %[1]s %[3]s --wait\" waits for its end, \"ubcache status\" shows how it goes", o.kind, dirtyText(j), volume)
		return nil
	case control.Done:
		if o.kind == control.Detach {
			say("detached; it is served without a cache")
		} else {
			say("flushed; %s", writtenText(j))
		}
		return nil
	case control.Cancelled:
		return fmt.Errorf("%s of %s: it was cancelled; %s", o.kind, volume, dirtyText(j))
	}
	if len(j.Ranges) == 0 {
		return fmt.Errorf("%s of %s: %s; %s", o.kind, volume, j.Error, dirtyText(j))
	}
	attached := ""
	if o.kind == control.Detach {
		attached = "; the volume is still attached"
	}
	if !o.asJSON {
		fmt.Fprintf(env.stdout, "%s: could not be written back, and stays dirty:\n", volume)
		for _, r := range j.Ranges {
			fmt.Fprintf(env.stdout, "  offset %d length %d\n", r.Offset, r.Length)
		}
	}
	return partialErrorf("%s of %s: %s; %s%s", o.kind, volume, j.Error, dirtyText(j), attached)
}

// writtenText says what is dirty after a flush.
func writtenText(j *control.Job) string {
	if n, ok := j.DirtyBytes.Value(); ok && n > 0 {
		return strings.Replace(dirtyText(j), " are dirty", " were written meanwhile", 1)
	}
	return dirtyText(j)
}

// dirtyText says how much is dirty.
func dirtyText(j *control.Job) string {
	n, ok := j.DirtyBytes.Value()
	switch {
	case ok && n == 0:
		return "nothing is dirty"
	case ok && n >= 1024:
		return fmt.Sprintf("%d bytes are dirty (%s)", n, roundSize(n))
	}
	return j.DirtyBytes.String() + " bytes are dirty"
}
