package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/job"
)

// partStyles are the colours of the parts of a job's time.
var partStyles = map[job.Part]ansi.Style{
	job.PartTraining: green, job.PartRecovering: red, job.PartRecomputing: yellow, job.PartStalled: magenta, job.PartSynchronising: cyan,
	job.PartGrowing: cyan, job.PartShrinking: yellow,
}

// time draws the goodput, the curves, the recoveries and the stragglers.
func (m *top) time() []string {
	lines := m.goodput()
	lines = append(lines, m.curves()...)
	lines = append(lines, m.recoveries()...)
	return append(lines, m.stragglers()...)
}

func (m *top) goodput() []string {
	g := &m.view.Status.Goodput
	if !m.spent() {
		return []string{"Nothing is known yet of what the time went into.", ""}
	}
	var lines []string
	wide := max(10, min(50, m.width-40))
	for _, p := range g.Parts {
		if p.Seconds > 0 {
			share := p.Seconds / g.Seconds
			lines = append(lines, fmt.Sprintf("%-14s %5.1f %%  %9v  %s", p.Part, 100*share, seconds(p.Seconds), partStyles[p.Part].Styled(bar(share, wide))))
		}
	}
	if len(g.StalledBy) > 0 {
		var all []string
		for _, b := range g.StalledBy {
			all = append(all, fmt.Sprintf("%s (%v)", cli.EscapeCell(placeText(spot{b.Host, b.Slot})), seconds(b.Seconds)))
		}
		lines = append(lines, m.wrap("stalled by "+strings.Join(all, ", "))...)
	}
	return append(lines, "")
}

// eighths are bars of one to eight eighths of a column's width, and levels of a line's height.
var (
	eighths = []rune("▏▎▍▌▋▊▉█")
	levels  = []rune("▁▂▃▄▅▆▇█")
)

// bar draws a share of wide columns. A share above 0 is always visible.
func bar(share float64, wide int) string {
	n := int(share*float64(wide)*8 + 0.5)
	if n == 0 && share > 0 {
		n = 1
	}
	text := strings.Repeat("█", n/8)
	if n%8 > 0 {
		text += string(eighths[n%8-1])
	}
	return text
}

// curves draws workers and commits per second over the time of the job.
func (m *top) curves() []string {
	v := m.view
	until := v.Status.Time
	if v.Over() || v.Status.Driver == 0 {
		until = v.Status.Last
	}
	wide := max(10, m.width-36)
	var lines []string
	if len(v.Worlds) > 0 {
		sizes := make([]float64, wide)
		begun, most := v.Status.Begun, 0
		for i := range sizes {
			at := begun.Add(time.Duration(float64(until.Sub(begun)) * float64(i+1) / float64(wide)))
			for _, w := range v.Worlds {
				if !w.Time.After(at) {
					sizes[i] = float64(w.Size)
				}
			}
		}
		for _, w := range v.Worlds {
			most = max(most, w.Size)
		}
		lines = append(lines, fmt.Sprintf("%-18s %s  at most %s", "workers", green.Styled(curve(sizes, float64(most))), show.Grouped(most)))
	}
	if len(v.Points) > 1 {
		rates, most := rates(v.Points, wide)
		lines = append(lines, fmt.Sprintf("%-18s %s  at most %s", "commits a second", cyan.Styled(curve(rates, most)), rateText(most)))
	}
	if len(lines) > 0 {
		lines = append(lines, "")
	}
	return lines
}

// rates spreads the points over wide columns of time. Columns without data are negative. most is
// the largest value.
func rates(points []dashboard.Point, wide int) (all []float64, most float64) {
	all = make([]float64, wide)
	counts := make([]int, wide)
	from, to := points[0].Time, points[len(points)-1].Time
	for _, p := range points {
		i := int(float64(wide-1) * float64(p.Time.Sub(from)) / float64(max(1, to.Sub(from))))
		all[i] += p.Rate
		counts[i]++
	}
	before := -1.0
	for i, n := range counts {
		if n > 0 {
			all[i] /= float64(n)
			before, most = all[i], max(most, all[i])
		} else {
			all[i] = before
		}
	}
	return all, most
}

// curve draws values from 0 to most in one line.
func curve(values []float64, most float64) string {
	var b strings.Builder
	for _, v := range values {
		switch {
		case v < 0 || most <= 0:
			b.WriteByte(' ')
		case v == 0:
			b.WriteByte('_')
		default:
			b.WriteRune(levels[min(len(levels)-1, int(v/most*float64(len(levels))))])
		}
	}
	return b.String()
}

// recoveries draws how long it took until training continued after resets.
func (m *top) recoveries() []string {
	r := &m.view.Recoveries
	most, first, last := 0, -1, -1
	for i := range r.Failed {
		if n := r.Failed[i] + r.Planned[i]; n > 0 {
			most, last = max(most, n), i
			if first < 0 {
				first = i
			}
		}
	}
	if most == 0 {
		return nil
	}
	lines := []string{bold.Styled("Time to train again") + "  " + red.Styled("█") + " after a failure or stall  " + cyan.Styled("█") + " planned"}
	wide := max(10, min(50, m.width-24))
	for i := first; i <= last; i++ {
		name := "more"
		if i < len(r.Steps) {
			name = "≤ " + seconds(r.Steps[i]).String()
		}
		share := func(n int) string { return bar(float64(n)/float64(most), wide) }
		lines = append(lines, fmt.Sprintf("%-8s %4d  %s%s", name, r.Failed[i]+r.Planned[i], red.Styled(share(r.Failed[i])), cyan.Styled(share(r.Planned[i]))))
	}
	return append(lines, "")
}

// stragglers lists the workers that come last to operations.
func (m *top) stragglers() []string {
	type late struct {
		text string
		last float64
	}
	var all []late
	known := false
	for _, h := range m.view.Status.Hosts {
		for i := range h.Slots {
			s := &h.Slots[i]
			known = known || s.Straggler != nil
			if text := show.LateText(s.Straggler); text != "" {
				all = append(all, late{workerText(h.Host, s) + " " + text, s.Straggler.Last})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b late) int { return cmp.Compare(b.last, a.last) })
	lines := []string{bold.Styled("Stragglers")}
	switch {
	case !known:
		lines = append(lines, "No rank is known to come last.")
	case len(all) == 0:
		lines = append(lines, "No rank comes last to most operations.")
	}
	for _, l := range all[:min(8, len(all))] {
		lines = append(lines, l.text)
	}
	return lines
}
