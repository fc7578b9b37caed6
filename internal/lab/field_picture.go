package lab

import (
	"bytes"
	_ "embed"
	"encoding/base64"
	"html/template"
	"io"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

var (
	//go:embed field.html
	fieldText string
	fieldPage = template.Must(template.New("field").Parse(fieldText))
)

// WritePNG writes a picture: for each job the greatest latency of each second of the span, one line a policy. Where a line is
// broken no request was done.
func (r *FieldReport) WritePNG(w io.Writer) error {
	jobs := 0
	for i := range r.Rows {
		jobs = max(jobs, len(r.Rows[i].Jobs))
	}
	const width, height = 16 * vg.Inch, 4.5 * vg.Inch
	img := vgimg.NewWith(vgimg.UseWH(width, height*vg.Length(max(jobs, 1))), vgimg.UseDPI(96))
	canvas := draw.New(img)
	tiles := draw.Tiles{Rows: max(jobs, 1), Cols: 1, PadX: 10, PadY: 10, PadTop: 8, PadBottom: 8, PadLeft: 8, PadRight: 12}
	for job := range jobs {
		p, err := r.plot(job)
		if err != nil {
			return err
		}
		p.Draw(tiles.At(canvas, 0, job))
	}
	_, err := vgimg.PngCanvas{Canvas: img}.WriteTo(w)
	return err
}

func (r *FieldReport) plot(job int) (*plot.Plot, error) {
	var g latencyRange
	title := r.Name
	lines := make([][]plotter.XYs, len(r.Rows))
	for i := range r.Rows {
		row := &r.Rows[i]
		if job >= len(row.Jobs) {
			continue
		}
		title = r.Name + ": " + row.Jobs[job].Job.Name + ", greatest latency of each second"
		var piece plotter.XYs
		for second, win := range row.Jobs[job].Windows {
			if win.Requests == 0 {
				if len(piece) > 0 {
					lines[i] = append(lines[i], piece)
				}
				piece = nil
				continue
			}
			piece = append(piece, plotter.XY{X: float64(second), Y: g.see(Duration(win.Max))})
		}
		if len(piece) > 0 {
			lines[i] = append(lines[i], piece)
		}
	}
	low, high := g.whole()
	p := newPlot(title, low, high)
	p.X.Label.Text = "simulated seconds"
	var policies []string
	for i := range r.Rows {
		row := &r.Rows[i]
		name := row.Policy
		if row.Variant != "" {
			name += ", " + row.Variant
		}
		if !slices.Contains(policies, name) {
			policies = append(policies, name)
		}
		for n, piece := range lines[i] {
			l, err := plotter.NewLine(piece)
			if err != nil {
				return nil, err
			}
			l.Color = colours[slices.Index(policies, name)%len(colours)]
			p.Add(l)
			if n == 0 {
				p.Legend.Add(name, l)
			}
		}
	}
	return p, nil
}

// WriteHTML writes the report as one page that needs nothing from elsewhere: the text and the picture.
func (r *FieldReport) WriteHTML(w io.Writer) error {
	var text, picture bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		return err
	}
	if err := r.WritePNG(&picture); err != nil {
		return err
	}
	return fieldPage.Execute(w, struct {
		Name, Text string
		Picture    template.URL
	}{r.Name, text.String(), template.URL("data:image/png;base64," + base64.StdEncoding.EncodeToString(picture.Bytes()))})
}
