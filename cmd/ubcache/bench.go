package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/lab"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// newBenchCommand makes "ubcache bench".
func newBenchCommand(env *environment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench COMMAND",
		Short: "Measure",
		RunE:  chooseCommand,
		Args:  cobra.ArbitraryArgs,
	}
	cmd.AddCommand(newBenchGCCommand(env))
	return describe(cmd, help{example: "ubcache bench gc --policy exact,classic --runtime 20s --html report.html"})
}

// benchFlags are the options of bench gc.
type benchFlags struct {
	setup            lab.Setup
	policies         []string
	runtime, gcEvery time.Duration
	attributes       []string

	latLog       string
	logAverageMs int
	logMax       bool

	json, html, png string
	preset          string

	devices          deviceFlags
	dir              string
	force, unflushed bool
}

// newBenchGCCommand makes "ubcache bench gc".
func newBenchGCCommand(env *environment) *cobra.Command {
	f := benchFlags{setup: lab.Defaults()}
	s := &f.setup
	cmd := &cobra.Command{
		Use:   "gc [OPTIONS]",
		Short: "Measure what each policy of garbage collection costs the requests that meet it",
		Args:  wantArgs(0, 0, ""),
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.run(cmd, env) },
	}
	fl := cmd.Flags()
	fl.StringSliceVar(&f.policies, "policy", []string{"all"}, "policies, a `LIST`: all, or some of "+strings.Join(lab.Policies, ", "))
	fl.Var(&sizeValue{to: &s.CacheBytes, least: 1 << 20}, "cache-size", "`SIZE` of the cache device")
	fl.Var(&sizeValue{to: &s.BackingBytes, least: 1 << 20}, "backing-size", "`SIZE` of the backing device's data")
	fl.Var(&sizeValue{to: &s.RangeBytes, least: 1 << 20}, "range", "`SIZE` of the part of the volume that is loaded (default: 25 % of the cache, so that what is\nwritten stays there; at most the backing size)")
	fl.Var(&sizeValue{to: &s.BucketBytes, least: 1}, "bucket", "bucket `SIZE`, a power of two; nodes of the index are no larger")
	fl.StringVar(&s.RW, "rw", s.RW, "`LOAD`: randwrite, randrw (half reads), or randread")
	bs := int64(s.BlockBytes)
	fl.Var(&sizeValue{to: &bs, least: 512}, "bs", "`SIZE` of a request")
	fl.IntSliceVar(&s.Depths, "iodepth", s.Depths, "requests under way at a time, a `LIST`; each is measured by itself")
	fl.DurationVar(&f.runtime, "runtime", time.Duration(s.Runtime), "how long each window is, a `TIME`: there is one without and one with collection")
	fl.IntVar(&s.Rounds, "rounds", s.Rounds, "`NUMBER` of rounds, in each of which each policy has its turn")
	fl.DurationVar(&f.gcEvery, "gc-every", time.Duration(s.GCEvery), "force a collection every `TIME`, if none runs")
	fl.IntVar(&s.Nodes, "nodes", s.Nodes, "fill until the index has this `NUMBER` of nodes, too (default: until as much was written\nas the cache is large)")
	fl.Var(&sizeValue{to: &s.NodeCache, least: 1 << 20}, "node-cache", "keep at most `SIZE` of the index in memory")
	fl.StringArrayVar(&f.attributes, "attribute", nil, "set an attribute before the fill, `OBJECT.NAME=VALUE`; OBJECT is set, cache or volume; may be repeated")
	fl.Uint64Var(&s.Seed, "seed", s.Seed, "seed of the sequence of blocks, a `NUMBER`")
	fl.StringVar(&f.latLog, "lat-log", "", "write fio's latency logs, one a window, PREFIX-POLICY-qdDEPTH-rROUND-gc_lat.1.log (or -nogc), to `PREFIX`")
	fl.IntVar(&f.logAverageMs, "log-avg-ms", 0, "in these logs, a line for each `NUMBER` of milliseconds with the mean, as fio's log_avg_msec\n(default: a line for each request)")
	fl.BoolVar(&f.logMax, "log-max", false, "the greatest instead of the mean, as fio's log_max_value")
	fl.StringVar(&f.json, "json", "", "write all that was measured to `FILE` as JSON, times in seconds, sizes in bytes")
	fl.StringVar(&f.html, "html", "", "write a page with charts to `FILE`, which needs nothing from elsewhere")
	fl.StringVar(&f.png, "png", "", "write the charts to `FILE` as a picture")
	fl.StringVar(&f.preset, "preset", "", "make an experiment again that was reported of the kernel, in simulated time: `NAME` is\n"+strings.Join(presetNames(), ", ")+".\nOf the other options it takes --policy, --json, --html, --png and --seed")
	f.devices.add(cmd, roleCache, roleOneBacking)
	fl.StringVar(&f.dir, "dir", "", "use files in `FOLDER`, made for each round and removed after it")
	fl.StringVar(&s.DeviceModel, "device-model", "", "make the devices as slow as `MODEL` says, on top of what they are: nvme, ssd, hdd, network,\nor CACHE,BACKING for a different one each")
	fl.BoolVar(&f.force, forceFlag, false, "overwrite what is on the devices, but not unflushed data")
	fl.BoolVar(&f.unflushed, unflushedFlag, false, "together with --force: also where there is, or may be, data that only the cache has")
	work := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		s.BlockBytes = int(min(bs, 1<<30))
		return work(cmd, args)
	}
	return describe(cmd, help{
		long: `
Format a set, fill it with random writes in writeback mode, and measure a load on it twice, one right after the other: without
collection, and with collection forced every few seconds. Do so with every policy in turn, in several rounds, forwards and
backwards, each time with a fresh set, so that drift of the machine hits all alike. Then print, for each policy and depth, IOPS
and latencies of both windows, their ratio as the median over the rounds with its range, the collections, the longest
time without a completion, and what requests waited for. Every read is checked: wrong data is a failure.

The policies are the attribute gc_policy. exact, the default, has no collections: what is forced there is a sweep of the whole
index, with the maintenance that it leads to, and a pass of the verifier. How much it did is printed too.

The requests come from a generator inside the process, on the same queue that an NBD connection has. The journal entry that
is not on the disk yet is kept in memory, as "serve" does.

The devices are memory, of which only what is written is taken; with --dir, files; or with --cache and --backing, real ones: these
are formatted before every round, and WHAT THEY HOLD IS LOST. Devices that carry something are refused, as "format" does.

With --preset it is one of the experiments that were reported of the kernel instead, with the devices as models and metadata
alone stored: the engine is the same, and time is simulated. The report has each figure that was reported beside ours. A
policy takes up to twenty minutes, and up to 16 GB of memory.

An interruption (Ctrl-C, SIGTERM) prints the report of what was measured by then.`,
		example: `
ubcache bench gc --policy exact,classic,paced --runtime 20s --html report.html --png report.png
ubcache bench gc --bucket 8k --nodes 1500 --rw randrw --iodepth 128 --device-model nvme,network
ubcache bench gc --preset field-375g --policy classic,paced,exact --png field-375g.png
ubcache bench gc --policy exact --rounds 1 --lat-log /tmp/gc --log-avg-ms 100 --log-max`,
		exit: map[int]string{
			exitFailed: "failed, or wrong data was read; what was measured before is printed", exitRefused: exitWords[exitRefused],
			exitPartial: "interrupted; what was measured by then is printed",
		},
	})
}

