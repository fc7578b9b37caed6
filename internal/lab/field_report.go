package lab

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ubcache/ubcache"
)

// A FieldReport is what an experiment has given. In JSON all times are in seconds, all sizes in bytes.
type FieldReport struct {
	Name, About   string
	Partial       bool // it was ended before all was run
	Seed          uint64
	Scale         int
	Cache         int64
	Backing, File int64
	Bucket, Block int64
	Mode          string
	NodeCache     int64
	CacheModel    Model
	BackingModel  Model
	Warm, Span    time.Duration
	Notes         []string
	Fill          FillFacts
	Rows          []FieldRow

	reported []Reported
	variants []Variant
}

// A FieldRow is one policy.
type FieldRow struct {
	Policy, Variant string
	Jobs            []FieldJob
	GC              FieldGC
	Work            FieldWork
	Stalls          []ubcache.Stall // of the span; Max is since the start
	Took            Took
}

// Took says what a run took of the machine.
type Took struct {
	RealTime   time.Duration
	PeakMemory int64 // bytes, of the process so far
}

// A FieldJob is what became of a job's requests.
type FieldJob struct {
	Job        Job
	Requests   int64 // done in the span
	IOPS       float64
	Mean, Max  time.Duration
	LongestGap time.Duration // without a request of the job being done
	All        FieldPercentiles
	Collecting FieldPercentiles // while a collection was under way
	Between    FieldPercentiles // while none was
	Windows    []FieldWindow    // seconds of the span
}

// FieldPercentiles are those of so many requests.
type FieldPercentiles struct {
	Requests                        int64
	P50, P95, P99, P999, P9999, Max time.Duration
}

// A FieldWindow is a second.
type FieldWindow struct {
	Requests      int64
	P50, P99, Max time.Duration
}

// FieldGC is what collection did in the span.
type FieldGC struct {
	List        []FieldCollection // that ended in the span
	Average     time.Duration     // of these
	Max         time.Duration
	Interval    time.Duration // between the ends of two, on average
	Nodes       uint64        // of the last
	Slice       float64       // nodes in a hold
	PerNode     time.Duration // t: the gate was shut so long for a node
	Hold        time.Duration // slice * t, the mean of all holds
	LongestHold time.Duration // since the start
	Differences uint64
}

// A FieldCollection is one collection.
type FieldCollection struct {
	End   time.Duration // in the span
	Took  time.Duration
	Nodes uint64
	Holds uint64
	Held  time.Duration
}

// FieldWork is what the set did beside the requests: doing nothing is not a result.
type FieldWork struct {
	NodesSwept, NodeReads, NodeAppends, NodeRewrites, NodesStale, NodesCoalesced, Splits uint64
	Sweeps, Verifications, Mismatches                                                    uint64
	Evicted, NoBucket, DiscardedBuckets                                                  uint64
	MovedBytes                                                                           int64
	Nodes                                                                                int // at the end
	InUse                                                                                float64
}

func newFieldReport(f *Field) *FieldReport {
	return &FieldReport{
		Name: f.Name, About: f.About, Seed: f.Seed, Scale: f.Scale, Cache: f.Cache, Backing: f.Backing, File: f.File,
		Bucket: f.Bucket, Block: f.Block, Mode: f.Mode, NodeCache: f.NodeCache, CacheModel: f.CacheModel,
		BackingModel: f.BackingModel, Warm: f.Warm, Span: f.Span, Notes: f.Notes, reported: f.Reported, variants: f.Variants,
	}
}

// fill takes the difference between two looks.
func (r *FieldRow) fill(a, b *ubcache.SetStats, ga, gb *ubcache.GCStats) {
	r.Work = FieldWork{
		NodesSwept: b.NodesSwept - a.NodesSwept, NodeReads: b.NodeReads - a.NodeReads, NodeAppends: b.NodeAppends - a.NodeAppends,
		NodeRewrites: b.NodeRewrites - a.NodeRewrites, NodesStale: b.NodesStale - a.NodesStale, NodesCoalesced: b.NodesCoalesced - a.NodesCoalesced,
		Splits: b.Splits - a.Splits, Sweeps: b.Sweeps - a.Sweeps, Verifications: b.Verifications - a.Verifications,
		Mismatches: b.Mismatches - a.Mismatches, Evicted: b.Evicted - a.Evicted, NoBucket: b.NoBucket - a.NoBucket,
		DiscardedBuckets: b.DiscardedBuckets - a.DiscardedBuckets, MovedBytes: b.MovedBytes - a.MovedBytes,
		Nodes: b.Nodes, InUse: 100 * float64(b.Buckets-b.Empty-b.Ready) / float64(max(b.Buckets, 1)),
	}
	g := &r.GC
	g.LongestHold, g.Differences = gb.LongestHold, gb.Differences-ga.Differences
	if len(g.List) == 0 {
		return
	}
	var took, held time.Duration
	var nodes, holds uint64
	for _, c := range g.List {
		took += c.Took
		held += c.Held
		nodes += c.Nodes
		holds += c.Holds
		g.Max = max(g.Max, c.Took)
	}
	n := len(g.List)
	g.Average = took / time.Duration(n)
	g.Nodes = g.List[n-1].Nodes
	if n > 1 {
		g.Interval = (g.List[n-1].End - g.List[0].End) / time.Duration(n-1)
	}
	if holds > 0 {
		g.Slice = float64(nodes) / float64(holds)
		g.Hold = held / time.Duration(holds)
	}
	if nodes > 0 {
		g.PerNode = held / time.Duration(nodes)
	}
}

