package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	ubcache "github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
)

const (
	fillDepth    = 128
	fillPart     = 64 // the fill goes on in parts of that share of the cache, and looks at the index after each
	fillStuck    = 4  // caches written in which the index has not grown
	progressTick = 250 * time.Millisecond
)

// Measure measures all that the setup says. When ctx ends it stops in good order, and the result has what was measured by
// then, and Partial is set; that is no error. With an error the result has what was measured before, too.
func Measure(ctx context.Context, c Config) (*Result, error) {
	if err := c.fill(); err != nil {
		return nil, err
	}
	r := &Result{Version: ResultVersion, Machine: ThisMachine(), Setup: c.Setup, Began: c.RT.WallTime(), Warnings: []string{}}
	r.Machine.Simulated = c.RT.Simulated()
	begin := c.RT.Now()
	if c.RT.Simulated() {
		r.Machine.Load = 0 // of no account there, and the same run is to have the same result
	} else if busy := r.Machine.Load; busy > float64(r.Machine.CPUs)/2 {
		r.Warnings = append(r.Warnings, fmt.Sprintf("THE MACHINE WAS BUSY when this began (load average %.1f, with %d CPUs): others had a part in these figures", busy, r.Machine.CPUs))
	}
	l := &laboratory{Config: c, result: r, pool: blockdev.NewPool(blockdev.PoolOptions{})}
	l.steps = c.Rounds * len(c.Policies) * (1 + 2*len(c.Depths))
	err := l.checkPolicies(ctx)
	for round := 1; round <= c.Rounds && err == nil && ctx.Err() == nil; round++ {
		for _, p := range inTurn(c.Policies, round) {
			if err = l.round(ctx, p, round); err != nil || ctx.Err() != nil {
				break
			}
		}
	}
	if ctx.Err() != nil {
		r.Partial = true
		if errors.Is(err, ctx.Err()) {
			err = nil
		}
	}
	r.Partial = r.Partial || err != nil
	r.Took = Duration(c.RT.Now() - begin)
	r.makeRows()
	l.warn()
	return r, err
}

// inTurn is the list, in odd rounds as it is, in even ones the other way round.
func inTurn[T any](list []T, round int) []T {
	list = slices.Clone(list)
	if round%2 == 0 {
		slices.Reverse(list)
	}
	return list
}

// A laboratory is a Measure under way.
type laboratory struct {
	Config
	result      *Result
	pool        *blockdev.Pool
	step, steps int
}

// note adds a warning, once.
func (l *laboratory) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !slices.Contains(l.result.Warnings, text) {
		l.result.Warnings = append(l.result.Warnings, text)
	}
}

// checkPolicies finds out at once whether a set takes all policies, not after a fill or an hour.
func (l *laboratory) checkPolicies(ctx context.Context) error {
	small := l.Config
	small.Open = MemoryDevices(16<<20, 16<<20)
	small.BucketBytes, small.RuntimeDir, small.Attributes = 16<<10, "", nil
	b, err := openBench(ctx, &small)
	if err != nil {
		return err
	}
	for _, p := range l.Policies {
		if err = b.setPolicy(ctx, p); err != nil {
			break
		}
	}
	return errors.Join(err, b.close(ctx))
}

// A bench is a set with its volume, made for one run.
type bench struct {
	devices *Devices
	set     *ubcache.CacheSet
	volume  *ubcache.Volume

	overhead int // buckets with metadata that is no node
}

// openBench formats new devices and opens them as a set in writeback mode.
func openBench(ctx context.Context, c *Config) (_ *bench, err error) {
	b := &bench{}
	if b.devices, err = c.Open(ctx, c.RT); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close(ctx))
		}
	}()
	_, err = ubcache.Format(ctx, ubcache.FormatOptions{
		CacheDevice: b.devices.Cache, BackingDevices: []blockdev.Device{b.devices.Backing}, BucketSize: c.BucketBytes,
		DataOffset: dataOffset, CacheMode: "writeback", Force: true, DiscardUnflushed: true, // what is there is of the last run, or was asked about
	})
	if err != nil {
		return nil, err
	}
	b.set, err = ubcache.Open(ctx, ubcache.Options{
		CacheDevice: b.devices.Cache, RuntimeDir: c.RuntimeDir, NodeCache: c.NodeCache, Logger: c.Logger,
	})
	if err != nil {
		return nil, err
	}
	b.volume, err = b.set.OpenVolume(ctx, ubcache.VolumeOptions{Name: VolumeName, BackingDevice: b.devices.Backing})
	if err != nil {
		return nil, err
	}
	for _, a := range append([]Attribute{{VolumeName, "sequential_cutoff", "0"}}, c.Attributes...) {
		if err = b.set.SetAttribute(ctx, a.Object, a.Name, a.Value); err != nil {
			return nil, err
		}
	}
	if n := b.volume.BlockSize(); c.BlockBytes%n != 0 {
		return nil, fmt.Errorf("requests of %d bytes on devices with blocks of %d", c.BlockBytes, n)
	}
	return b, nil
}