// mostLogAverage is a day, in milliseconds.
const mostLogAverage = 24 * 60 * 60 * 1000

// fill completes the setup, and says what is wrong with the options.
func (f *benchFlags) fill(cmd *cobra.Command) error {
	s := &f.setup
	if !slices.Equal(f.policies, []string{"all"}) {
		s.Policies = f.policies
	}
	s.Runtime, s.GCEvery = lab.Duration(f.runtime), lab.Duration(f.gcEvery)
	for _, a := range f.attributes {
		where, value, ok := strings.Cut(a, "=")
		object, name, dot := strings.Cut(where, ".")
		if !ok || !dot || name == "" || !slices.Contains([]string{"set", "cache", lab.VolumeName}, object) {
			return usageErrorf("--attribute %s: want OBJECT.NAME=VALUE, where OBJECT is set, cache or %s", a, lab.VolumeName)
		}
		if where == "set.gc_policy" { // each round sets its own
			return usageErrorf("--attribute %s: --policy says which policies are measured", a)
		}
		s.Attributes = append(s.Attributes, lab.Attribute{Object: object, Name: name, Value: value})
	}
	switch {
	case f.logAverageMs < 0 || f.logAverageMs > mostLogAverage:
		return usageErrorf("--log-avg-ms %d: want 0 to %d", f.logAverageMs, mostLogAverage)
	case (f.logAverageMs > 0 || f.logMax) && f.latLog == "":
		return usageErrorf("--log-avg-ms and --log-max are for --lat-log")
	case f.logMax && f.logAverageMs == 0:
		return usageErrorf("--log-max needs --log-avg-ms")
	case (f.devices.Cache == "") != (len(f.devices.Backing) == 0):
		return usageErrorf("--cache and --backing go together")
	case len(f.devices.Backing) > 1:
		return usageErrorf("--backing is given twice")
	case f.real() && f.dir != "":
		return usageErrorf("either --dir, or --cache and --backing")
	case f.real() && (cmd.Flags().Changed("cache-size") || cmd.Flags().Changed("backing-size")):
		return usageErrorf("devices have the size they have: --cache-size and --backing-size are for files and memory")
	case !f.real() && (f.force || f.unflushed):
		return usageErrorf("--%s and --%s are for --cache and --backing", forceFlag, unflushedFlag)
	case f.unflushed && !f.force:
		return usageErrorf("--%s needs --%s too", unflushedFlag, forceFlag)
	}
	if s.DeviceModel != "" {
		if _, _, err := lab.Models(s.DeviceModel); err != nil {
			return usageErrorf("--device-model: %w", err)
		}
	}
	if f.real() {
		var err error
		if s.CacheBytes, err = deviceSize(f.devices.Cache); err == nil {
			s.BackingBytes, err = deviceSize(f.devices.Backing[0])
		}
		if err != nil {
			return err
		}
	}
	s.DefaultRange()
	if err := s.Check(); err != nil {
		return usageErrorf("%w", err)
	}
	return nil
}

