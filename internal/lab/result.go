package lab

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// ResultVersion is that of the JSON form of a Result.
const ResultVersion = 1

// A Result is what Measure has found. In JSON all times are in seconds, all sizes in bytes.
type Result struct {
	Version  int       `json:"version"`
	Machine  Machine   `json:"machine"`
	Setup    Setup     `json:"setup"`
	Began    time.Time `json:"began"`
	Took     Duration  `json:"took_seconds"`
	Partial  bool      `json:"partial"` // it was ended before all was measured
	Warnings []string  `json:"warnings"`
	Rows     []Row     `json:"rows"`
	Runs     []*Run    `json:"runs"`
}

// A Machine is where it was measured.
type Machine struct {
	CPUs      int     `json:"cpus"`
	Processor string  `json:"processor,omitempty"`
	Kernel    string  `json:"kernel,omitempty"`
	System    string  `json:"system"`
	Go        string  `json:"go"`
	Memory    int64   `json:"memory_bytes,omitempty"`
	Load      float64 `json:"load_average"` // over the last minute, when it began
	Simulated bool    `json:"simulated"`    // by the clock of a simulation: work takes no time there
}

// ThisMachine says what it runs on; what cannot be found out is left out.
func ThisMachine() Machine {
	m := Machine{CPUs: runtime.NumCPU(), System: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version()}
	read := func(path string) string {
		b, _ := os.ReadFile(path)
		return string(b)
	}
	m.Kernel = strings.TrimSpace(read("/proc/sys/kernel/osrelease"))
	for line := range strings.Lines(read("/proc/cpuinfo")) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m.Processor = strings.TrimSpace(value)
			break
		}
	}
	var kib int64
	if _, err := fmt.Sscanf(read("/proc/meminfo"), "MemTotal: %d kB", &kib); err == nil {
		m.Memory = kib << 10
	}
	_, _ = fmt.Sscan(read("/proc/loadavg"), &m.Load)
	return m
}

// A Run is one policy at one depth in one round.
type Run struct {
	Policy  string `json:"policy"`
	Depth   int    `json:"iodepth"`
	Round   int    `json:"round"` // from 1
	Nodes   int    `json:"nodes"` // of the index when it began
	Cut     bool   `json:"cut"`   // it was ended before its time
	Without Window `json:"without"`
	With    Window `json:"with"`
}

// short reports whether its second window was ended before its time; the first is whole in every run that is kept. A run may be cut
// after both.
func (x *Run) short(runtime Duration) bool { return x.Cut && x.With.Took < runtime }

// Windows returns how many of the windows that the result has went on to their end, and whether it has a part of another.
func (r *Result) Windows() (whole int, part bool) {
	for _, x := range r.Runs {
		whole += 2
		if x.short(r.Setup.Runtime) {
			whole, part = whole-1, true
		}
	}
	return whole, part
}

// A Window is one measurement.
type Window struct {
	Took        Duration    `json:"took_seconds"`
	IOPS        float64     `json:"iops"`
	Reads       uint64      `json:"reads"`
	Bytes       int64       `json:"bytes"`
	Latency     Latency     `json:"latency"`
	Gap         Duration    `json:"longest_gap_seconds"`    // without a completion
	GapAt       Duration    `json:"longest_gap_at_seconds"` // since the window began
	Collections Collections `json:"collections"`
	Waits       []Wait      `json:"waits"`
	Work        Work        `json:"work"`
	Load        Served      `json:"served"`
	BinSeconds  Duration    `json:"bin_seconds"`
	Bins        []Bin       `json:"bins"`

	histogram *hdrhistogram.Histogram
}

// MarshalJSON writes [requests, p99, max], the latter in seconds.
func (b Bin) MarshalJSON() ([]byte, error) {
	return json.Marshal([3]any{b.Count, b.P99, b.Max})
}

// UnmarshalJSON reads that.
func (b *Bin) UnmarshalJSON(p []byte) error {
	var list [3]json.Number
	if err := json.Unmarshal(p, &list); err != nil {
		return err
	}
	n, err := list[0].Int64()
	if err != nil {
		return err
	}
	b.Count = uint64(n)
	for i, to := range []*Duration{&b.P99, &b.Max} {
		if err := to.UnmarshalJSON([]byte(list[i+1])); err != nil {
			return err
		}
	}
	return nil
}

// Collections are those of a window. Of exact, which has none, they are full walks of its sweep, each with the maintenance that
// it leads to.
type Collections struct {
	Completed  int      `json:"completed"`  // that ended in the window
	Unfinished int      `json:"unfinished"` // that had not
	Mean       Duration `json:"mean_seconds"`
	Max        Duration `json:"max_seconds"`
	Nodes      uint64   `json:"nodes"` // seen by the last one that ended
	Holds      uint64   `json:"holds"` // times that the gate was shut, so that requests waited
	HoldTotal  Duration `json:"holds_total_seconds"`
	HoldMax    Duration `json:"hold_max_seconds"` // since the set was opened
	Spans      []Span   `json:"spans"`
}

