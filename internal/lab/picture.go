package lab

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// colours are those of the page, in the order of the setup's policies.
var colours = []color.NRGBA{
	{0x1b, 0x78, 0x37, 0xff},
	{0xd7, 0x30, 0x27, 0xff},
	{0x45, 0x75, 0xb4, 0xff},
	{0xf3, 0x9c, 0x12, 0xff},
	{0x7b, 0x32, 0x94, 0xff},
	{0x00, 0x86, 0x8b, 0xff},
	{0x8c, 0x51, 0x0a, 0xff},
}

const shade = 0x20 // alpha of what is behind a collection

// WritePNG writes the page's charts as a picture: for each depth the greatest latency over time in the last round that was
// measured whole, and the percentiles of all rounds.
func (r *Result) WritePNG(w io.Writer) error {
	n := len(r.Setup.Depths)
	const width, height = 16 * vg.Inch, 4.5 * vg.Inch
	img := vgimg.NewWith(vgimg.UseWH(width, height*vg.Length(n)), vgimg.UseDPI(96))
	canvas := draw.New(img)
	tiles := draw.Tiles{Rows: n, Cols: 2, PadX: 10, PadY: 10, PadTop: 8, PadBottom: 8, PadLeft: 8, PadRight: 12}
	for i, depth := range r.Setup.Depths {
		for j, make := range []func(int) (*plot.Plot, error){r.timePlot, r.percentilePlot} {
			p, err := make(depth)
			if err != nil {
				return err
			}
			p.Draw(tiles.At(canvas, j, i))
		}
	}
	_, err := vgimg.PngCanvas{Canvas: img}.WriteTo(w)
	return err
}

func (r *Result) colour(policy string) color.NRGBA {
	return colours[slices.Index(r.Setup.Policies, policy)%len(colours)]
}

// newPlot makes one with a logarithmic axis of latencies in seconds from low to high.
func newPlot(title string, low, high float64) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.Y.Label.Text = title, "latency"
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.TickerFunc(latencyTicks)
	p.Y.Min, p.Y.Max = low, high
	p.Legend.Top, p.Legend.Left, p.Legend.YOffs = true, true, -6
	p.Add(plotter.NewGrid())
	return p
}

// latencyTicks are the powers of ten, with their units.
func latencyTicks(low, high float64) (list []plot.Tick) {
	for e := math.Floor(math.Log10(low)); math.Pow(10, e) <= high*1.0001; e++ {
		v := math.Pow(10, e)
		if v < low*0.9999 {
			continue
		}
		list = append(list, plot.Tick{Value: v, Label: Duration(math.Round(v * 1e9)).String()})
	}
	return list
}

// A latencyRange grows to whole powers of ten.
type latencyRange struct{ low, high float64 }

func (g *latencyRange) see(d Duration) float64 {
	v := max(d.Seconds(), 1e-7)
	if g.low == 0 {
		g.low, g.high = v, v
	}
	g.low, g.high = min(g.low, v), max(g.high, v)
	return v
}

func (g *latencyRange) whole() (low, high float64) {
	if g.low == 0 {
		return 1e-6, 1
	}
	low, high = math.Pow(10, math.Floor(math.Log10(g.low))), math.Pow(10, math.Ceil(math.Log10(g.high)))
	if low == high {
		high *= 10
	}
	return low, high
}

// lastRound returns the runs of the last round in which a depth was measured whole under all policies, or of the last one
// at all.
func (r *Result) lastRound(depth int) (list []*Run) {
	for round := r.Setup.Rounds; round > 0; round-- {
		var these []*Run
		whole := 0
		for _, p := range r.Setup.Policies {
			for _, x := range r.Runs {
				if x.Policy == p && x.Depth == depth && x.Round == round {
					these = append(these, x)
					if !x.Cut {
						whole++
					}
				}
			}
		}
		if whole == len(r.Setup.Policies) {
			return these
		}
		if len(list) == 0 {
			list = these
		}
	}
	return list
}

