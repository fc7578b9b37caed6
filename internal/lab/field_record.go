package lab

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// A fieldRecorder keeps what requests took: overall, while collections were under way, and by windows of a second. It
// counts a request in the span in which it was done; one that was sent in the span and done after it counts in the
// percentiles alone, so that what still waits at the end is seen.
type fieldRecorder struct {
	from, to time.Duration // of the span
	jobs     []jobRecorder
}

type jobRecorder struct {
	all, in, out *hdrhistogram.Histogram // in nanoseconds
	window       *hdrhistogram.Histogram
	maxIn        time.Duration // exactly, as all maxima are
	maxOut       time.Duration
	maxWindow    time.Duration
	at           int // number of the window
	sum          time.Duration
	last         time.Duration // completion
	result       FieldJob
}

const (
	longestLatency = int64(3 * time.Hour)
	digits         = 3 // of a histogram
	windowDigits   = 2
)

func (r *fieldRecorder) init(jobs []Job) {
	r.jobs = make([]jobRecorder, len(jobs))
	for i := range r.jobs {
		j := &r.jobs[i]
		for _, h := range []**hdrhistogram.Histogram{&j.all, &j.in, &j.out} {
			*h = hdrhistogram.New(1, longestLatency, digits)
		}
		j.window = hdrhistogram.New(1, longestLatency, windowDigits)
	}
}

func (r *fieldRecorder) begin(now, span time.Duration) {
	r.from, r.to = now, now+span
	for i := range r.jobs {
		r.jobs[i].last = now
	}
}

// measures reports whether a moment lies in the span.
func (r *fieldRecorder) measures(now time.Duration) bool {
	return r.to > 0 && now >= r.from && now <= r.to
}

func (r *fieldRecorder) done(q *fieldRequest, now time.Duration, collecting bool) {
	if r.to == 0 || q.begin >= r.to {
		return
	}
	j := &r.jobs[q.job]
	took := now - q.begin
	_ = j.all.RecordValue(min(int64(took), longestLatency))
	if collecting || q.in {
		_ = j.in.RecordValue(min(int64(took), longestLatency))
		j.maxIn = max(j.maxIn, took)
	} else {
		_ = j.out.RecordValue(min(int64(took), longestLatency))
		j.maxOut = max(j.maxOut, took)
	}
	j.sum += took
	j.result.Max = max(j.result.Max, took)
	if now >= r.to {
		return
	}
	j.result.Requests++
	j.result.LongestGap = max(j.result.LongestGap, now-j.last)
	j.last = now
	j.reach(int((now - r.from) / fieldWindow))
	_ = j.window.RecordValue(min(int64(took), longestLatency))
	j.maxWindow = max(j.maxWindow, took)
}

// reach ends the windows before number n.
func (j *jobRecorder) reach(n int) {
	for j.at < n {
		w := FieldWindow{Requests: j.window.TotalCount()}
		if w.Requests > 0 {
			w.P50, w.P99, w.Max = quantile(j.window, 50, j.maxWindow), quantile(j.window, 99, j.maxWindow), j.maxWindow
			j.window.Reset()
			j.maxWindow = 0
		}
		j.result.Windows = append(j.result.Windows, w)
		j.at++
	}
}

// results returns what was recorded, one for each job.
func (r *fieldRecorder) results(jobs []Job) []FieldJob {
	var list []FieldJob
	span := r.to - r.from
	for i := range r.jobs {
		j := &r.jobs[i]
		j.reach(int(span / fieldWindow))
		f := j.result
		f.Job = jobs[i]
		f.LongestGap = max(f.LongestGap, r.to-j.last)
		if n := j.all.TotalCount(); n > 0 {
			f.Mean = j.sum / time.Duration(n)
		}
		if span > 0 {
			f.IOPS = float64(f.Requests) / span.Seconds()
		}
		f.All, f.Collecting, f.Between = fieldPercentiles(j.all, f.Max), fieldPercentiles(j.in, j.maxIn), fieldPercentiles(j.out, j.maxOut)
		list = append(list, f)
	}
	return list
}

// fieldPercentiles are those of a histogram of which the maximum is known.
func fieldPercentiles(h *hdrhistogram.Histogram, most time.Duration) FieldPercentiles {
	p := FieldPercentiles{Requests: h.TotalCount()}
	if p.Requests > 0 {
		at := func(q float64) time.Duration { return quantile(h, q, most) }
		p.P50, p.P95, p.P99, p.P999, p.P9999, p.Max = at(50), at(95), at(99), at(99.9), at(99.99), most
	}
	return p
}

// quantile is one of a histogram, which rounds up.
func quantile(h *hdrhistogram.Histogram, q float64, most time.Duration) time.Duration {
	return min(time.Duration(h.ValueAtQuantile(q)), most)
}