// A Span is a collection, in time since the window began.
type Span struct {
	From Duration `json:"from_seconds"`
	To   Duration `json:"to_seconds"`
}

// A Wait is how often, and how long, requests have waited for one cause within a window.
type Wait struct {
	Cause string   `json:"cause"`
	Count uint64   `json:"count"`
	Total Duration `json:"total_seconds"`
}

// Work is what was done in the background within a window.
type Work struct {
	Sweeps        uint64 `json:"sweeps"`
	NodesSwept    uint64 `json:"nodes_swept"`
	NodesStale    uint64 `json:"nodes_stale_rewritten"`
	Coalesced     uint64 `json:"nodes_coalesced"`
	NodeRewrites  uint64 `json:"node_rewrites"`
	NodeAppends   uint64 `json:"node_appends"`
	Splits        uint64 `json:"splits"`
	Verifications uint64 `json:"verifications"`
	MovedBytes    int64  `json:"moved_bytes"`
	MovedBuckets  uint64 `json:"moved_buckets"`
	Evicted       uint64 `json:"evicted_buckets"`
	NoBucket      uint64 `json:"no_bucket_ready"` // times that data found none
	MaxLag        int    `json:"max_generation_lag"`
}

// Served is how the volume has answered within a window.
type Served struct {
	Hits         uint64 `json:"read_hits"`
	Misses       uint64 `json:"read_misses"`
	Writes       uint64 `json:"writes"`
	Declined     uint64 `json:"writes_declined"` // that did not stay in the cache since too much of it was in use
	NoRoom       uint64 `json:"writes_without_bucket"`
	DirtyBytes   int64  `json:"dirty_bytes"` // at the end
	InUsePercent int    `json:"in_use_percent"`
}

// A Ratio is a figure with collection, divided by that without: of all rounds the median, the least and the greatest.
type Ratio struct {
	Median float64 `json:"median"`
	Least  float64 `json:"least"`
	Most   float64 `json:"most"`
}

// A Row is one policy at one depth. Figures are medians over the rounds, where nothing else is said.
type Row struct {
	Policy string `json:"policy"`
	Depth  int    `json:"iodepth"`
	Rounds int    `json:"rounds"`
	Nodes  int    `json:"nodes"`

	Without RowWindow `json:"without"`
	With    RowWindow `json:"with"`

	IOPS Ratio `json:"iops_ratio"`
	P50  Ratio `json:"p50_ratio"`
	P99  Ratio `json:"p99_ratio"`
	P999 Ratio `json:"p99.9_ratio"`
	Max  Ratio `json:"max_ratio"`

	Percentiles []RowPercentile `json:"percentiles"` // of the requests of all rounds together

	Collections    int      `json:"collections"`             // in the windows with collection, all rounds
	Unasked        int      `json:"collections_unasked"`     // in those without: the set has begun them by itself
	CollectionMean Duration `json:"collection_mean_seconds"` // over all
	CollectionMax  Duration `json:"collection_max_seconds"`  // of all
	Holds          uint64   `json:"holds"`                   // in the windows with collection, all rounds
	HoldMean       Duration `json:"hold_mean_seconds"`       // over these
	HoldMax        Duration `json:"hold_max_seconds"`        // of all, since their sets were opened
	Waits          []Wait   `json:"waits"`                   // in the windows with collection, all rounds
	Work           Work     `json:"work"`                    // the same
	Declined       float64  `json:"declined_share"`          // of the writes
}

// A RowWindow is what a row says of the windows of one kind.
type RowWindow struct {
	IOPS    float64  `json:"iops"`
	Latency Latency  `json:"latency"`
	Gap     Duration `json:"longest_gap_seconds"` // of all rounds
	Worst   Duration `json:"worst_seconds"`       // the greatest latency of all rounds
}

// A RowPercentile is one percentile.
type RowPercentile struct {
	Percentile float64  `json:"percentile"`
	Without    Duration `json:"without_seconds"`
	With       Duration `json:"with_seconds"`
}

