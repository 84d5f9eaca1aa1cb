// Package report prints the results of tests and measurements of whole jobs: distributions of
// times, tables, and whether targets are met.
package report

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// Row is a line of [Rows]: a spread and its name.
type Row struct {
	Name   string
	Spread Spread
}

// Rows prints the quantiles of spreads under a title, in milliseconds: first the parts of a time,
// then the time itself, with its histogram and its targets.
func Rows(w io.Writer, title string, parts []Row, total Row, targets ...Target) {
	fmt.Fprintf(w, "\n%s\n%s\n", title, header)
	for _, r := range parts {
		fmt.Fprintln(w, r.Spread.row(r.Name))
	}
	fmt.Fprintln(w, total.Spread.row(total.Name))
	fmt.Fprint(w, total.Spread.histogram())
	for _, t := range targets {
		fmt.Fprintf(w, "target %s at most %v: %s\n", t.Name, t.Limit, Verdict(total.Spread.Quantile(t.Quantile) <= t.Limit))
	}
}

// Target is a bound on a quantile.
type Target struct {
	Name     string
	Quantile float64
	Limit    time.Duration
}

// Verdict says whether a target is met.
func Verdict(met bool) string {
	if met {
		return "met"
	}
	return "MISSED"
}

// Table is a table of texts, whose first row is the header. All rows have the same number of cells.
type Table [][]string

// Add adds a row of values, formatted by fmt.Sprint. The caller formats times and sizes.
func (t *Table) Add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = fmt.Sprint(c)
	}
	*t = append(*t, row)
}

// Text formats the table for a terminal: the first column is aligned left, the others right.
func (t Table) Text() string {
	widths := make([]int, len(t[0]))
	for _, row := range t {
		for i, cell := range row {
			widths[i] = max(widths[i], len(cell))
		}
	}
	var text strings.Builder
	for _, row := range t {
		fmt.Fprintf(&text, "%-*s", widths[0], row[0])
		for i, cell := range row[1:] {
			fmt.Fprintf(&text, "  %*s", widths[i+1], cell)
		}
		text.WriteByte('\n')
	}
	return text.String()
}

// Markdown formats the table for a page of documentation.
func (t Table) Markdown() string {
	var text strings.Builder
	for i, row := range t {
		fmt.Fprintf(&text, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			fmt.Fprintf(&text, "|%s\n", strings.Repeat("---|", len(row)))
		}
	}
	return text.String()
}