func (r *Result) timePlot(depth int) (*plot.Plot, error) {
	runs := r.lastRound(depth)
	var g latencyRange
	border := 0.0
	for _, x := range runs {
		border = max(border, float64(len(x.Without.Bins))*BinWidth.Seconds())
	}
	lines := make([][]plotter.XYs, len(runs)) // a piece for each time in which no bin is empty
	for i, x := range runs {
		for _, w := range []struct {
			at   float64
			bins []Bin
		}{{0, x.Without.Bins}, {border, x.With.Bins}} {
			empty := true
			for j, b := range w.bins {
				if b.Count == 0 {
					empty = true
					continue
				}
				if empty {
					lines[i] = append(lines[i], nil)
					empty = false
				}
				piece := &lines[i][len(lines[i])-1]
				from, y := w.at+float64(j)*BinWidth.Seconds(), g.see(b.Max)
				*piece = append(*piece, plotter.XY{X: from, Y: y}, plotter.XY{X: from + BinWidth.Seconds(), Y: y})
			}
		}
	}
	low, high := g.whole()
	title := fmt.Sprintf("depth %d: greatest latency in each %v", depth, BinWidth)
	if len(runs) > 0 {
		title += fmt.Sprintf(", round %d", runs[0].Round)
	}
	p := newPlot(title, low, high)
	p.X.Label.Text = "seconds; left of the line without collection, right of it with; shaded: a collection runs; no line: nothing completed"
	for i, x := range runs {
		c := r.colour(x.Policy)
		for _, w := range []struct {
			at    float64
			spans []Span
		}{{0, x.Without.Collections.Spans}, {border, x.With.Collections.Spans}} {
			for _, s := range w.spans {
				a, b := w.at+s.From.Seconds(), w.at+s.To.Seconds()
				area, err := plotter.NewPolygon(plotter.XYs{{X: a, Y: low}, {X: b, Y: low}, {X: b, Y: high}, {X: a, Y: high}})
				if err != nil {
					return nil, err
				}
				area.LineStyle.Width = 0
				area.Color = color.NRGBA{c.R, c.G, c.B, shade}
				p.Add(area)
			}
		}
		for j, piece := range lines[i] {
			line, err := plotter.NewLine(piece)
			if err != nil {
				return nil, err
			}
			line.Color, line.Width = c, vg.Points(0.8)
			p.Add(line)
			if j == 0 {
				p.Legend.Add(x.Policy, line)
			}
		}
	}
	middle, err := plotter.NewLine(plotter.XYs{{X: border, Y: low}, {X: border, Y: high}})
	if err != nil {
		return nil, err
	}
	p.Add(middle)
	p.Y.Min, p.Y.Max = low, high
	return p, nil
}

func (r *Result) percentilePlot(depth int) (*plot.Plot, error) {
	var g latencyRange
	type curve struct {
		policy        string
		without, with plotter.XYs
	}
	var list []curve
	for i := range r.Rows {
		x := &r.Rows[i]
		if x.Depth != depth {
			continue
		}
		c := curve{policy: x.Policy}
		for j, q := range x.Percentiles {
			c.without = append(c.without, plotter.XY{X: float64(j), Y: g.see(q.Without)})
			c.with = append(c.with, plotter.XY{X: float64(j), Y: g.see(q.With)})
		}
		list = append(list, c)
	}
	low, high := g.whole()
	p := newPlot(fmt.Sprintf("depth %d: percentiles, all rounds", depth), low, high)
	p.X.Label.Text = "percentile; dashed: without collection"
	var ticks []plot.Tick
	for i, q := range Percentiles {
		ticks = append(ticks, plot.Tick{Value: float64(i), Label: strconv.FormatFloat(q, 'f', -1, 64)})
	}
	p.X.Tick.Marker = plot.ConstantTicks(ticks)
	p.X.Tick.Label.Rotation, p.X.Tick.Label.XAlign = -math.Pi/4, draw.XLeft
	p.X.Min, p.X.Max = 0, float64(len(Percentiles)-1)
	for _, c := range list {
		with, err := plotter.NewLine(c.with)
		if err != nil {
			return nil, err
		}
		without, err := plotter.NewLine(c.without)
		if err != nil {
			return nil, err
		}
		with.Color, with.Width = r.colour(c.policy), vg.Points(1.5)
		without.Color, without.Dashes = r.colour(c.policy), []vg.Length{vg.Points(4), vg.Points(3)}
		p.Add(with, without)
		p.Legend.Add(c.policy, with)
	}
	p.Y.Min, p.Y.Max = low, high
	return p, nil
}