// setPolicy sets the policy, if it is another.
func (b *bench) setPolicy(ctx context.Context, policy string) error {
	if b.set.GC().Policy == policy {
		return nil
	}
	if err := b.set.SetAttribute(ctx, "set", "gc_policy", policy); err != nil {
		return fmt.Errorf("policy %s: %w", policy, err)
	}
	return nil
}

// close stops the set and releases the devices, also after an interruption.
func (b *bench) close(ctx context.Context) error {
	var errs []error
	if b.set != nil {
		errs = append(errs, b.set.Close(context.WithoutCancel(ctx)))
	}
	if b.devices != nil && b.devices.Release != nil {
		errs = append(errs, b.devices.Release())
	}
	return errors.Join(errs...)
}

// round makes one round of one policy: a fill, and two windows at each depth.
func (l *laboratory) round(ctx context.Context, policy string, round int) (err error) {
	b, err := openBench(ctx, &l.Config)
	if err != nil {
		return fmt.Errorf("policy %s, round %d: %w", policy, round, err)
	}
	defer func() { err = errors.Join(err, b.close(ctx)) }()

	// Nothing of an earlier run can be taken for something of this one.
	run := l.Seed<<32 ^ uint64(l.result.Began.UnixNano()) ^ uint64(l.step)
	content := NewContent(run, min(l.RangeBytes, b.volume.Size()), l.BlockBytes, b.devices.Blank)
	err = b.setPolicy(ctx, "exact")
	if err == nil {
		err = l.index(ctx, b, content, policy, round)
	}
	if err == nil {
		l.step++
		err = b.setPolicy(ctx, policy)
	}
	for _, depth := range inTurn(l.Depths, round) {
		if err != nil || ctx.Err() != nil {
			break
		}
		err = l.depth(ctx, b, content, policy, depth, round)
	}
	if err != nil {
		err = fmt.Errorf("policy %s, round %d: %w", policy, round, err)
	}
	return err
}

// index fills the cache until the index has as many nodes as asked for, and the cache was written once.
func (l *laboratory) index(ctx context.Context, b *bench, content *Content, policy string, round int) error {
	var written, grown int64
	best := 0
	begin := l.RT.Now()
	told := begin
	cache := b.devices.Cache.Info().Size
	for part := uint64(1); ctx.Err() == nil; part++ {
		limit := max(cache/fillPart/int64(l.BlockBytes), 1)
		load := &Load{
			RT: l.RT, Device: b.volume.Device(), Content: content, Depth: min(fillDepth, int(content.Blocks()/4)),
			Seed: l.Seed ^ part<<32, Pool: l.pool, Limit: uint64(limit),
		}
		if err := load.Run(ctx); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
		written += limit * int64(l.BlockBytes)
		nodes := b.nodes(l.NodeCache)
		if nodes > best {
			best, grown = nodes, written
		}
		done := float64(written) / float64(cache)
		if l.Nodes > 0 {
			done = min(done, float64(nodes)/float64(l.Nodes))
		}
		if now := l.RT.Now(); now-told >= progressTick || part == 1 {
			told = now
			l.Progress(Progress{
				Stage: "fill", Policy: policy, Round: round, Step: l.step, Steps: l.steps, Done: min(done, 1), Of: 1, Nodes: nodes,
				Elapsed: now - begin,
			})
		}
		if written >= cache && nodes >= l.Nodes {
			return nil
		}
		if written-grown > fillStuck*cache {
			return fmt.Errorf("the index has %d nodes and grows no more, where %d were asked for: take smaller buckets (a node is no larger), smaller requests, or a larger range, cache and backing device", best, l.Nodes)
		}
	}
	return ctx.Err()
}