func (f *benchFlags) real() bool { return f.devices.Cache != "" }

// run measures, and writes the reports.
func (f *benchFlags) run(cmd *cobra.Command, env *environment) (err error) {
	ctx := cmd.Context()
	if f.preset != "" {
		return f.runPreset(cmd, env)
	}
	if err := f.fill(cmd); err != nil {
		return err
	}
	var files reportFiles
	defer func() { err = errors.Join(err, files.abandon()) }()
	var result *lab.Result
	err = f.addReports(&files, func(w io.Writer) error { return result.WriteJSON(w) }, func(w io.Writer) error { return result.WriteHTML(w) },
		func(w io.Writer) error { return result.WritePNG(w) })
	if err != nil {
		return err
	}
	if f.latLog != "" {
		probe, err := os.CreateTemp(filepath.Dir(f.latLog), "ubcache-bench-") // not found out after a fill
		if err != nil {
			return fmt.Errorf("--lat-log %s: %w", f.latLog, err)
		}
		if err := errors.Join(probe.Close(), os.Remove(probe.Name())); err != nil {
			return err
		}
	}
	c := lab.Config{RT: rt.New()}
	c.Log = f.log(c.RT)
	var release func() error
	if c.RuntimeDir, release, err = benchRuntimeDir(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	if c.Open, err = f.opener(ctx); err != nil {
		return err
	}
	c.Setup = f.setup

	p := newProgress(env, "bench gc", false)
	windows := time.Duration(2 * c.Rounds * len(c.Policies) * len(c.Depths))
	fmt.Fprintf(env.stderr, "%d windows of %v, %v without the fills; Ctrl-C ends it with what was measured by then\n",
		windows, f.runtime, windows*f.runtime)
	c.Progress = func(x lab.Progress) { p.say(x.Line(), x.Stage+x.Policy, x.Share()) }
	result, err = lab.Measure(ctx, c)
	p.end()
	if result == nil {
		return err
	}
	if len(result.Rows) > 0 {
		werr := result.WriteText(env.stdout)
		err = errors.Join(err, werr, files.write())
	}
	var rule *offline.FormatRuleError
	switch {
	case errors.As(err, &rule):
		return withStatus(exitUsage, err)
	case err == nil && result.Partial && len(result.Rows) == 0:
		return partialErrorf("interrupted before anything was measured")
	case err == nil && result.Partial:
		whole, part := result.Windows()
		if part {
			return partialErrorf("interrupted: %d of %d windows were measured, and a part of another", whole, windows)
		}
		return partialErrorf("interrupted: %d of %d windows were measured", whole, windows)
	}
	return err
}

// addReports prepares the files that were asked for: each its own, and none that is a device.
func (f *benchFlags) addReports(files *reportFiles, json, html, png func(w io.Writer) error) error {
	type use struct{ option, path string }
	var uses []use
	for _, path := range append([]string{f.devices.Cache}, f.devices.Backing...) {
		if path != "" {
			uses = append(uses, use{"a device", path})
		}
	}
	for _, r := range []struct {
		option, path string
		write        func(w io.Writer) error
	}{{"--json", f.json, json}, {"--html", f.html, html}, {"--png", f.png, png}} {
		if r.path == "" {
			continue
		}
		for _, u := range uses {
			if sameFile(r.path, u.path) {
				return usageErrorf("%s %s: that is %s, too", r.option, r.path, u.option)
			}
		}
		uses = append(uses, use{r.option, r.path})
		if err := files.add(r.path, r.write); err != nil {
			return fmt.Errorf("%s: %w", r.option, err)
		}
	}
	return nil
}

// sameFile reports whether two paths are of the same file, there or yet to be made. What is no file, as /dev/null, may be
// written to twice.
func sameFile(a, b string) bool {
	x, aerr := os.Stat(a)
	y, berr := os.Stat(b)
	if aerr == nil && berr == nil {
		return os.SameFile(x, y) && x.Mode()&(os.ModeCharDevice|os.ModeNamedPipe) == 0
	}
	return aerr != nil && berr != nil && place(a) == place(b)
}

// place is where a file would be made.
func place(path string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err != nil {
		return path // it cannot be made
	}
	return filepath.Join(dir, filepath.Base(path))
}

// log makes the maker of latency logs, nil if there are none to be.
func (f *benchFlags) log(r *rt.Runtime) func(lab.LogName) (*lab.LatLog, error) {
	if f.latLog == "" {
		return nil
	}
	return func(n lab.LogName) (*lab.LatLog, error) {
		kind := "nogc"
		if n.Collecting {
			kind = "gc"
		}
		w, err := os.Create(fmt.Sprintf("%s-%s-qd%d-r%d-%s_lat.1.log", f.latLog, n.Policy, n.Depth, n.Round, kind))
		if err != nil {
			return nil, err
		}
		return lab.NewLatLog(r, w, lab.LogOptions{Average: time.Duration(f.logAverageMs) * time.Millisecond, Max: f.logMax})
	}
}

// opener chooses the devices, and completes what the setup says of them. Real ones are formatted once, so that they are refused
// before anything is measured.
func (f *benchFlags) opener(ctx context.Context) (open lab.Opener, err error) {
	s := &f.setup
	switch {
	case f.real():
		cache, backing := f.devices.Cache, f.devices.Backing[0]
		o := offline.FormatOptions{Bucket: s.BucketBytes, CacheMode: ondisk.Writeback, DiscardUnflushed: f.unflushed}
		if f.force {
			o.Overwrite = offline.OverwriteAnything
		}
		if _, err := formatDevices(ctx, cache, []string{backing}, o); err != nil {
			return nil, formatFailure(err, func(r *offline.FormatRefusal) string { return "use " + permission(r) })
		}
		s.Devices, open = cache+" and "+backing, lab.RealDevices(cache, backing)
	case f.dir != "":
		if st, err := os.Stat(f.dir); err != nil {
			return nil, err
		} else if !st.IsDir() {
			return nil, fmt.Errorf("%s is no folder", f.dir)
		}
		s.Devices, open = "files in "+f.dir, lab.FileDevices(f.dir, s.CacheBytes, s.BackingBytes)
	default:
		open = lab.MemoryDevices(s.CacheBytes, s.BackingBytes)
	}
	if s.DeviceModel != "" {
		cache, backing, err := lab.Models(s.DeviceModel)
		if err != nil {
			return nil, err
		}
		open = lab.Delayed(open, cache, backing)
	}
	return open, nil
}

// deviceSize opens a device to see its size, in bytes; it does not care who else has it open.
func deviceSize(path string) (int64, error) {
	dev, err := blockdev.Open(path, blockdev.Options{ReadOnly: true, NoLock: true})
	if err != nil {
		return 0, err
	}
	return dev.Info().Size, dev.Close()
}

// benchRuntimeDir makes a folder for what the daemon keeps in its own: in memory, where there is such a place.
func benchRuntimeDir() (dir string, release func() error, err error) {
	for _, parent := range []string{os.Getenv("XDG_RUNTIME_DIR"), "/dev/shm", os.TempDir()} {
		if parent == "" {
			continue
		}
		if dir, err = os.MkdirTemp(parent, "ubcache-bench-"); err == nil {
			return dir, func() error { return os.RemoveAll(dir) }, nil
		}
	}
	return "", nil, err
}

// reportFiles are files that reports go to in the end. They are made beside their places at once, so that what cannot be written
// is found out before hours of measuring, and what was there stays until there is something new.
type reportFiles []*reportFile

type reportFile struct {
	path  string
	f     *os.File
	part  string // its name until it is whole; "": written in place
	write func(w io.Writer) error
}

// ownFile matches the names of files that the process has open already.
var ownFile = regexp.MustCompile(`^(/dev/(stdout|stderr|fd/[0-9]+)|/proc/(self|[0-9]+)/fd/[0-9]+)$`)

func (l *reportFiles) add(path string, write func(w io.Writer) error) (err error) {
	r := &reportFile{path: path, write: write}
	if st, serr := os.Stat(path); ownFile.MatchString(path) {
		r.f, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0) // behind what is there, be it a file
	} else if serr == nil && st.IsDir() {
		return fmt.Errorf("%s is a folder", path)
	} else if serr == nil && st.Mode()&(os.ModeDevice|os.ModeCharDevice) == os.ModeDevice {
		return fmt.Errorf("%s is a disk", path)
	} else if serr == nil && !st.Mode().IsRegular() {
		r.f, err = os.OpenFile(path, os.O_WRONLY, 0)
	} else {
		if serr == nil { // a link stays one
			if path, err = filepath.EvalSymlinks(path); err != nil {
				return err
			}
			r.path = path
		}
		r.part = fmt.Sprintf("%s.%d.part", path, os.Getpid()) // another process may be measuring, too
		r.f, err = os.OpenFile(r.part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	}
	if err == nil {
		*l = append(*l, r)
	}
	return err
}

// write writes all, and gives them their names.
func (l *reportFiles) write() error {
	var errs []error
	for _, r := range *l {
		err := r.write(r.f)
		if cerr := r.f.Close(); err == nil {
			err = cerr
		}
		if r.part != "" && err == nil {
			err = os.Rename(r.part, r.path)
		} else if r.part != "" {
			err = errors.Join(err, os.Remove(r.part))
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", r.path, err)
		}
		errs = append(errs, err)
	}
	*l = nil
	return errors.Join(errs...)
}

// abandon removes those that were not written.
func (l *reportFiles) abandon() error {
	var errs []error
	for _, r := range *l {
		errs = append(errs, r.f.Close())
		if r.part != "" {
			errs = append(errs, os.Remove(r.part))
		}
	}
	return errors.Join(errs...)
}
