package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"image/png"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
)

const ms = Duration(time.Millisecond)

// made is a result of two policies in three rounds, of which the second ratio is the median, and a fourth that was cut short.
func made() *Result {
	s := Defaults()
	s.Policies, s.Depths, s.Rounds, s.Runtime = []string{"exact", "classic"}, []int{1, 8}, 4, Duration(3*time.Second)
	s.DefaultRange()
	r := &Result{
		Version: ResultVersion, Setup: s, Machine: Machine{CPUs: 2, System: "linux/amd64", Go: "go1.26"},
		Began: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Took: Duration(time.Minute), Partial: true, Warnings: []string{"</script><b>&"},
	}
	window := func(base, slow time.Duration, n int) Window {
		rec := NewRecorder(0)
		now := time.Duration(0)
		for i := range n {
			d := base + time.Duration(i)*time.Microsecond
			if i == n/2 {
				d = slow
			}
			now += d
			rec.Record(now, d, i%2 == 0, 4096, int64(i)<<12)
		}
		rec.End(now)
		return rec.window()
	}
	for _, p := range s.Policies {
		for _, d := range s.Depths {
			for round, slow := range []time.Duration{2, 8, 4, 900} {
				x := &Run{Policy: p, Depth: d, Round: round + 1, Nodes: 1000 + round, Cut: round == 3}
				factor := time.Duration(1)
				if p == "classic" {
					factor = 100
				}
				x.Without = window(time.Millisecond, 10*time.Millisecond, 1000)
				x.With = window(time.Millisecond, 5*time.Millisecond*slow*factor, 1000)
				x.With.Collections = Collections{Completed: 2, Mean: 300 * ms, Max: Duration(round+1) * 100 * ms, Spans: []Span{{500 * ms, 800 * ms}, {1500 * ms, 1800 * ms}}}
				if p == "classic" {
					c := &x.With.Collections
					c.Holds, c.HoldTotal, c.HoldMax = 10, 50*ms, Duration(round+7)*ms
				}
				x.With.Waits = []Wait{{"node read", 3, 2 * ms}, {"allocation", uint64(round + 1), 20 * ms}}
				x.With.Work = Work{Sweeps: 2, NodesSwept: 2000, Verifications: 1, MovedBytes: 3 << 20, MaxLag: round}
				x.With.Load = Served{Writes: 500, Declined: 50}
				r.Runs = append(r.Runs, x)
			}
		}
	}
	r.makeRows()
	return r
}

func TestRows(t *testing.T) {
	r := made()
	if len(r.Rows) != 4 {
		t.Fatalf("%d rows", len(r.Rows))
	}
	x := &r.Rows[0]
	if x.Rounds != 3 || x.Max != (Ratio{2, 1, 4}) || x.Nodes != 1001 || x.With.Worst != 40*ms || x.With.Latency.Max != 20*ms {
		t.Errorf("rounds %d, ratio of maxima %+v, nodes %d, worst %v, %v", x.Rounds, x.Max, x.Nodes, x.With.Worst, x.With.Latency.Max)
	}
	if x.Collections != 6 || x.CollectionMean != 300*ms || x.CollectionMax != 300*ms {
		t.Errorf("%d collections, mean %v, longest %v", x.Collections, x.CollectionMean, x.CollectionMax)
	}
	if want := []Wait{{"node read", 9, 6 * ms}, {"allocation", 6, 60 * ms}}; !reflect.DeepEqual(x.Waits, want) {
		t.Errorf("waits %v", x.Waits)
	}
	if x.Work.NodesSwept != 6000 || x.Work.MaxLag != 2 || x.Declined != 0.1 {
		t.Errorf("work %+v, declined %v", x.Work, x.Declined)
	}
	if p := x.Percentiles[len(x.Percentiles)-1]; p.Percentile != 100 || p.With != 40*ms || p.Without != 10*ms {
		t.Errorf("%+v", p)
	}
	if y := &r.Rows[2]; y.Holds != 30 || y.HoldMean != 5*ms || y.HoldMax != 9*ms {
		t.Errorf("%d holds, %v, %v", y.Holds, y.HoldMean, y.HoldMax)
	}
	if y := &r.Rows[2]; y.Policy != "classic" || y.Max != (Ratio{200, 100, 400}) {
		t.Errorf("%s: %+v", y.Policy, y.Max)
	}
}

