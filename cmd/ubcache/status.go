package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/control"
)

// statusLimit is how long a daemon may take to say how it is.
const statusLimit = 10 * time.Second

// newStatusCommand makes "ubcache status".
func newStatusCommand(env *environment) *cobra.Command {
	var asJSON bool
	var socket string
	cmd := &cobra.Command{
		Use:   "status [--json] [--socket PATH]",
		Short: "Show what a running daemon serves, and how that goes",
		Args:  wantArgs(0, 0, ""),
		RunE:  func(cmd *cobra.Command, _ []string) error { return status(cmd.Context(), env, socket, asJSON) },
	}
	jsonFlag(cmd, &asJSON)
	socketFlag(cmd, &socket)
	return describe(cmd, help{
		long: `
Show the cache set, each volume, and the sum over the volumes. It takes milliseconds, whatever the size of the cache.
Counters begin with the daemon. They are exact; sizes are in bytes, with a rounded figure in brackets.

Of the buckets of the cache device, those that are available can be reused without writing anything back: they are
empty or ready, or all that is in them is on the backing devices too. The others are in use. Dirty data is cached data
that is not on the backing devices yet.

A volume of the set that has dirty data, and whose backing device the daemon was not given, is shown as LEFT OUT: do not
use that device without its cache. Writes in writeback mode that went to the backing device at once are counted by
reason: too much of the cache was in use, or no bucket had room.

Of a volume in writeback mode, or with dirty data, it shows how fast that goes back: the rate in bytes a second, the
target of dirty data that it is to bring about, and what the rate was made of when it was last worked out: the
proportional part, for the distance from the target, the integral part, for how long there has been one, and its
change. The last job is the last flush or detach that was asked for.

Of the set it shows what requests have waited for, each wait of more than 100 µs by its cause: how often, how long in
all, and the longest. Waits for the devices to do what was asked of them count too: on a slow disk, each request that
goes there.

A read request that is only partly in the cache is a miss. Requests that are kept out of the cache are not in the hit
ratio; they are counted as bypassed, by reason. "-" stands for what is not known: the ratio while there were no
requests, and figures that a daemon of another version does not tell.

With --json the output is one object. Names of its fields stay; new ones may be added.`,
		example: "ubcache status\nubcache status --json | jq .total.cache.hit_ratio_percent",
		exit:    map[int]string{exitFailed: "no daemon answers, or the set has stopped because its metadata could not be written"},
	})
}

// socketFlag adds --socket.
func socketFlag(cmd *cobra.Command, to *string) {
	cmd.Flags().Var(&onceValue{to: to}, "socket", "the daemon's control socket `PATH`; default: $UBCACHE_SOCKET, else\n"+
		"/run/ubcache/control.sock, else $XDG_RUNTIME_DIR/ubcache/control.sock")
}

// dialDaemon finds the daemon.
func dialDaemon(ctx context.Context, socket string) (*control.Client, error) {
	c, err := control.Dial(ctx, control.Sockets(socket, os.Getenv))
	if err != nil {
		return nil, fmt.Errorf("%w; \"ubcache serve\" starts one, --socket says where it is", err)
	}
	return c, nil
}

func status(ctx context.Context, env *environment, socket string, asJSON bool) error {
	ctx, cancel := context.WithTimeout(ctx, statusLimit)
	defer cancel()
	c, err := dialDaemon(ctx, socket)
	if err != nil {
		return err
	}
	defer c.Close()
	s, raw, err := c.StatusJSON(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		err = writeJSON(env.stdout, raw) // as it came, with what this version does not know
	} else {
		printStatus(env.stdout, s)
	}
	if err == nil && s.Set.Failed != "" {
		return fmt.Errorf("the set has stopped: %s", s.Set.Failed)
	}
	return err
}

