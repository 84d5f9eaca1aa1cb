package main

import (
	"fmt"
	"math"
	"strings"
)

// The size of the picture and its margins.
const (
	width, height = 640, 400
	left, bottom  = 50, 30
)

var colours = []string{"#1b6ca8", "#c8553d", "#3a7d44", "#7b5ea7", "#b8860b"}

// picture returns an SVG of the loss of each trial by epoch, on a logarithmic scale.
func picture(results []result) string {
	low, high, epochs := math.Inf(1), math.Inf(-1), 1
	for _, r := range results {
		for _, l := range r.Loss {
			low, high = min(low, l), max(high, l)
		}
		epochs = max(epochs, len(r.Loss))
	}
	x := func(epoch int) float64 { return left + float64(epoch)/float64(max(epochs-1, 1))*(width-left-10) }
	y := func(loss float64) float64 {
		if high <= low {
			return height / 2
		}
		return 10 + math.Log(high/loss)/math.Log(high/low)*(height-bottom-20)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	for _, loss := range []float64{high, math.Sqrt(high * low), low} {
		if len(results) == 0 {
			break
		}
		fmt.Fprintf(&b, `<text x="4" y="%.1f">%.3f</text><path d="M%d %.1fH%d" stroke="#ddd"/>`+"\n", y(loss)+4, loss, left, y(loss), width-10)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d">loss by epoch, 1 to %d</text>`+"\n", left, height-8, epochs)
	for i, r := range results {
		colour := colours[i%len(colours)]
		var points []string
		for e, l := range r.Loss {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(e), y(l)))
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(points, " "), colour)
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end" fill="%s">rate %g, momentum %g, %d hidden: %.4f</text>`+"\n",
			width-10, 24+16*i, colour, r.Rate, r.Momentum, r.Hidden, r.Accuracy)
	}
	b.WriteString("</svg>\n")
	return b.String()
}
