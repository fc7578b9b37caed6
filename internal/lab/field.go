package lab

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// A Field is an experiment that somebody has reported, to be repeated in simulated time: the engine as it is, at full size
// where that goes, on devices that take their time by a model and store metadata only.
//
// A cache is filled once, by variant, at no cost of simulated time, and each policy gets a clone of it. Sizes are in bytes.
// Source: B 3.6, 3.7, 10.
type Field struct {
	Name  string
	About string // the report, in a sentence
	Seed  uint64

	Cache, Backing int64 // of the devices
	File           int64 // the first so many bytes of the volume are what requests go to
	Bucket, Block  int64
	Mode           string // cache_mode

	CacheModel, BackingModel Model
	NodeCache                int64 // bytes of the index that may be in memory, at most

	// The cache is filled by writes of FillSize bytes at random places in File until the index has FillNodes nodes, or FillBytes
	// are cached, whichever comes first; 0: no such limit. If both are 0 it is not filled.
	FillSize  int
	FillNodes int
	FillBytes int64

	Jobs []Job
	Warm time.Duration // simulated, before the measurement
	Span time.Duration // simulated, of the measurement

	Scale    int      // sizes, and lengths of time, are one part in so many of the reported ones; 1: as reported
	Notes    []string // what is assumed, and what scaling means
	Variants []Variant
	Reported []Reported
}

// A Variant is a change to a Field that is run besides, or instead. The zero value changes nothing.
type Variant struct {
	Name       string
	CacheModel *Model // nil: the field's
	Discard    bool   // the attribute, of the cache
}

// A Model is how long a device takes, and what that is taken from.
type Model struct {
	Name    string
	Latency blockdev.Latency
	Basis   string
}

// A Job is a stream of requests of one size at random places, so many under way at a time.
type Job struct {
	Name  string
	Reads int // percent; the rest are writes
	Size  int // bytes
	Depth int
}

// Reported is a number that was reported, to stand beside ours.
type Reported struct {
	Ref    string // of B 3.7: "#3"
	Policy string // which of ours is to be compared
	What   string
	Value  string // as reported, scaled if the field is, with its unit
	Metric string // the name of ours, see metrics; "": there is none
	Job    int    // of which job
	Only   string // the variant; "": the first
	Note   string
}

// A FieldProgress says how far a run is.
type FieldProgress struct {
	Stage   string // "fill", "open", "warm", "measure", "close"
	Variant string
	Policy  string
	Percent int
}

// RunField runs an experiment with each of the policies, values of the attribute gc_policy, one after the other. progress
// may be nil; it is called now and then, by one goroutine at a time. When ctx ends, the report of the policies that are
// complete comes with its error, and Partial is set.
//
// The same Field gives the same report, but for the fields that say what it took.
func RunField(ctx context.Context, f Field, policies []string, progress func(FieldProgress)) (*FieldReport, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	if progress == nil {
		progress = func(FieldProgress) {}
	}
	if len(policies) == 0 {
		return nil, errors.New("no policy is given")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(15)) // the index is large, long lived, and almost without pointers
	report := newFieldReport(&f)
	report.Partial = true
	variants := f.Variants
	if len(variants) == 0 {
		variants = []Variant{{}}
	}
	img, err := fillImage(ctx, &f, func(percent int) { progress(FieldProgress{Stage: "fill", Percent: percent}) })
	if err != nil {
		return report, fmt.Errorf("%s: fill: %w", f.Name, err)
	}
	report.Fill = img.facts
	defer img.close()
	for i := range variants {
		for _, policy := range policies {
			run := fieldRun{f: &f, variant: &variants[i], policy: policy, img: img}
			run.progress = func(stage string, percent int) {
				progress(FieldProgress{Stage: stage, Variant: variants[i].Name, Policy: policy, Percent: percent})
			}
			row, err := run.run(ctx)
			if err != nil {
				return report, fmt.Errorf("%s: %s: %w", f.Name, policy, err)
			}
			report.Rows = append(report.Rows, *row)
		}
	}
	report.Partial = false
	return report, nil
}

// check refuses what cannot be run.
func (f *Field) check() error {
	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(f.Name+": "+format, args...)) }
	if f.Cache <= 0 || f.Backing <= 0 || f.File <= 0 || f.File >= f.Backing {
		refuse("a cache of %d bytes, a backing device of %d, a file of %d", f.Cache, f.Backing, f.File)
	}
	if f.Span < fieldWindow || f.Warm < 0 {
		refuse("%v of measurement after %v", f.Span, f.Warm)
	}
	if len(f.Jobs) == 0 {
		refuse("no job")
	}
	if (f.FillNodes > 0 || f.FillBytes > 0) && f.FillSize <= 0 {
		refuse("a fill by writes of %d bytes", f.FillSize)
	}
	for _, j := range f.Jobs {
		if j.Depth < 1 || j.Size < 512 || int64(j.Size) > f.File || j.Reads < 0 || j.Reads > 100 {
			refuse("job %+v", j)
		}
	}
	for _, r := range f.Reported {
		if r.Metric != "" && metrics[r.Metric] == nil || r.Job >= len(f.Jobs) {
			refuse("reported %s: no number %q of job %d", r.Ref, r.Metric, r.Job)
		}
	}
	return errors.Join(errs...)
}

// FieldByName returns the preset of that name.
func FieldByName(name string) (Field, error) {
	var names []string
	for _, f := range Presets() {
		if f.Name == name {
			return f, nil
		}
		names = append(names, f.Name)
	}
	return Field{}, fmt.Errorf("no preset %q: want one of %v", name, names)
}