// printStatus writes a status for people.
func printStatus(w io.Writer, s *control.Status) {
	up := time.Since(s.Started).Truncate(time.Second)
	fmt.Fprintf(w, "ubcache %s, process %d, up %v\n", s.Version, s.PID, max(up, 0))
	p := printer{w}
	p.set(&s.Set)
	for i := range s.Volumes {
		p.volume(&s.Volumes[i])
	}
	volumes := "volumes"
	if len(s.Volumes) == 1 {
		volumes = "volume"
	}
	fmt.Fprintf(w, "\ntotal of %d %s\n", len(s.Volumes), volumes)
	p.counters(&s.Total, "in the cache alone")
}

// A printer writes lines of one figure each.
type printer struct{ w io.Writer }

func (p printer) line(label string, figure any, note string) {
	s := fmt.Sprintf("  %-28s %20v  %s", label, figure, note)
	fmt.Fprintln(p.w, strings.TrimRight(s, " "))
}

func (p printer) bytes(label string, n control.Number, note string) {
	if v, ok := n.Value(); ok && v >= 1024 {
		note = strings.TrimSpace("(" + roundSize(v) + ")  " + note)
	}
	p.line(label+", bytes", n, note)
}

func (p printer) set(s *control.Set) {
	fmt.Fprintf(p.w, "\ncache set %s\n", s.UUID)
	if s.Failed != "" {
		fmt.Fprintf(p.w, "  STOPPED: %s\n", s.Failed)
	}
	b := &s.Buckets
	note := ""
	if size, ok := s.BucketBytes.Value(); ok {
		note = "of " + formatSize(size)
		if n, ok := b.Total.Value(); ok && size > 0 && n < 1<<62/size {
			note += " (" + roundSize(n*size) + " in all)"
		}
	}
	p.line("buckets", b.Total, note)
	p.line("buckets available", b.Available, share(b.Available, b.Total)+"can be reused without writing anything back")
	p.line("  empty", b.Empty, "nothing in them")
	p.line("  clean", b.Clean, "all that is in them is on the backing devices too")
	p.line("  ready", b.Ready, "prepared for the next data")
	inUse := difference(b.Total, b.Available)
	p.line("buckets in use", inUse, share(inUse, b.Total))
	p.line("  dirty", b.Dirty, "some that is in them is not on the backing devices yet")
	p.line("  metadata", b.Metadata, "index, generations, list of volumes")
	p.line("  pinned", b.Pinned, "requests are at work in them")
	p.line("  superblock and journal", b.Fixed, "")
	p.line("  suspect", b.Suspect, "put aside until they are verified")
	p.bytes("cached data", s.CachedBytes, "dirty data included")
	p.bytes("dirty data", s.DirtyBytes, "not on the backing devices yet")
	for i := range s.Absent {
		a := &s.Absent[i]
		p.bytes("LEFT OUT: slot "+a.Slot.String(), a.DirtyBytes, fmt.Sprintf("dirty, of uuid %s label %q, which is not complete without them", a.UUID, a.Label))
	}
	p.line("index: nodes in memory", s.Btree.Nodes, "")
	p.bytes("index: memory", s.Btree.Bytes, "")
	p.line("index: nodes read", s.Btree.Reads, "")
	p.line("index: nodes written", s.Btree.Appends.Plus(s.Btree.Rewrites), fmt.Sprintf("%v appended to, %v rewritten, %v splits", s.Btree.Appends, s.Btree.Rewrites, s.Btree.Splits))
	p.line("index: nodes coalesced", s.Btree.Coalesced, fmt.Sprintf("%v rewritten for what was stale in them, in %v sweeps", s.Btree.Stale, s.Btree.Sweeps))
	p.line("journal: entries written", s.Journal.Entries, fmt.Sprintf("with %v keys", s.Journal.Keys))
	p.bytes("journal: written", s.Journal.Bytes, "")
	p.line("clean buckets evicted", s.Evicted, "")
	p.bytes("dirty data moved together", s.MovedBytes, fmt.Sprintf("which emptied %v buckets of it", s.MovedBuckets))
	p.line("no bucket was ready", s.NoBucket, "times")
	if n, _ := s.Discarded.Value(); n > 0 {
		p.bytes("empty buckets discarded", s.DiscardedBytes, "")
	}
	if n, _ := s.DiscardErrors.Value(); n > 0 {
		p.line("discards that failed", s.DiscardErrors, "")
	}
	p.collection(&s.Collection)
	p.stalls(s.Stalls)
	p.line("counts verified", s.Verified, "times")
	p.line("counts found wrong", s.Mismatches, "each is an error of this program; no data is lost by it")
}

