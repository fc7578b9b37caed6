package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/term"
)

// A demoLive is the line that shows how a load goes: it rewrites itself on a terminal and is a line each time
// elsewhere.
type demoLive struct {
	w        io.Writer
	terminal *os.File // nil: none
}

func newDemoLive(w io.Writer) *demoLive {
	l := &demoLive{w: w}
	if o, ok := w.(*demoOutput); ok {
		w = o.Writer
	}
	if c, ok := w.(*checkedWriter); ok {
		w = c.w
	}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		l.terminal = f
	}
	return l
}

const eraseLine = "\r\x1b[K"

func (l *demoLive) set(text string) {
	text = "   " + text
	if l.terminal == nil {
		fmt.Fprintln(l.w, text)
		return
	}
	if width, _, err := term.GetSize(int(l.terminal.Fd())); err == nil && width > 0 && len(text) >= width {
		text = text[:width-1] // what goes on in the next line could not be erased
	}
	fmt.Fprint(l.w, eraseLine, text)
}

// end takes the line away.
func (l *demoLive) end() {
	if l.terminal != nil {
		fmt.Fprint(l.w, eraseLine)
	}
}

// demoLine is the live line for the figures of an interval. Without a cache there are no hits.
func demoLine(now time.Duration, f *demoFigures, cached bool) string {
	hits := ""
	if cached {
		hits = fmt.Sprintf("  hits %4.1f %%", 100*f.hits())
	}
	both := func(h *hdrhistogram.Histogram) string {
		return strings.TrimSuffix(latency(h, 50), " ms") + "/" + latency(h, 99)
	}
	return fmt.Sprintf("%3.0f s  %6.0f IOPS%s  reads %s  writes %s", now.Seconds(), f.iops(), hits, both(f.reads), both(f.writes))
}

// latency prints a percentile with three digits; 100 is the maximum.
func latency(h *hdrhistogram.Histogram, percentile float64) string {
	if h.TotalCount() == 0 {
		return "-"
	}
	ns := h.Max()
	if percentile < 100 {
		ns = h.ValueAtQuantile(percentile)
	}
	switch ms := float64(ns) / 1e6; {
	case ms < 0.1:
		return fmt.Sprintf("%.3f ms", ms)
	case ms < 10:
		return fmt.Sprintf("%.2f ms", ms)
	default:
		return fmt.Sprintf("%.0f ms", ms)
	}
}

// A demoColumn is one measured load.
type demoColumn struct {
	name   string
	cached bool
	f      *demoFigures
}

// demoTable prints the loads side by side.
func demoTable(w io.Writer, columns []demoColumn) {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	row := func(name string, cell func(c *demoColumn) string) {
		// the first column is aligned to the left: padded here
		fmt.Fprintf(t, "   %-15s\t", name)
		for i := range columns {
			fmt.Fprintf(t, "%s\t", cell(&columns[i]))
		}
		fmt.Fprintln(t)
	}
	row("", func(c *demoColumn) string { return c.name })
	row("IOPS", func(c *demoColumn) string { return fmt.Sprintf("%.0f", c.f.iops()) })
	for _, kind := range []string{"reads", "writes"} {
		for _, p := range []struct {
			name       string
			percentile float64
		}{{"p50", 50}, {"p99", 99}, {"maximum", 100}} {
			row(kind+", "+p.name, func(c *demoColumn) string {
				if kind == "reads" {
					return latency(c.f.reads, p.percentile)
				}
				return latency(c.f.writes, p.percentile)
			})
		}
	}
	row("hit ratio", func(c *demoColumn) string {
		if !c.cached {
			return "-"
		}
		return fmt.Sprintf("%.1f %%", 100*c.f.hits())
	})
	t.Flush()
}

// demoVerdict says what the table means. bare is the disk alone, all the whole of the cached load, warm its end.
func demoVerdict(bare, all, warm *demoFigures) string {
	var s strings.Builder
	fmt.Fprintf(&s, "Of 100 reads, %.0f did not wait for the disk; at the end, with the cache filled by then, %.0f.\n", 100*all.hits(), 100*warm.hits())
	fmt.Fprintf(&s, "Half of the reads then took at most %s, instead of %s.\n", latency(warm.reads, 50), latency(bare.reads, 50))
	switch r := ratio(median(bare.writes), median(warm.writes)); {
	case r > 1.5:
		fmt.Fprintf(&s, "Half of the writes took at most %s, instead of %s.\n", latency(warm.writes, 50), latency(bare.writes, 50))
	case r > 0.67:
		s.WriteString("Writes took as long as before: each goes to the disk before it is acknowledged (write-through).\n")
	default:
		fmt.Fprintf(&s, "Writes took %s instead of %s: each goes to the disk, and also to the file of the cache.\n",
			latency(warm.writes, 50), latency(bare.writes, 50))
	}
	if r := ratio(warm.iops(), bare.iops()); r >= 1.1 {
		fmt.Fprintf(&s, "At the end, %.1f times as many requests in the same time.", r)
	} else {
		fmt.Fprintf(&s, "No gain at the end, %.2f times as many requests in the same time: are temporary files on a slow disk here?", r)
	}
	return s.String()
}

func median(h *hdrhistogram.Histogram) float64 { return float64(h.ValueAtQuantile(50)) }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}
