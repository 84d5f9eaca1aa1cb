package bench

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
)

// The plot's dimensions, in pixels.
const (
	plotWidth, plotHeight        = 800, 500
	plotLeft, plotTop            = 80, 50
	plotRight, plotBottom        = plotWidth - 150, plotHeight - 60
	plotFont                     = `font-family="sans-serif" font-size="12"`
	plotGrid                     = `stroke="#dddddd"`
	plotTitle, plotTimes, plotBy = "%s, float32, %d ranks: median time over size", "µs", "bytes"
)

// plotColors are distinguishable with color blindness (Okabe and Ito).
var plotColors = []string{"#d55e00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7"}

// WritePlot plots the medians over the sizes as an SVG with logarithmic axes.
func (r *Report) WritePlot(w io.Writer) error {
	x, y := logAxis{from: plotLeft, to: plotRight}, logAxis{from: plotBottom, to: plotTop}
	sizes := r.sizes()
	type point struct{ size, us float64 }
	lines := map[string][]point{}
	for _, peer := range r.peers() {
		for _, size := range sizes {
			if row, ok := r.row(peer, r.Op, size); ok {
				lines[peer] = append(lines[peer], point{float64(max(size, 1)), row.Median})
				x.include(float64(max(size, 1)))
				y.include(row.Median)
			}
		}
	}
	y.low, y.high = math.Floor(y.low), math.Ceil(y.high)
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d">`+"\n", plotWidth, plotHeight)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	plotText(&b, plotWidth/2, 25, "middle", fmt.Sprintf(plotTitle, r.Op, r.Ranks))
	for p := y.low; p <= y.high; p++ {
		at := y.at(math.Pow(10, p))
		plotLine(&b, plotLeft, at, plotRight, at)
		plotText(&b, plotLeft-8, at+4, "end", fmt.Sprintf("%g", math.Pow(10, p)))
	}
	last := math.Inf(-1)
	for _, size := range sizes {
		at := x.at(float64(max(size, 1)))
		plotLine(&b, at, plotTop, at, plotBottom)
		if at-last >= 45 { // labels must not overlap
			plotText(&b, at, plotBottom+18, "middle", SizeText(size))
			last = at
		}
	}
	plotText(&b, plotLeft-8, plotTop-12, "end", plotTimes)
	plotText(&b, (plotLeft+plotRight)/2, plotBottom+42, "middle", plotBy)
	for i, peer := range r.peers() {
		color := plotColors[i%len(plotColors)]
		fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="2" points="`, color)
		for _, p := range lines[peer] {
			fmt.Fprintf(&b, "%.1f,%.1f ", x.at(p.size), y.at(p.us))
		}
		b.WriteString(`"/>` + "\n")
		for _, p := range lines[peer] {
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x.at(p.size), y.at(p.us), color)
		}
		at := float64(plotTop + 10 + 20*i)
		fmt.Fprintf(&b, `<rect x="%d" y="%.1f" width="14" height="4" fill="%s"/>`+"\n", plotRight+14, at-6, color)
		plotText(&b, plotRight+34, at, "start", peer)
	}
	b.WriteString("</svg>\n")
	_, err := w.Write(b.Bytes())
	return err
}

func plotLine(b *bytes.Buffer, x1, y1, x2, y2 float64) {
	fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" %s/>`+"\n", x1, y1, x2, y2, plotGrid)
}

func plotText(b *bytes.Buffer, x, y float64, anchor, text string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" %s>`, x, y, anchor, plotFont)
	_ = xml.EscapeText(b, []byte(text)) // writing to a buffer never fails
	b.WriteString("</text>\n")
}

// logAxis maps values to pixels logarithmically.
type logAxis struct {
	from, to  float64
	low, high float64 // decimal logarithms
	begun     bool
}

func (a *logAxis) include(v float64) {
	l := math.Log10(v)
	if !a.begun {
		a.low, a.high, a.begun = l, l, true
	}
	a.low, a.high = min(a.low, l), max(a.high, l)
}

func (a *logAxis) at(v float64) float64 {
	if a.high == a.low {
		return (a.from + a.to) / 2
	}
	return a.from + (math.Log10(v)-a.low)/(a.high-a.low)*(a.to-a.from)
}