// metrics are the numbers that stand beside reported ones.
var metrics = map[string]func(r *FieldRow, j *FieldJob) string{
	"iops":     func(_ *FieldRow, j *FieldJob) string { return count(j.IOPS) },
	"min-iops": func(_ *FieldRow, j *FieldJob) string { return count(float64(j.slowest())) },
	"mean":     func(_ *FieldRow, j *FieldJob) string { return short(j.Mean) },
	"p50":      func(_ *FieldRow, j *FieldJob) string { return short(j.All.P50) },
	"p95":      func(_ *FieldRow, j *FieldJob) string { return short(j.All.P95) },
	"p99":      func(_ *FieldRow, j *FieldJob) string { return short(j.All.P99) },
	"p99.9":    func(_ *FieldRow, j *FieldJob) string { return short(j.All.P999) },
	"p99.99":   func(_ *FieldRow, j *FieldJob) string { return short(j.All.P9999) },
	"max":      func(_ *FieldRow, j *FieldJob) string { return short(j.Max) },
	"gap":      func(_ *FieldRow, j *FieldJob) string { return short(j.LongestGap) },
	"gc-p50":   func(_ *FieldRow, j *FieldJob) string { return some(j.Collecting.Requests > 0, short(j.Collecting.P50)) },
	"gc-max":   func(_ *FieldRow, j *FieldJob) string { return some(j.Collecting.Requests > 0, short(j.Collecting.Max)) },
	"gc-longest": func(r *FieldRow, _ *FieldJob) string {
		return some(len(r.GC.List) > 0, short(r.GC.Max))
	},
	"gc-average":  func(r *FieldRow, _ *FieldJob) string { return some(len(r.GC.List) > 0, short(r.GC.Average)) },
	"gc-interval": func(r *FieldRow, _ *FieldJob) string { return some(len(r.GC.List) > 1, short(r.GC.Interval)) },
	"gc-nodes":    func(r *FieldRow, _ *FieldJob) string { return some(len(r.GC.List) > 0, fmt.Sprint(r.GC.Nodes)) },
	"nodes":       func(r *FieldRow, _ *FieldJob) string { return fmt.Sprint(r.Work.Nodes) },
	"in-use":      func(r *FieldRow, _ *FieldJob) string { return fmt.Sprintf("%.0f %%", r.Work.InUse) },
}

// some is a number that there may not be.
func some(there bool, s string) string {
	if !there {
		return "none"
	}
	return s
}

// slowest returns the requests of the second that had the fewest.
func (j *FieldJob) slowest() int64 {
	least := int64(math.MaxInt64)
	for _, w := range j.Windows {
		least = min(least, w.Requests)
	}
	return least
}

// short is a length of time with three digits.
func short(d time.Duration) string {
	unit, name := time.Second, "s"
	switch {
	case d < time.Microsecond:
		unit, name = time.Nanosecond, "ns"
	case d < time.Millisecond:
		unit, name = time.Microsecond, "us"
	case d < time.Second:
		unit, name = time.Millisecond, "ms"
	}
	return digits3(float64(d)/float64(unit)) + " " + name
}

func count(v float64) string {
	if v >= 1000 {
		return digits3(v/1000) + "k"
	}
	return digits3(v)
}

