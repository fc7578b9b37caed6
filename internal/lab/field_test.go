package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"image/png"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// tiny is field-375g in small: a cache of 1 GiB.
func tiny(t testing.TB) Field {
	t.Helper()
	f, err := FieldByName("field-375g")
	if err != nil {
		t.Fatal(err)
	}
	f.Cache, f.Backing, f.File = gib, 3*gib, 2*gib
	f.FillNodes, f.FillBytes = 0, gib/2
	f.Warm, f.Span = time.Second, 3*time.Second
	return f
}

// table returns a report's texts, without what the run took of the machine.
func table(t *testing.T, r *FieldReport) string {
	t.Helper()
	r.Fill.RealTime = 0
	for i := range r.Rows {
		r.Rows[i].Took = Took{}
	}
	var b bytes.Buffer
	if err := errors.Join(r.WriteText(&b), r.WriteJSON(&b)); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func mustRun(t *testing.T, f Field) *FieldReport {
	t.Helper()
	r, err := RunField(context.Background(), f, []string{"exact"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestSameSeedSameTable(t *testing.T) {
	f := tiny(t)
	first := mustRun(t, f)
	a := table(t, first)
	if b := table(t, mustRun(t, f)); a != b {
		t.Error("the same seed gives another table")
	}
	f.Seed = 2
	if b := table(t, mustRun(t, f)); strings.Replace(a, "seed 1", "seed 2", 1) == b {
		t.Error("another seed gives the same table")
	}
	row := &first.Rows[0]
	w, r := &row.Jobs[0], &row.Jobs[1]
	switch {
	case first.Fill.LiveBytes < gib/2 || first.Fill.LiveBytes > gib*6/10 || first.Fill.Nodes < 8:
		t.Errorf("fill: %+v", first.Fill)
	case w.IOPS < 45_000 || w.IOPS > 60_000: // 440 MiB/s in pieces of 8 KiB, a few of which are read
		t.Errorf("%v writes/s", w.IOPS)
	case r.IOPS < 100 || r.IOPS > 9_000 || r.All.P50 < 80*time.Microsecond:
		t.Errorf("%v reads/s, p50 %v", r.IOPS, r.All.P50)
	case len(w.Windows) != 3 || len(r.Windows) != 3 || w.All.Requests != w.Between.Requests:
		t.Errorf("%d and %d windows; requests %d, between collections %d", len(w.Windows), len(r.Windows), w.All.Requests, w.Between.Requests)
	case w.LongestGap > 100*time.Millisecond || w.Max > 100*time.Millisecond:
		t.Errorf("a gap of %v, a write of %v", w.LongestGap, w.Max)
	case row.Work.NodeAppends == 0 || row.Work.Mismatches > 0:
		t.Errorf("work: %+v", row.Work)
	}
	n := int64(0)
	for _, x := range w.Windows {
		n += x.Requests
	}
	if n != w.Requests {
		t.Errorf("%d requests in all windows, %d in all", n, w.Requests)
	}
	for _, text := range []string{"longest stall of writes", "24.3 s", "5876", "not run"} {
		if !strings.Contains(a, text) {
			t.Errorf("the report does not have %q", text)
		}
	}
}

func TestFieldEndsWithItsContext(t *testing.T) {
	f := tiny(t)
	for _, stage := range []string{"fill", "measure"} {
		ctx, cancel := context.WithCancel(context.Background())
		r, err := RunField(ctx, f, []string{"exact"}, func(p FieldProgress) {
			if p.Stage == stage && p.Percent >= 20 {
				cancel()
			}
		})
		cancel()
		if !errors.Is(err, context.Canceled) || r == nil || len(r.Rows) != 0 {
			t.Errorf("%s: %v, report %v", stage, err, r)
		}
	}
}

// The JSON form has all times in seconds, also those of models and stalls, and the numbers of the table; maxima are exact.
func TestFieldJSON(t *testing.T) {
	r := mustRun(t, tiny(t))
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	type figures struct{ Requests, P50, P9999, Max, LongestGap, Mean float64 }
	var got struct {
		Name       string
		Partial    *bool
		Span, Warm float64
		CacheModel struct{ Latency struct{ Read float64 } }
		Rows       []struct {
			Jobs []struct {
				figures
				All, Between figures
				Windows      []figures
			}
			Stalls []struct{ Count, Total, Max float64 }
		}
		Reported []struct{ Ref, Ours string }
	}
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	read := r.CacheModel.Latency.Read.Seconds()
	if got.Name != r.Name || got.Partial == nil || *got.Partial || got.Span != 3 || got.Warm != 1 || read == 0 || got.CacheModel.Latency.Read != read || len(got.Reported) != len(r.reported) {
		t.Errorf("%+v", got)
	}
	for i, j := range got.Rows[0].Jobs {
		is := &r.Rows[0].Jobs[i]
		if j.Max != is.Max.Seconds() || j.All.Max != j.Max || j.Between.Max > j.Max || j.All.P9999 > j.Max || j.LongestGap != is.LongestGap.Seconds() || j.Mean != is.Mean.Seconds() {
			t.Errorf("%+v of %+v", j, *is)
		}
		for _, w := range j.Windows {
			if w.Max <= 0 || w.Max > j.Max || w.P50 > w.Max {
				t.Errorf("a second with %+v, the longest of all is %v", w, j.Max)
			}
		}
	}
	for i, s := range got.Rows[0].Stalls {
		if is := r.Rows[0].Stalls[i]; s.Total != is.Total.Seconds() || s.Count != float64(is.Count) {
			t.Errorf("%+v of %+v", s, is)
		}
	}
}

// What was run before an interruption is a report, which says that it is not all; and there is none of no policy.
func TestFieldInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, err := RunField(ctx, tiny(t), []string{"exact", "classic"}, func(p FieldProgress) {
		if p.Policy == "classic" && p.Stage == "measure" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || r == nil || len(r.Rows) != 1 || !r.Partial || !strings.Contains(table(t, r), "ENDED EARLY") {
		t.Errorf("%v, %+v", err, r)
	}
	if r, err = RunField(context.Background(), tiny(t), nil, nil); err == nil {
		t.Errorf("no policy: %+v", r)
	}
}

func TestFieldsThatCannotBeRun(t *testing.T) {
	for name, change := range map[string]func(f *Field){
		"no job":       func(f *Field) { f.Jobs = nil },
		"file":         func(f *Field) { f.File = f.Backing },
		"span":         func(f *Field) { f.Span = time.Millisecond },
		"fill":         func(f *Field) { f.FillSize = 0 },
		"depth":        func(f *Field) { f.Jobs[0].Depth = 0 },
		"no number":    func(f *Field) { f.Reported = []Reported{{Metric: "luck"}} },
		"job of":       func(f *Field) { f.Reported = []Reported{{Metric: "p50", Job: 2}} },
		"gc_policy":    nil,
		"measurement ": func(f *Field) { f.Warm = -1 },
	} {
		f := tiny(t)
		policies := []string{"exact"}
		if change == nil {
			policies = []string{"luck"}
		} else {
			change(&f)
		}
		if _, err := RunField(context.Background(), f, policies, nil); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := FieldByName("field-1t"); err == nil || !strings.Contains(err.Error(), "field-24h") {
		t.Errorf("%v", err)
	}
}

func TestPresetsCanBeRun(t *testing.T) {
	names := map[string]bool{}
	for _, f := range Presets() {
		if err := f.check(); err != nil || names[f.Name] {
			t.Errorf("%s: %v", f.Name, err)
		}
		names[f.Name] = true
		for _, r := range f.Reported {
			if r.Only != "" && !hasVariant(&f, r.Only) {
				t.Errorf("%s: no variant %q", f.Name, r.Only)
			}
		}
	}
}

func hasVariant(f *Field, name string) bool {
	for _, v := range f.Variants {
		if v.Name == name {
			return true
		}
	}
	return false
}

// raw sends requests straight to a device with a model, so many at a time, and returns how many a second it does of reads
// and writes, and what they take.
func raw(t *testing.T, m Model, reads, size, depth, n int) (readRate, writeRate float64, mean time.Duration, took []time.Duration) {
	t.Helper()
	err := simulate(1, func(r *rt.Runtime) error {
		dev, err := blockdev.Hollow(gib, blockdev.HollowOptions{Runtime: r})
		if err != nil {
			return err
		}
		io, err := blockdev.NewIO(blockdev.NewDelaying(dev, m.Latency), depth)
		if err != nil {
			return err
		}
		rng := rand.New(rand.NewPCG(1, 1))
		done := [2]int{}
		var g rt.WaitGroup
		g.Init(r)
		for range depth {
			g.Go("requests", func() {
				buf := make([]byte, size)
				for range n / depth {
					begin := r.Now()
					off := rng.Int64N(gib/int64(size)) * int64(size)
					op := 1
					var err error
					if rng.IntN(100) < reads {
						op, err = 0, io.ReadAt(buf, off)
					} else {
						err = io.WriteAt(buf, off, 0)
					}
					if err != nil {
						t.Error(err)
						return
					}
					done[op]++
					took = append(took, r.Now()-begin)
				}
			})
		}
		g.Wait()
		seconds := r.Now().Seconds()
		readRate, writeRate = float64(done[0])/seconds, float64(done[1])/seconds
		return errors.Join(io.Close(), dev.Close())
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range took {
		mean += d
	}
	return readRate, writeRate, mean / time.Duration(len(took)), took
}

// near reports whether a number is within a part of what it should be.
func within(got, want, part float64) bool { return math.Abs(got-want) <= want*part }

// The models give what was measured on the raw devices, and that is all that they are made from.
func TestModelsGiveTheRawFigures(t *testing.T) {
	_, _, mean, _ := raw(t, localSSD(), 100, 8*kib, 1, 5000)
	if !within(float64(mean), 106_640, 0.01) {
		t.Errorf("a read of 8 KiB takes %v, reported 106.64 us", mean)
	}
	reads, writes, _, _ := raw(t, localSSD(), 25, 8*kib, 12, 60_000)
	if !within(reads, 14_100, 0.05) || !within(writes, 42_200, 0.05) {
		t.Errorf("%.0f reads and %.0f writes a second, reported 14.1k and 42.2k", reads, writes)
	}
	for _, c := range []struct {
		m         Model
		mean, p99 time.Duration
		rate      float64
	}{
		{sataFresh(), 80650 * time.Nanosecond, 330 * time.Microsecond, 12_000},
		{sataWorn(), 1403600 * time.Nanosecond, 14746 * time.Microsecond, 710},
	} {
		_, rate, mean, took := raw(t, c.m, 0, 4*kib, 1, 200_000)
		over := 0
		for _, d := range took {
			if d > c.p99 {
				over++
			}
		}
		if !within(float64(mean), float64(c.mean), 0.05) || !within(rate, c.rate, 0.06) || !within(float64(over), float64(len(took))/100, 0.1) {
			t.Errorf("%s: mean %v, %.0f a second, %d of %d took more than %v", c.m.Name, mean, rate, over, len(took), c.p99)
		}
	}
}

// The page needs nothing from elsewhere, and the picture is one.
func TestFieldPictureAndPage(t *testing.T) {
	r := mustRun(t, tiny(t))
	var page, picture bytes.Buffer
	if err := errors.Join(r.WriteHTML(&page), r.WritePNG(&picture)); err != nil {
		t.Fatal(err)
	}
	if s := page.String(); strings.Contains(s, "http:") || strings.Contains(s, "https:") || !strings.Contains(s, r.About) {
		t.Errorf("%d bytes of a page that needs something, or has not the report", len(s))
	}
	img, err := png.Decode(&picture)
	if err != nil || img.Bounds().Dx() < 1000 {
		t.Errorf("%v, %v", img, err)
	}
}