// collection writes what collection has done, if that is more than nothing.
func (p printer) collection(c *control.Collection) {
	if c.Policy == "" {
		return // a daemon that does not tell
	}
	now := ""
	if c.Running {
		now = "a collection is under way"
	}
	p.line("gc policy", c.Policy, now)
	if n, _ := c.Count.Value(); n == 0 {
		return
	}
	p.line("  collections", c.Count, fmt.Sprintf("the last took %v ms, the longest %v ms", c.Last, c.Longest))
	p.line("  index held", c.Holds, fmt.Sprintf("times, the longest %s: requests waited", microseconds(c.LongestHold)))
	if n, _ := c.Differences.Value(); n > 0 {
		p.line("  differences", c.Differences, "from the exact counts: each is an error of this program; no data is lost by it")
	}
}

// stalls writes what requests have waited for, as far as they have.
func (p printer) stalls(s map[string]control.Stall) {
	if s == nil {
		return // a daemon that does not tell
	}
	sum := control.Num(0)
	for _, w := range s {
		sum = sum.Plus(w.Count)
	}
	of := "of requests, by cause:"
	if n, ok := sum.Value(); ok && n == 0 {
		of = "of requests"
	}
	p.line("waits of more than 100 µs", sum, of)
	for _, cause := range slices.Sorted(maps.Keys(s)) {
		w := s[cause]
		if n, ok := w.Count.Value(); ok && n == 0 {
			continue
		}
		p.line("  "+strings.ReplaceAll(cause, "_", " "), w.Count, fmt.Sprintf("%s in all, the longest %s", microseconds(w.Total), microseconds(w.Max)))
	}
}

// microseconds writes how long that is.
func microseconds(n control.Number) string {
	v, ok := n.Value()
	if !ok {
		return "-"
	}
	d := time.Duration(min(v, math.MaxInt64/1000)) * time.Microsecond
	if d >= time.Second {
		d = d.Round(time.Millisecond)
	}
	return d.String()
}

// share writes which part of b a is: "(87.50 %)  ", or nothing where that is not known.
func share(a, b control.Number) string {
	x, ok := a.Value()
	y, also := b.Value()
	if !ok || !also || x < 0 || y <= 0 {
		return ""
	}
	return fmt.Sprintf("(%.2f %%)  ", float64(x)/float64(y)*100)
}

// difference is a - b, known if both are.
func difference(a, b control.Number) control.Number {
	x, ok := a.Value()
	y, also := b.Value()
	if !ok || !also {
		return control.Number{}
	}
	return control.Num(x - y)
}

func (p printer) volume(v *control.Volume) {
	fmt.Fprintf(p.w, "\nvolume %s\n", v.Name)
	p.bytes("size", v.SizeBytes, "")
	p.line("cache mode", orDash(v.Mode), "")
	note := ""
	if v.Flash {
		note = "its data is nowhere else"
	}
	p.line("state", orDash(v.State), note)
	p.line("connections", v.Connections, "")
	for _, uri := range v.NBD {
		fmt.Fprintf(p.w, "  %s\n", uri)
	}
	if v.Job != nil {
		p.job(v.Job)
	}
	if w := v.Writeback; w != nil {
		dirty, _ := v.DirtyBytes.Value()
		if v.Mode == "writeback" || dirty > 0 || w.Draining || w.Detaching {
			p.writeback(w)
		}
	}
	note = "not on the backing device yet"
	if v.Flash {
		note = "nowhere else"
	}
	p.counters(&v.Counters, note)
}