func digits3(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

func gigabytes(n int64) string { return digits3(float64(n)/1e9) + " GB" }

// find returns the row of a policy in a variant, nil if there is none.
func (r *FieldReport) find(policy, variant string) *FieldRow {
	for i := range r.Rows {
		if r.Rows[i].Policy == policy && r.Rows[i].Variant == variant {
			return &r.Rows[i]
		}
	}
	return nil
}

// WriteJSON writes the report with all windows.
func (r *FieldReport) WriteJSON(w io.Writer) error {
	type compared struct {
		Reported
		Ours, Exact string `json:",omitempty"`
	}
	var list []compared
	for _, c := range r.reported {
		list = append(list, compared{c, r.ours(&c, c.Policy), r.ours(&c, "exact")})
	}
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(inSeconds(reflect.ValueOf(struct {
		*FieldReport
		Reported []compared
	}{r, list})))
}

// ours returns our number for a reported one, with one of the policies; "" if there is none.
func (r *FieldReport) ours(c *Reported, policy string) string {
	variant := c.Only
	if variant == "" && len(r.variants) > 0 {
		variant = r.variants[0].Name
	}
	row := r.find(policy, variant)
	if row == nil || c.Metric == "" {
		return ""
	}
	return metrics[c.Metric](row, &row.Jobs[c.Job])
}

// WriteText writes the report for people.
func (r *FieldReport) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n\n", r.Name, r.About)
	fmt.Fprintf(&b, "  cache    %s, buckets of %d KiB, blocks of %d; %s\n", gigabytes(r.Cache), r.Bucket>>10, r.Block, r.CacheModel.describe())
	fmt.Fprintf(&b, "  backing  %s, %s of it used; %s\n", gigabytes(r.Backing), gigabytes(r.File), r.BackingModel.describe())
	fmt.Fprintf(&b, "  mode     %s, crash_stability kernel; up to %s of the index in memory\n", r.Mode, gigabytes(r.NodeCache))
	if r.Fill.Writes > 0 {
		fmt.Fprintf(&b, "  filled   %d writes: %d nodes, %s cached, %.0f %% of the buckets (%s real, %s of metadata)\n", r.Fill.Writes, r.Fill.Nodes,
			gigabytes(r.Fill.LiveBytes), r.Fill.InUse, short(r.Fill.RealTime), gigabytes(r.Fill.ImageBytes))
	}
	fmt.Fprintf(&b, "  time     %v simulated after %v, seed %d", r.Span, r.Warm, r.Seed)
	if r.Scale > 1 {
		fmt.Fprintf(&b, "; one part in %d of what was reported", r.Scale)
	}
	b.WriteString("\n")
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "  note     %s\n", n)
	}
	if r.Partial {
		b.WriteString("\nENDED EARLY: what was run by then\n")
	}
	b.WriteString("\n")
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "policy\tvariant\tjob\tIOPS\tleast in 1 s\tmean\tp50\tp99\tp99.9\tmax\tlongest gap\tp50 in gc\tmax in gc\t\n")
	for i := range r.Rows {
		row := &r.Rows[i]
		for k := range row.Jobs {
			j := &row.Jobs[k]
			fmt.Fprintf(t, "%s\t%s\t%s\t", row.Policy, row.Variant, j.Job.Name)
			for _, m := range []string{"iops", "min-iops", "mean", "p50", "p99", "p99.9", "max", "gap", "gc-p50", "gc-max"} {
				fmt.Fprintf(t, "%s\t", metrics[m](row, j))
			}
			fmt.Fprint(t, "\n")
		}
	}
	fmt.Fprint(t, "\npolicy\tvariant\tcollections\taverage\tlongest\tinterval\tnodes\tslice\tt\thold=slice*t\tlongest hold\t\n")
	for i := range r.Rows {
		row := &r.Rows[i]
		g := &row.GC
		if len(g.List) == 0 {
			fmt.Fprintf(t, "%s\t%s\t0\t\t\t\t\t\t\t\t\t\n", row.Policy, row.Variant)
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%d\t%.1f\t%s\t%s\t%s\t\n", row.Policy, row.Variant, len(g.List), short(g.Average), short(g.Max),
			metrics["gc-interval"](row, nil), g.Nodes, g.Slice, short(g.PerNode), short(g.Hold), short(g.LongestHold))
	}
	_ = t.Flush()
	b.WriteString("\nin the span, beside the requests:\n")
	for i := range r.Rows {
		row := &r.Rows[i]
		o := &row.Work
		fmt.Fprintf(&b, "  %s: %d nodes swept, %d appended to, %d rewritten (%d for age), %d split, %d coalesced, %d read; %d verifications, %d mismatches;"+
			" %d buckets evicted, %d times none was ready; %s moved, %d buckets discarded; %.0f %% of the buckets used at the end\n",
			strings.TrimSpace(row.Policy+" "+row.Variant), o.NodesSwept, o.NodeAppends, o.NodeRewrites, o.NodesStale, o.Splits, o.NodesCoalesced, o.NodeReads,
			o.Verifications, o.Mismatches, o.Evicted, o.NoBucket, gigabytes(o.MovedBytes), o.DiscardedBuckets, o.InUse)
		for _, s := range row.Stalls {
			fmt.Fprintf(&b, "    waits over 100 us: %s %d times, %s in all; since the start at most %s\n", s.Cause, s.Count, short(s.Total), short(s.Max))
		}
		fmt.Fprintf(&b, "    it took %s, and %s of memory at most\n", short(row.Took.RealTime), gigabytes(row.Took.PeakMemory))
	}
	r.compare(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

func (m *Model) describe() string { return m.Name + " (" + m.Basis + ")" }

// compare writes what was reported beside ours.
func (r *FieldReport) compare(b *strings.Builder) {
	if len(r.reported) == 0 {
		return
	}
	b.WriteString("\nreported, beside ours:\n")
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "  ref\twhat\tpolicy\treported\tours\texact\tnote\n")
	for i := range r.reported {
		c := &r.reported[i]
		ours, exact := r.ours(c, c.Policy), r.ours(c, "exact")
		if c.Metric == "" {
			ours, exact = "not measured", ""
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n", c.Ref, c.What, c.Policy, c.Value, or(ours, "not run"), exact, c.Note)
	}
	_ = t.Flush()
}

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