// WriteJSON writes the result.
func (r *Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// makeRows makes the rows of what was measured, in the order of the setup.
func (r *Result) makeRows() {
	r.Rows = nil
	for _, p := range r.Setup.Policies {
		for _, d := range r.Setup.Depths {
			var whole, all []*Run
			for _, x := range r.Runs {
				if x.Policy == p && x.Depth == d {
					all = append(all, x)
					if !x.Cut {
						whole = append(whole, x)
					}
				}
			}
			if len(whole) > 0 {
				all = whole
			}
			if len(all) > 0 {
				r.Rows = append(r.Rows, makeRow(p, d, all))
			}
		}
	}
}

func makeRow(policy string, depth int, runs []*Run) Row {
	row := Row{Policy: policy, Depth: depth, Rounds: len(runs)}
	row.Nodes = int(median(runs, func(x *Run) float64 { return float64(x.Nodes) }))
	row.Without, row.With = rowWindow(runs, func(x *Run) *Window { return &x.Without }), rowWindow(runs, func(x *Run) *Window { return &x.With })
	row.IOPS = ratio(runs, func(w *Window) float64 { return w.IOPS })
	row.P50 = ratio(runs, func(w *Window) float64 { return float64(w.Latency.P50) })
	row.P99 = ratio(runs, func(w *Window) float64 { return float64(w.Latency.P99) })
	row.P999 = ratio(runs, func(w *Window) float64 { return float64(w.Latency.P999) })
	row.Max = ratio(runs, func(w *Window) float64 { return float64(w.Latency.Max) })

	var total, held Duration
	var writes, declined uint64
	for _, x := range runs {
		c := &x.With.Collections
		row.Collections += c.Completed
		row.Unasked += x.Without.Collections.Completed
		total += c.Mean * Duration(c.Completed)
		row.CollectionMax = max(row.CollectionMax, c.Max)
		row.Holds += c.Holds
		held += c.HoldTotal
		row.HoldMax = max(row.HoldMax, c.HoldMax)
		row.Waits = addWaits(row.Waits, x.With.Waits)
		row.Work = row.Work.plus(x.With.Work)
		writes += x.With.Load.Writes
		declined += x.With.Load.Declined + x.With.Load.NoRoom
	}
	if row.Collections > 0 {
		row.CollectionMean = total / Duration(row.Collections)
	}
	if row.Holds > 0 {
		row.HoldMean = held / Duration(row.Holds)
	}
	row.Declined = float64(declined) / float64(max(writes, 1))

	without, with := newHistogram(reportFigures), newHistogram(reportFigures)
	for _, x := range runs {
		if x.Without.histogram != nil && x.With.histogram != nil {
			without.Merge(x.Without.histogram)
			with.Merge(x.With.histogram)
		}
	}
	a, b := percentiles(without, time.Duration(row.Without.Worst), Percentiles...), percentiles(with, time.Duration(row.With.Worst), Percentiles...)
	for i, p := range Percentiles {
		row.Percentiles = append(row.Percentiles, RowPercentile{p, a[i], b[i]})
	}
	return row
}

func rowWindow(runs []*Run, of func(*Run) *Window) RowWindow {
	duration := func(get func(w *Window) Duration) Duration {
		return Duration(median(runs, func(x *Run) float64 { return float64(get(of(x))) }))
	}
	w := RowWindow{IOPS: median(runs, func(x *Run) float64 { return of(x).IOPS })}
	w.Latency = Latency{
		Mean: duration(func(w *Window) Duration { return w.Latency.Mean }),
		P50:  duration(func(w *Window) Duration { return w.Latency.P50 }),
		P99:  duration(func(w *Window) Duration { return w.Latency.P99 }),
		P999: duration(func(w *Window) Duration { return w.Latency.P999 }),
		Max:  duration(func(w *Window) Duration { return w.Latency.Max }),
	}
	for _, x := range runs {
		w.Latency.Count += of(x).Latency.Count
		w.Gap, w.Worst = max(w.Gap, of(x).Gap), max(w.Worst, of(x).Latency.Max)
	}
	return w
}

// median is that of a figure; of an even number of runs it is between the two in the middle.
func median(runs []*Run, of func(*Run) float64) float64 {
	list := make([]float64, len(runs))
	for i, x := range runs {
		list[i] = of(x)
	}
	return medianOf(list)
}

func medianOf(list []float64) float64 {
	list = slices.Clone(list)
	slices.Sort(list)
	n := len(list)
	switch {
	case n == 0:
		return 0
	case n%2 == 1:
		return list[n/2]
	}
	return (list[n/2-1] + list[n/2]) / 2
}

// ratio is that of a figure. Runs in which it was 0 without collection say nothing.
func ratio(runs []*Run, of func(*Window) float64) Ratio {
	var list []float64
	for _, x := range runs {
		if a := of(&x.Without); a > 0 {
			list = append(list, of(&x.With)/a)
		}
	}
	if len(list) == 0 {
		return Ratio{}
	}
	return Ratio{medianOf(list), slices.Min(list), slices.Max(list)}
}

func addWaits(to, list []Wait) []Wait {
	for _, w := range list {
		i := slices.IndexFunc(to, func(x Wait) bool { return x.Cause == w.Cause })
		if i < 0 {
			to = append(to, w)
			continue
		}
		to[i].Count += w.Count
		to[i].Total += w.Total
	}
	return to
}

func (w Work) plus(x Work) Work {
	w.Sweeps += x.Sweeps
	w.NodesSwept += x.NodesSwept
	w.NodesStale += x.NodesStale
	w.Coalesced += x.Coalesced
	w.NodeRewrites += x.NodeRewrites
	w.NodeAppends += x.NodeAppends
	w.Splits += x.Splits
	w.Verifications += x.Verifications
	w.MovedBytes += x.MovedBytes
	w.MovedBuckets += x.MovedBuckets
	w.Evicted += x.Evicted
	w.NoBucket += x.NoBucket
	w.MaxLag = max(w.MaxLag, x.MaxLag)
	return w
}
