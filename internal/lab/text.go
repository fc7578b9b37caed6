package lab

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// WriteText writes the result as a table, with what there is to be said to it.
func (r *Result) WriteText(w io.Writer) error {
	var b strings.Builder
	s := &r.Setup
	fmt.Fprintf(&b, "%s, requests of %d bytes in a range of %d MiB; cache %d MiB, backing device %d MiB, buckets of %d KiB; devices: %s%s\n",
		s.RW, s.BlockBytes, s.RangeBytes>>20, s.CacheBytes>>20, s.BackingBytes>>20, s.BucketBytes>>10, s.Devices, model(s.DeviceModel))
	fmt.Fprintf(&b, "%d rounds, windows of %v, in those with collection one is forced every %v; seed %d; %d CPUs%s\n",
		s.Rounds, s.Runtime, s.GCEvery, s.Seed, r.Machine.CPUs, map[bool]string{true: ", simulated time"}[r.Machine.Simulated])
	if r.Partial {
		fmt.Fprintf(&b, "ENDED EARLY, after %v: what was measured by then\n", r.Took)
	}
	b.WriteByte('\n')
	if len(r.Rows) > 0 {
		r.table(&b)
	}
	for i := range r.Rows {
		r.Rows[i].details(&b)
	}
	if len(r.Warnings) > 0 {
		b.WriteString("\n")
	}
	for _, x := range r.Warnings {
		fmt.Fprintf(&b, "WARNING: %s\n", x)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func model(name string) string {
	if name == "" {
		return ""
	}
	return ", made as slow as " + name
}

// table writes three lines a row: without, with, and the ratios.
func (r *Result) table(b *strings.Builder) {
	lines := [][]string{{"POLICY", "DEPTH", "NODES", "COLLECTION", "IOPS", "P50", "P99", "P99.9", "MAX", "LONGEST GAP", "ENDED", "MEAN", "LONGEST"}}
	figures := func(w *RowWindow) []string {
		l := &w.Latency
		return []string{fmt.Sprintf("%.0f", w.IOPS), l.P50.String(), l.P99.String(), l.P999.String(), l.Max.String(), w.Gap.String()}
	}
	for i := range r.Rows {
		x := &r.Rows[i]
		without := append([]string{x.Policy, fmt.Sprint(x.Depth), fmt.Sprint(x.Nodes), "without"}, figures(&x.Without)...)
		lines = append(lines, append(without, fmt.Sprint(x.Unasked), "", ""))
		with := append([]string{"", "", "", "with"}, figures(&x.With)...)
		lines = append(lines, append(with, fmt.Sprint(x.Collections), x.CollectionMean.String(), x.CollectionMax.String()))
		lines = append(lines, []string{
			"", "", "", "ratio", x.IOPS.String(), x.P50.String(), x.P99.String(), x.P999.String(), x.Max.String(), "", "", "", "",
		})
		if x.Rounds > 1 {
			lines = append(lines, []string{
				"", "", "", "its range", x.IOPS.spread(), x.P50.spread(), x.P99.spread(), x.P999.spread(), x.Max.spread(), "", "", "", "",
			})
		}
	}
	align(b, lines, 4)
}

// align writes columns, the first ones with their text at the left, the others at the right.
func align(b *strings.Builder, lines [][]string, left int) {
	width := make([]int, len(lines[0]))
	for _, l := range lines {
		for i, s := range l {
			width[i] = max(width[i], utf8.RuneCountInString(s))
		}
	}
	for _, l := range lines {
		var line strings.Builder
		for i, s := range l {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(s))
			if i < left {
				s += pad
			} else {
				s = pad + s
			}
			line.WriteString(s + "  ")
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
}

func (r Ratio) String() string { return fmt.Sprintf("%.2f", r.Median) }

func (r Ratio) spread() string { return fmt.Sprintf("%.2f-%.2f", r.Least, r.Most) }

// details writes what a row has no column for.
func (x *Row) details(b *strings.Builder) {
	fmt.Fprintf(b, "\n%s, depth %d, in the windows with collection:\n", x.Policy, x.Depth)
	if len(x.Waits) > 0 {
		waits := slices.Clone(x.Waits)
		slices.SortStableFunc(waits, func(a, b Wait) int { return int(min(max(b.Total-a.Total, -1), 1)) })
		list := make([]string, len(waits))
		for i, w := range waits {
			list[i] = fmt.Sprintf("%s %d times, %v", w.Cause, w.Count, w.Total)
		}
		fmt.Fprintf(b, "  waits of more than 100µs: %s\n", strings.Join(list, "; "))
	} else {
		fmt.Fprintf(b, "  waits of more than 100µs: none was counted\n")
	}
	w := &x.Work
	if x.Policy == "exact" {
		fmt.Fprintf(b, "  done meanwhile: %d full sweeps, %d nodes swept, %d mostly stale ones rewritten, %d coalesced; %d passes of the verifier; %d MiB moved, out of %d buckets\n",
			w.Sweeps, w.NodesSwept, w.NodesStale, w.Coalesced, w.Verifications, w.MovedBytes>>20, w.MovedBuckets)
	} else {
		fmt.Fprintf(b, "  collections have held requests back %d times, for %v on average; since the set was opened for %v at most\n", x.Holds, x.HoldMean, x.HoldMax)
	}
	fmt.Fprintf(b, "  index: %d nodes rewritten, %d appends, %d splits; %d buckets evicted; %d times that data found no bucket ready; %.1f %% of the writes did not stay in the cache for want of room\n",
		w.NodeRewrites, w.NodeAppends, w.Splits, w.Evicted, w.NoBucket, 100*x.Declined)
}

// Line is progress as one line of text.
func (p Progress) Line() string {
	where := fmt.Sprintf("round %d, %s", p.Round, p.Policy)
	if p.Depth > 0 {
		where += fmt.Sprintf(", depth %d", p.Depth)
	}
	switch p.Stage {
	case "fill":
		return fmt.Sprintf("%s: fill %.0f %%, %d nodes", where, 100*p.Done/p.Of, p.Nodes)
	case "settle":
		return fmt.Sprintf("%s: waiting for what was begun", where)
	}
	line := fmt.Sprintf("%s, %s: %.0f of %.0f s", where, p.Stage, p.Done, p.Of)
	if p.Elapsed > 0 {
		line += fmt.Sprintf(", %.0f IOPS", float64(p.Requests)/p.Elapsed.Seconds())
	}
	if p.Collections > 0 {
		line += fmt.Sprintf(", %d collections", p.Collections)
	}
	if over := p.Elapsed - time.Duration(p.Of*float64(time.Second)); over > time.Second {
		line += fmt.Sprintf(", requests overdue for %v", Duration(over))
	}
	return line
}

// Share is how much of all is done, from 0 to 1, a window counting as much as a fill.
func (p Progress) Share() float64 {
	if p.Stage == "settle" {
		return min(float64(p.Step+1)/float64(p.Steps), 1)
	}
	return min((float64(p.Step)+p.Done/p.Of)/float64(p.Steps), 1)
}