func TestMedianAndRatio(t *testing.T) {
	if got := medianOf([]float64{4, 1, 2, 8}); got != 3 {
		t.Errorf("of four: %v", got)
	}
	if got := medianOf(nil); got != 0 {
		t.Errorf("of none: %v", got)
	}
	zero := []*Run{{}, {Without: Window{IOPS: 2}, With: Window{IOPS: 3}}}
	if got := ratio(zero, func(w *Window) float64 { return w.IOPS }); got != (Ratio{1.5, 1.5, 1.5}) {
		t.Errorf("%+v", got)
	}
}

// UPDATE=1 writes what it is now.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE") == "1" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what it was; UPDATE=1 takes it over. Now:\n%s", name, got)
	}
}

// What warnings say of exact is what it has: sweeps. A window that was cut short is said to be one where there is no whole one instead.
func TestWarnings(t *testing.T) {
	r := &Result{Setup: made().Setup}
	collections := func(n int) Window { return Window{Took: r.Setup.Runtime, Collections: Collections{Completed: n}} }
	cut := collections(1)
	cut.Took = Duration(700 * time.Millisecond)
	r.Runs = []*Run{
		{Policy: "exact", Depth: 1, Round: 1, Without: collections(3), With: collections(1)},
		{Policy: "exact", Depth: 8, Round: 1, Without: collections(0), With: collections(0)},
		{Policy: "classic", Depth: 1, Round: 1, Without: collections(3), With: collections(0)},
		{Policy: "classic", Depth: 8, Round: 1, Without: collections(0), With: cut, Cut: true},
	}
	says := func() string {
		r.makeRows()
		r.Warnings = nil
		(&laboratory{Config: Config{Setup: r.Setup}, result: r}).warn()
		return strings.Join(r.Warnings, "\n")
	}
	const short = "policy classic, depth 8: the window with collection was ended after 700ms of 3s"
	got := says()
	for _, want := range []string{
		"policy exact, depth 1: 3 sweeps that nobody asked for", "policy exact, depth 8: NO SWEEP ENDED",
		"policy classic, depth 1: 3 collections that nobody asked for", "policy classic, depth 1: NO COLLECTION ENDED", short,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if whole, part := r.Windows(); whole != 7 || !part {
		t.Errorf("%d windows, and a part of one: %v", whole, part)
	}

	last := r.Runs[3]
	whole := &Run{Policy: "classic", Depth: 8, Round: 1, Without: collections(0), With: collections(1)}
	r.Runs = append(r.Runs[:3:3], whole, last)
	if got := says(); strings.Contains(got, short) {
		t.Errorf("there is a whole window, and it says\n%s", got)
	}
	last.With.Took = r.Setup.Runtime // it was interrupted when all was measured
	r.Runs = []*Run{last}
	if n, part := r.Windows(); n != 2 || part || strings.Contains(says(), short) {
		t.Errorf("%d windows, and a part of one: %v\n%s", n, part, says())
	}
}

func TestText(t *testing.T) {
	var b strings.Builder
	if err := made().WriteText(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.txt", b.String())
}

func TestJSON(t *testing.T) {
	r := made()
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"version": 1`, `"max_seconds": 0.02`, `"seed": 1`, `"runtime_seconds": 3`, `"cache_bytes": 2147483648`, `"cpus": 2`} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %s", want)
		}
	}
	var back Result
	if err := json.Unmarshal(b.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back.Rows, r.Rows) || !reflect.DeepEqual(back.Setup, r.Setup) || !reflect.DeepEqual(back.Runs[5].With.Bins, r.Runs[5].With.Bins) {
		t.Error("it reads as something else")
	}
}

// loads matches what makes a browser fetch something, or a script do so.
var loads = regexp.MustCompile(`(?i)(src|href|srcset|action|poster|data)\s*=\s*["']?\s*(https?:)?//|url\(\s*["']?(https?:)?//|@import|\bfetch\(|XMLHttpRequest|WebSocket|importScripts|<link|<iframe|<img`)

func TestPageNeedsNothingElse(t *testing.T) {
	var b strings.Builder
	if err := made().WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	if m := loads.FindString(text); m != "" {
		t.Errorf("the page has %q", m)
	}
	for _, want := range []string{"default-src 'none'", "Copyright (c) 2022 Leon Sorokin", "Permission is hereby granted", "Ended early", "var uPlot=", `"exact 8"`, "&lt;/script&gt;&lt;b&gt;&amp;"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if n := strings.Count(text, "</script>"); n != 3 {
		t.Errorf("%d scripts end", n)
	}
	for _, bad := range []string{`<script src="https://x/y.js">`, `<link rel=stylesheet href=x>`, "background: url(//x/y)", `<a href='http://x'>`} {
		if !loads.MatchString(bad) {
			t.Errorf("%s would not be found", bad)
		}
	}
	_, data, _ := strings.Cut(text, `<script type="application/json" id="data">`)
	data, _, _ = strings.Cut(data, "</script>")
	var d pageData
	if err := json.Unmarshal([]byte(data), &d); err != nil {
		t.Fatal(err)
	}
	if len(d.Runs) != 16 || len(d.Curves["classic 1"].With) != len(Percentiles) || len(d.Runs[0].With.Spans) != 2 {
		t.Errorf("data of the page: %d runs, curves %v", len(d.Runs), d.Curves)
	}
}

func TestPicture(t *testing.T) {
	empty := made()
	empty.Runs, empty.Rows = nil, nil
	for name, r := range map[string]*Result{"all": made(), "nothing": empty} {
		var b bytes.Buffer
		if err := r.WritePNG(&b); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		img, err := png.Decode(bytes.NewReader(b.Bytes()))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := img.Bounds().Size(); got.X != 16*96 || got.Y != 9*96 {
			t.Errorf("%s: %v", name, got)
		}
		red := 0
		for y := range img.Bounds().Dy() {
			for x := range img.Bounds().Dx() {
				if r, g, b, _ := img.At(x, y).RGBA(); r>>8 == 0xd7 && g>>8 == 0x30 && b>>8 == 0x27 {
					red++
				}
			}
		}
		if (red > 100) != (name == "all") {
			t.Errorf("%s: %d points have the colour of classic", name, red)
		}
		if path := os.Getenv("UBCACHE_PICTURE"); path != "" && name == "all" {
			if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestDurationText(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 123: "123ns", 1234: "1.23µs", 12345: "12.3µs", 123456: "123µs", 1234567: "1.23ms", 12345678: "12.3ms",
		1234567890: "1.23s", 61 * time.Second: "1m1s", 999_999: "1ms", 99_960: "100µs",
	} {
		if got := Duration(d).String(); got != want {
			t.Errorf("%d: %s, want %s", d, got, want)
		}
	}
}

func TestProgressLine(t *testing.T) {
	p := Progress{Stage: "with collection", Policy: "exact", Depth: 8, Round: 2, Step: 3, Steps: 10, Done: 5, Of: 10, Requests: 100, Elapsed: 5 * time.Second, Collections: 2}
	if got := p.Line(); got != "round 2, exact, depth 8, with collection: 5 of 10 s, 20 IOPS, 2 collections" {
		t.Error(got)
	}
	if p.Share() != 0.35 {
		t.Error(p.Share())
	}
	p.Elapsed, p.Done = 13*time.Second, 10
	if got := p.Line(); !strings.HasSuffix(got, "requests overdue for 3s") {
		t.Error(got)
	}
}

func TestChecksOfASetup(t *testing.T) {
	for want, change := range map[string]func(s *Setup){
		"no policy is given":     func(s *Setup) { s.Policies = nil },
		"is given twice":         func(s *Setup) { s.Policies = []string{"exact", "exact"} },
		`no load "write"`:        func(s *Setup) { s.RW = "write" },
		"requests of 1000 bytes": func(s *Setup) { s.BlockBytes = 1000 },
		"no depth is given":      func(s *Setup) { s.Depths = nil },
		"a depth of 0":           func(s *Setup) { s.Depths = []int{0} },
		"depth 4 is given twice": func(s *Setup) { s.Depths = []int{4, 4} },
		"with only 64 blocks":    func(s *Setup) { s.CacheBytes = 1 << 20 },
		"a range of 9":           func(s *Setup) { s.RangeBytes = 9 << 30 },
		"a runtime of 1ms":       func(s *Setup) { s.Runtime = ms },
		"collections every 0s":   func(s *Setup) { s.GCEvery = 0 },
		"0 rounds":               func(s *Setup) { s.Rounds = 0 },
		"-1 nodes":               func(s *Setup) { s.Nodes = -1 },
		"a node cache of 1000":   func(s *Setup) { s.NodeCache = 1000 },
	} {
		s := Defaults()
		s.DefaultRange()
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
		s.RangeBytes = 0
		change(&s)
		r, err := Measure(context.Background(), Config{Setup: s})
		if r != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
