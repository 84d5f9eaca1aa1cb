package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/hvdrun/hvdrun/test/report"
)

// findings are the counts and times of a case. Those of several cases can be added. The zero value
// is empty.
type findings struct {
	counts  []count
	figures []*figure
}

// count is a number of something.
type count struct {
	name string
	n    int
}

// figure is a list of times that are printed together. The last is often the sum of the others.
type figure struct {
	title   string
	rows    []report.Row
	targets []report.Target // of the last row
}

func (f *findings) count(name string, n int) {
	at := slices.IndexFunc(f.counts, func(c count) bool { return c.name == name })
	if at < 0 {
		at = len(f.counts)
		f.counts = append(f.counts, count{name: name})
	}
	f.counts[at].n += n
}

// timed adds times to the figure with that title, and returns the figure. Its rows are in the order
// in which they were first added.
func (f *findings) timed(title string, rows ...report.Row) *figure {
	at := slices.IndexFunc(f.figures, func(g *figure) bool { return g.title == title })
	if at < 0 {
		at = len(f.figures)
		f.figures = append(f.figures, &figure{title: title})
	}
	g := f.figures[at]
	for _, r := range rows {
		at := slices.IndexFunc(g.rows, func(o report.Row) bool { return o.Name == r.Name })
		if at < 0 {
			at = len(g.rows)
			g.rows = append(g.rows, report.Row{Name: r.Name})
		}
		g.rows[at].Spread = append(g.rows[at].Spread, r.Spread...)
	}
	return g
}

func (f *findings) add(o findings) {
	for _, c := range o.counts {
		f.count(c.name, c.n)
	}
	for _, g := range o.figures {
		f.timed(g.title, g.rows...).targets = g.targets
	}
}

// String lists the counts that are not zero.
func (f *findings) String() string {
	var words []string
	for _, c := range f.counts {
		if c.n > 0 {
			words = append(words, fmt.Sprintf("%d %s", c.n, c.name))
		}
	}
	return strings.Join(words, ", ")
}

// print prints the figures.
func (f *findings) print(w io.Writer) {
	for _, g := range f.figures {
		last := len(g.rows) - 1
		report.Rows(w, g.title, g.rows[:last], g.rows[last], g.targets...)
	}
}

// write writes all times to a file, each in a line.
func (f *findings) write(path string) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	w := bufio.NewWriter(file)
	fmt.Fprintln(w, "from\tto\tms")
	for _, g := range f.figures {
		for _, r := range g.rows {
			for _, d := range r.Spread {
				fmt.Fprintf(w, "%s\t%s\t%.3f\n", g.title, strings.TrimSpace(r.Name), report.Milliseconds(d))
			}
		}
	}
	return w.Flush()
}