// nodes returns how many nodes the index has. While all are in memory that is known; later it is the buckets with metadata,
// but for those that had other things when it was known.
func (b *bench) nodes(nodeCache int64) int {
	s := b.set.Stats()
	if s.NodeBytes < nodeCache/2 {
		b.overhead = int(s.Metadata) - s.Nodes
		return s.Nodes
	}
	return max(s.Nodes, int(s.Metadata)-b.overhead)
}

// depth makes the two windows of one depth.
func (l *laboratory) depth(ctx context.Context, b *bench, content *Content, policy string, depth, round int) error {
	run := &Run{Policy: policy, Depth: depth, Round: round, Nodes: b.nodes(l.NodeCache)}
	for _, collecting := range []bool{false, true} {
		w := &run.Without
		if collecting {
			w = &run.With
		}
		if err := l.window(ctx, b, content, w, LogName{policy, depth, round, collecting}); err != nil {
			return err
		}
		if ctx.Err() != nil {
			run.Cut = true
			if !collecting || w.Latency.Count == 0 {
				return nil // one window alone compares with nothing
			}
			break
		}
		l.step++
	}
	l.result.Runs = append(l.result.Runs, run)
	return nil
}

// window makes one measurement.
func (l *laboratory) window(ctx context.Context, b *bench, content *Content, out *Window, name LogName) (err error) {
	before := snapshot(b)
	now := l.RT.Now()
	rec := NewRecorder(now)
	if l.Log != nil {
		if rec.Log, err = l.Log(name); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, rec.Log.Close()) }()
	}
	reads := map[string]float64{"randwrite": 0, "randrw": 0.5, "randread": 1}[l.RW]
	load := &Load{
		RT: l.RT, Device: b.volume.Device(), Content: content, Depth: name.Depth, Reads: reads, Pool: l.pool,
		Seed: l.Seed ^ uint64(name.Round)<<40 ^ 1<<63, For: time.Duration(l.Runtime), Recorder: rec,
	}
	p := Progress{
		Stage: "without collection", Policy: name.Policy, Depth: name.Depth, Round: name.Round, Step: l.step, Steps: l.steps,
		Of: l.Runtime.Seconds(),
	}
	w := &watch{rt: l.RT, set: b.set, exact: name.Policy == "exact", begin: now, first: b.set.GC(), stats: b.set.Stats()}
	w.gc = w.first
	if name.Collecting {
		w.force = time.Duration(l.GCEvery)
		p.Stage = "with collection"
	}
	told := now
	w.tick = func(now time.Duration, w *watch) {
		if now-told < progressTick {
			return
		}
		told = now
		p.Elapsed, p.Requests, p.Collections = now-w.begin, load.Done(), w.completed
		p.Done = min(p.Elapsed.Seconds(), p.Of)
		l.Progress(p)
	}

	loading, stop := context.WithCancel(ctx)
	defer stop()
	looking, looked := context.WithCancel(ctx)
	defer looked()
	var watched error
	group := newGroup(l.RT)
	group.Go("watch", func() {
		if watched = w.run(looking); watched != nil {
			stop()
		}
	})
	var loaded error
	group.Go("load", func() {
		loaded = load.Run(loading)
		looked()
	})
	group.Wait()
	if err := errors.Join(loaded, watched); err != nil {
		return err
	}
	end := l.RT.Now()
	*out = rec.window()
	out.Collections = w.collections(end)
	out.since(before, snapshot(b))
	if s := b.set.Stats(); s.Failed != "" {
		return fmt.Errorf("the set has stopped: %s", s.Failed)
	} else if s.Mismatches > 0 {
		return fmt.Errorf("%d counts do not fit the index", s.Mismatches)
	}
	if g := b.set.GC(); g.Differences > 0 {
		return fmt.Errorf("collections have found something else than the exact counters in %d buckets", g.Differences)
	}
	if ctx.Err() != nil {
		return nil
	}
	p.Stage = "settle"
	l.Progress(p)
	settled, err := w.settle(ctx)
	if !settled && err == nil && ctx.Err() == nil {
		l.note("policy %s, depth %d, round %d: what was begun in a window was still under way %v after it: the next window was measured beside it", name.Policy, name.Depth, name.Round, settleLimit)
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// window returns what was recorded.
func (r *Recorder) window() Window {
	w := Window{
		Took: Duration(r.Took()), Reads: r.Reads(), Bytes: r.Bytes(), Latency: r.Latency(), BinSeconds: Duration(BinWidth),
		Bins: r.Bins(), histogram: r.Histogram(), Waits: []Wait{},
	}
	if w.Took > 0 {
		w.IOPS = float64(w.Latency.Count) / w.Took.Seconds()
	}
	gap, at := r.Gap()
	w.Gap, w.GapAt = Duration(gap), Duration(at)
	return w
}

// A moment is what the counters of a set were.
type moment struct {
	set    ubcache.SetStats
	volume ubcache.VolumeStats
	stalls []ubcache.Stall
}

func snapshot(b *bench) moment { return moment{b.set.Stats(), b.volume.Stats(), b.set.Stalls()} }

// since fills in what the counters say.
func (w *Window) since(a, b moment) {
	w.Work = Work{
		Sweeps: b.set.Sweeps - a.set.Sweeps, NodesSwept: b.set.NodesSwept - a.set.NodesSwept,
		NodesStale: b.set.NodesStale - a.set.NodesStale, Coalesced: b.set.NodesCoalesced - a.set.NodesCoalesced,
		NodeRewrites: b.set.NodeRewrites - a.set.NodeRewrites, NodeAppends: b.set.NodeAppends - a.set.NodeAppends,
		Splits: b.set.Splits - a.set.Splits, Verifications: b.set.Verifications - a.set.Verifications,
		MovedBytes: b.set.MovedBytes - a.set.MovedBytes, MovedBuckets: b.set.MovedBuckets - a.set.MovedBuckets,
		Evicted: b.set.Evicted - a.set.Evicted, NoBucket: b.set.NoBucket - a.set.NoBucket, MaxLag: b.set.MaxLag,
	}
	w.Load = Served{
		Hits: b.volume.Hits - a.volume.Hits, Misses: b.volume.Misses - a.volume.Misses, Writes: b.volume.Writes - a.volume.Writes,
		Declined: b.volume.DeclinedFull - a.volume.DeclinedFull, NoRoom: b.volume.DeclinedNoRoom - a.volume.DeclinedNoRoom,
		DirtyBytes: b.volume.DirtyBytes, InUsePercent: b.set.InUse,
	}
	for _, s := range b.stalls {
		for _, o := range a.stalls {
			if o.Cause == s.Cause {
				s.Count, s.Total = s.Count-o.Count, s.Total-o.Total
			}
		}
		if s.Count > 0 {
			w.Waits = append(w.Waits, Wait{s.Cause, s.Count, Duration(s.Total)})
		}
	}
}

// warn says which rows compare nothing with nothing, or a whole window with a part of one.
func (l *laboratory) warn() {
	for i := range l.result.Rows {
		r := &l.result.Rows[i]
		one, many := "collection", "collections"
		if r.Policy == "exact" {
			one, many = "sweep", "sweeps" // it has no collections
		}
		if r.Collections == 0 {
			l.note("policy %s, depth %d: NO %s ENDED in any window with collection, so this row shows nothing: give it more time (--runtime), or a smaller index", r.Policy, r.Depth, strings.ToUpper(one))
		} else if n := l.empty(r); n > 0 {
			l.note("policy %s, depth %d: no %s ended in %d of %d windows with collection", r.Policy, r.Depth, one, n, r.Rounds)
		}
		if r.Unasked > 0 {
			l.note("policy %s, depth %d: %d %s that nobody asked for ended in the windows without collection, so the ratios are too low", r.Policy, r.Depth, r.Unasked, many)
		}
		if took, cut := l.cut(r); cut {
			l.note("policy %s, depth %d: the window with collection was ended after %v of %v, and is compared with a whole one", r.Policy, r.Depth, took, l.Runtime)
		}
		if r.Declined > 0.1 {
			l.note("policy %s, depth %d: %.0f %% of the writes went round the cache, since too much of it was dirty or in use: load a smaller range", r.Policy, r.Depth, 100*r.Declined)
		}
	}
}

// cut reports whether all that a row has is a window that was ended before its time, and after how long.
func (l *laboratory) cut(row *Row) (took Duration, cut bool) {
	for _, x := range l.result.Runs {
		switch {
		case x.Policy != row.Policy || x.Depth != row.Depth:
		case !x.Cut:
			return 0, false // a row is made of whole ones, where there is one
		default:
			took, cut = x.With.Took, x.short(l.Runtime)
		}
	}
	return took, cut
}

// empty counts the windows with collection in which none ended.
func (l *laboratory) empty(row *Row) (n int) {
	for _, x := range l.result.Runs {
		if x.Policy == row.Policy && x.Depth == row.Depth && !x.Cut && x.With.Collections.Completed == 0 {
			n++
		}
	}
	return n
}