// job writes how the last job of a volume is.
func (p printer) job(j *control.Job) {
	p.line("last job", j.Kind+" "+j.State, j.Error)
	if j.State == control.Running {
		p.bytes("  dirty at its start", j.DirtyAtStart, "")
	}
}

// writeback writes how dirty data goes back.
func (p printer) writeback(w *control.Writeback) {
	how, note := "at its rate", ""
	switch {
	case !w.Running && !w.Draining:
		how, note = "frozen", "writeback_running is 0: dirty data stays"
	case w.Detaching:
		how, note = "detaching", "as fast as it goes; no data is added to the cache"
	case w.Draining:
		how, note = "flushing", "as fast as it goes"
	case w.AtMax:
		how, note = "idle", "as fast as it goes, since nobody uses the set"
	}
	p.line("writeback", how, note)
	p.bytes("  rate", w.Rate, "a second")
	p.bytes("  target", w.Target, "of dirty data")
	p.bytes("  dirty", w.Dirty, "when the rate was last worked out")
	p.bytes("  proportional", w.Proportional, "a second")
	p.bytes("  integral", w.Integral, "a second")
	p.bytes("  change of the rate", w.Change, "a second")
	p.line("  next write in", w.NextIO, "milliseconds")
	p.line("  extents written back", w.KeysDone, "")
	p.line("  not made clean", w.KeysFailed, "they were written to meanwhile")
	p.line("  errors", w.Errors, "data that could not be read or written stays dirty")
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func (p printer) counters(c *control.Counters, dirty string) {
	p.bytes("dirty data", c.DirtyBytes, dirty)
	r := &c.Requests
	p.line("reads", r.Reads, "")
	p.bytes("  read", r.ReadBytes, "")
	p.line("writes", r.Writes, "")
	p.bytes("  written", r.WrittenBytes, "")
	p.line("flushes", r.Flushes, "")
	p.line("discards", r.Discards, "")
	p.line("writes of zeroes", r.Zeroes, "")
	ratio := "-"
	if h := c.Cache.HitRatio(); h != nil {
		ratio = fmt.Sprintf("%.2f %%", *h)
	}
	p.line("hit ratio", ratio, "of reads that were not bypassed")
	p.line("  hits", c.Cache.Hits, "")
	p.line("  misses", c.Cache.Misses, "one that is partly in the cache is a miss")
	p.line("misses not kept: written to", c.Cache.MissCollisions, "")
	p.line("misses not kept: no room", c.Cache.FillsSkipped, "")
	p.line("reads repeated", c.Cache.ReadRaces, "their bucket was reused meanwhile")
	p.line("read errors of the cache", c.Cache.ReadErrors, "")
	p.line("write errors of the cache", c.Cache.WriteErrors, "")
	p.line("writes without room", c.Cache.NoRoom, "in the cache, for all or some of it")
	for _, reason := range slices.Sorted(maps.Keys(c.Declined)) {
		p.line("not written back: "+strings.ReplaceAll(reason, "_", " "), c.Declined[reason], "writes in writeback mode that went to the backing device at once")
	}
	p.line("writes that waited", c.Cache.Waits, "until what they overwrite was durably invalid")
	b := &c.Bypassed
	p.line("bypassed reads, cached", b.ReadHits, "")
	p.line("bypassed reads, not cached", b.ReadMisses, "")
	p.bytes("bypassed", b.Bytes, "")
	for _, reason := range slices.Sorted(maps.Keys(b.ByReason)) {
		p.line("bypassed: "+strings.ReplaceAll(reason, "_", " "), b.ByReason[reason], "requests")
	}
}

// roundSize writes a size with one digit after the point: 1.5 MiB.
func roundSize(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if i == 0 {
		return fmt.Sprintf("%d %s", n, units[0])
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}
