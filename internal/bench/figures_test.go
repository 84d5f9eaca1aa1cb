package bench

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "draw docs/figures.svg anew from the tables of BENCHMARKS.md")

// The picture's measures, in pixels.
const (
	figuresWidth, figuresHeight = 900, 340
	barsLeft, barsRight         = 20, 410
	linesLeft, linesRight       = 500, 800
	figuresTop, figuresBottom   = 60, 300
)

// TestFigures: the README's picture shows the figures in the tables of BENCHMARKS.md.
func TestFigures(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, "BENCHMARKS.md"))
	if err != nil {
		t.Fatal(err)
	}
	stages, err := tableOf(string(text), "| ms from SIGKILL to | min | median |")
	if err != nil {
		t.Fatal(err)
	}
	sizes, err := tableOf(string(text), "| `bench -np 2 --sizes 4,64KiB,1MiB,64MiB")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := drawFigures(&b, stages, sizes); err != nil {
		t.Fatal(err)
	}
	for dec := xml.NewDecoder(bytes.NewReader(b.Bytes())); ; {
		if _, err := dec.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(root, "docs", "figures.svg")
	if *update {
		if err := os.WriteFile(path, b.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if old, err := os.ReadFile(path); err != nil || !bytes.Equal(old, b.Bytes()) {
		t.Errorf("docs/figures.svg does not show the figures of BENCHMARKS.md (%v): go test ./internal/bench -run TestFigures -update", err)
	}
}

// tableOf returns the cells of the first table whose header has this beginning, without the line
// below the header.
func tableOf(text, header string) (rows [][]string, err error) {
	_, table, found := strings.Cut(text, "\n"+header)
	if !found {
		return nil, fmt.Errorf("BENCHMARKS.md has no table %q", header)
	}
	table, _, _ = strings.Cut(header+table, "\n\n")
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "|---") {
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i, c := range cells {
			cells[i] = strings.Trim(c, " *")
		}
		rows = append(rows, cells)
	}
	return rows, nil
}

// figure returns the number at the beginning of a cell.
func figure(cell string) (float64, error) {
	word, _, _ := strings.Cut(cell, " ")
	return strconv.ParseFloat(strings.ReplaceAll(word, ",", ""), 64)
}

// drawFigures draws the stages of a recovery as bars, and all-reduces of several sizes as lines.
func drawFigures(b *bytes.Buffer, stages, sizes [][]string) error {
	fmt.Fprintf(b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d">`+"\n",
		figuresWidth, figuresHeight)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	if err := drawStages(b, stages); err != nil {
		return err
	}
	if err := drawSizes(b, sizes); err != nil {
		return err
	}
	b.WriteString("</svg>\n")
	return nil
}

// drawStages draws a bar to each median, and a line from there to the 99th percentile.
func drawStages(b *bytes.Buffer, stages [][]string) error {
	plotText(b, (barsLeft+barsRight)/2, 25, "middle", "ms from SIGKILL of one of 4 workers: median, line to p99")
	var medians, p99s []float64
	for _, row := range stages[1:] {
		if len(row) != 6 {
			return fmt.Errorf("BENCHMARKS.md: a row of recovery has %d cells: %q", len(row), row)
		}
		median, err := figure(row[2])
		p99, err2 := figure(row[4])
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		medians, p99s = append(medians, median), append(p99s, p99)
	}
	scale := (barsRight - barsLeft - 60) / maxOf(p99s)
	each := float64(figuresBottom-figuresTop) / float64(len(medians))
	for i, median := range medians {
		y := figuresTop + each*float64(i)
		plotText(b, barsLeft, y+10, "start", stages[i+1][0])
		fmt.Fprintf(b, `<rect x="%d" y="%.1f" width="%.1f" height="14" fill="%s"/>`+"\n", barsLeft, y+16, median*scale, plotColors[1])
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1[2]f" stroke="#555555" stroke-width="2"/>`+"\n",
			barsLeft+median*scale, y+23, barsLeft+p99s[i]*scale)
		plotText(b, barsLeft+p99s[i]*scale+6, y+27, "start", fmt.Sprintf("%s (%s)", stages[i+1][2], stages[i+1][4]))
	}
	return nil
}

func maxOf(v []float64) float64 {
	most := v[0]
	for _, x := range v {
		most = max(most, x)
	}
	return most
}

// drawSizes draws a line for each library over the sizes that all of them have.
func drawSizes(b *bytes.Buffer, sizes [][]string) error {
	names := sizes[0][1:]
	x, y := logAxis{from: linesLeft, to: linesRight}, logAxis{from: figuresBottom, to: figuresTop}
	var bytesOf []float64
	times := make([][]float64, len(names))
	for _, row := range sizes[1:] {
		n, err := parseSize(row[0])
		if err != nil {
			break // rows of variants follow
		}
		bytesOf = append(bytesOf, float64(n))
		x.include(float64(n))
		for i := range names {
			us, err := figure(row[i+1])
			if err != nil {
				return err
			}
			times[i] = append(times[i], us)
			y.include(us)
		}
	}
	if len(bytesOf) < 3 {
		return fmt.Errorf("BENCHMARKS.md: %d sizes of all-reduces", len(bytesOf))
	}
	y.low, y.high = math.Floor(y.low), math.Ceil(y.high)
	plotText(b, (linesLeft+linesRight)/2, 25, "middle", "all-reduce of float32, 2 ranks of a host: median µs over size")
	for p := y.low; p <= y.high; p++ {
		at := y.at(math.Pow(10, p))
		plotLine(b, linesLeft, at, linesRight, at)
		plotText(b, linesLeft-8, at+4, "end", fmt.Sprintf("%.10g", math.Pow(10, p)))
	}
	for _, n := range bytesOf {
		plotLine(b, x.at(n), figuresTop, x.at(n), figuresBottom)
		plotText(b, x.at(n), figuresBottom+18, "middle", SizeText(int(n)))
	}
	for i, name := range names {
		color := plotColors[(i+1)%len(plotColors)]
		fmt.Fprintf(b, `<polyline fill="none" stroke="%s" stroke-width="2" points="`, color)
		for j, n := range bytesOf {
			fmt.Fprintf(b, "%.1f,%.1f ", x.at(n), y.at(times[i][j]))
		}
		b.WriteString(`"/>` + "\n")
		plotText(b, linesRight+8, y.at(times[i][len(bytesOf)-1])+4, "start", name)
	}
	return nil
}

// plotColors are distinguishable with color blindness (Okabe and Ito).
var plotColors = []string{"#d55e00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7"}

const (
	plotFont = `font-family="sans-serif" font-size="12"`
	plotGrid = `stroke="#dddddd"`
)

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
