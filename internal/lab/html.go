package lab

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strings"
)

// uPlot draws the charts of the page. See uplot/README.
var (
	//go:embed uplot/uPlot.iife.min.js
	uplotJS string
	//go:embed uplot/uPlot.min.css
	uplotCSS string
	//go:embed uplot/LICENSE
	uplotLicence string

	//go:embed page.html
	pageText string
	//go:embed page.js
	pageJS string

	page = template.Must(template.New("page").Parse(pageText))
)

// A pageRun is what the page's charts show of a Run. Times are in seconds.
type pageRun struct {
	Policy  string     `json:"policy"`
	Depth   int        `json:"depth"`
	Round   int        `json:"round"`
	Without pageWindow `json:"without"`
	With    pageWindow `json:"with"`
}

type pageWindow struct {
	P99   []*float64   `json:"p99"` // of each bin; null: nothing completed
	Max   []*float64   `json:"max"`
	Spans [][2]float64 `json:"spans"`
	Took  float64      `json:"took"`
}

type pageData struct {
	Policies    []string             `json:"policies"`
	Depths      []int                `json:"depths"`
	Rounds      int                  `json:"rounds"`
	Bin         float64              `json:"bin"`
	Runs        []pageRun            `json:"runs"`
	Percentiles []float64            `json:"percentiles"`
	Curves      map[string]pageCurve `json:"curves"` // by "policy depth"
}

type pageCurve struct {
	Without []float64 `json:"without"`
	With    []float64 `json:"with"`
}

// WriteHTML writes the result as one page that needs nothing from elsewhere.
func (r *Result) WriteHTML(w io.Writer) error {
	d := pageData{
		Policies: r.Setup.Policies, Depths: r.Setup.Depths, Rounds: r.Setup.Rounds, Bin: BinWidth.Seconds(),
		Runs: []pageRun{}, Percentiles: Percentiles, Curves: map[string]pageCurve{},
	}
	for _, x := range r.Runs {
		d.Runs = append(d.Runs, pageRun{x.Policy, x.Depth, x.Round, x.Without.page(), x.With.page()})
	}
	for i := range r.Rows {
		x := &r.Rows[i]
		var c pageCurve
		for _, p := range x.Percentiles {
			c.Without, c.With = append(c.Without, p.Without.Seconds()), append(c.With, p.With.Seconds())
		}
		d.Curves[fmt.Sprintf("%s %d", x.Policy, x.Depth)] = c
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		return err
	}
	return page.Execute(w, struct {
		Result   *Result
		Text     string
		Data     pageData
		CSS      template.CSS
		UPlot    template.JS
		Script   template.JS
		Licences template.HTML
	}{
		r, text.String(), d, template.CSS(uplotCSS), template.JS(uplotJS), template.JS(pageJS),
		template.HTML("<!-- This page has uPlot in it, which is under this licence:\n\n" + uplotLicence + "\n-->"),
	})
}

func (w *Window) page() pageWindow {
	p := pageWindow{Spans: [][2]float64{}, Took: w.Took.Seconds()}
	for _, b := range w.Bins {
		if b.Count == 0 {
			p.P99, p.Max = append(p.P99, nil), append(p.Max, nil)
			continue
		}
		p99, most := b.P99.Seconds(), b.Max.Seconds()
		p.P99, p.Max = append(p.P99, &p99), append(p.Max, &most)
	}
	for _, s := range w.Collections.Spans {
		p.Spans = append(p.Spans, [2]float64{s.From.Seconds(), s.To.Seconds()})
	}
	return p
}
