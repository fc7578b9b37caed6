package lab

import (
	"fmt"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// The histograms: three figures for what is reported, two for the bins.
const (
	leastLatency    = int64(100 * time.Nanosecond)
	greatestLatency = int64(6 * time.Hour)
	reportFigures   = 3
	binFigures      = 2
)

// BinWidth is that of a Recorder's bins.
const BinWidth = 100 * time.Millisecond

func newHistogram(figures int) *hdrhistogram.Histogram {
	return hdrhistogram.New(leastLatency, greatestLatency, figures)
}

// A Bin is what completed within BinWidth.
type Bin struct {
	Count    uint64
	P99, Max Duration
}

// A Recorder takes the latencies of one window, from one queue: its methods must not be called at the same time.
type Recorder struct {
	Log *LatLog // each request goes there too; nil: none

	begin, end time.Duration
	all        *hdrhistogram.Histogram
	max        time.Duration // exactly
	sum        time.Duration
	reads      uint64
	bytes      int64

	bins   []Bin
	bin    *hdrhistogram.Histogram
	binMax time.Duration
	binEnd time.Duration

	last, gap, gapAt time.Duration
}

// NewRecorder makes one whose window begins now.
func NewRecorder(now time.Duration) *Recorder {
	return &Recorder{
		begin: now, last: now, binEnd: now + BinWidth,
		all: newHistogram(reportFigures), bin: newHistogram(binFigures),
	}
}

// Record takes a request that took latency and has completed now.
func (r *Recorder) Record(now, latency time.Duration, read bool, block int, off int64) {
	r.completion(now)
	if now >= r.binEnd {
		r.turn(now)
	}
	v := min(max(int64(latency), 0), greatestLatency)
	_ = r.all.RecordValue(v) // in range
	_ = r.bin.RecordValue(v)
	r.max, r.binMax = max(r.max, latency), max(r.binMax, latency)
	r.sum += latency
	r.bytes += int64(block)
	if read {
		r.reads++
	}
	if r.Log != nil {
		r.Log.Add(now-r.begin, latency, read, block, off)
	}
}

// completion sees how long there was none.
func (r *Recorder) completion(now time.Duration) {
	if d := now - r.last; d > r.gap {
		r.gap, r.gapAt = d, r.last-r.begin
	}
	r.last = now
}

// turn ends bins until now lies in the newest.
func (r *Recorder) turn(now time.Duration) {
	b := Bin{Count: uint64(r.bin.TotalCount()), Max: Duration(r.binMax)}
	if b.Count > 0 {
		b.P99 = Duration(min(r.bin.ValueAtPercentile(99), int64(r.binMax)))
		r.bin.Reset()
		r.binMax = 0
	}
	r.bins = append(r.bins, b)
	r.binEnd += BinWidth
	for ; now >= r.binEnd; r.binEnd += BinWidth {
		r.bins = append(r.bins, Bin{})
	}
}

// End ends the window.
func (r *Recorder) End(now time.Duration) {
	r.completion(now)
	r.turn(now)
	r.end = now
}

// Percentiles are those of Latency.Percentiles, each in hundredths of a percent below 100.
var Percentiles = []float64{0, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 99.995, 99.999, 100}

// Latency is how long requests took.
type Latency struct {
	Count uint64   `json:"count"`
	Mean  Duration `json:"mean_seconds"`
	P50   Duration `json:"p50_seconds"`
	P99   Duration `json:"p99_seconds"`
	P999  Duration `json:"p99.9_seconds"`
	Max   Duration `json:"max_seconds"`
}

// Latency sums up. Percentiles are exact to one in a thousand, the maximum is exact.
func (r *Recorder) Latency() Latency {
	l := Latency{Count: uint64(r.all.TotalCount()), Max: Duration(r.max)}
	if l.Count == 0 {
		return l
	}
	p := percentiles(r.all, r.max, 50, 99, 99.9)
	l.Mean, l.P50, l.P99, l.P999 = Duration(r.sum/time.Duration(l.Count)), p[0], p[1], p[2]
	return l
}

// percentiles returns some of a histogram of which the maximum is known.
func percentiles(h *hdrhistogram.Histogram, highest time.Duration, list ...float64) []Duration {
	out := make([]Duration, len(list))
	for i, p := range list {
		out[i] = Duration(min(h.ValueAtPercentile(p), int64(highest)))
		if p == 100 {
			out[i] = Duration(highest)
		}
	}
	return out
}

// Took returns how long the window was, until its last request was over.
func (r *Recorder) Took() time.Duration { return r.end - r.begin }

// Gap returns the longest time without a completion, and when in the window it began. The time from the last completion to
// the end counts too.
func (r *Recorder) Gap() (gap, at time.Duration) { return r.gap, r.gapAt }

// Reads returns how many of the requests were.
func (r *Recorder) Reads() uint64 { return r.reads }

// Bytes returns how much was moved.
func (r *Recorder) Bytes() int64 { return r.bytes }

// Bins returns the line of bins from the beginning of the window on. A request is in the bin in which it completed.
func (r *Recorder) Bins() []Bin { return slices.Clone(r.bins) }

// Histogram returns the recorder's own.
func (r *Recorder) Histogram() *hdrhistogram.Histogram { return r.all }

func (l Latency) String() string {
	return fmt.Sprintf("p50 %v p99 %v p99.9 %v max %v", l.P50, l.P99, l.P999, l.Max)
}
