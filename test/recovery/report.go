package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/hvdrun/hvdrun/test/report"
)

// times are the times of a sample that are reported, in their order.
type times []struct {
	name string
	of   func(sample) time.Duration
}

// rows collects the times of all samples.
func (t times) rows(samples []sample) []report.Row {
	var rows []report.Row
	for _, r := range t {
		rows = append(rows, report.Row{Name: "  " + r.name, Spread: spread(samples, r.of)})
	}
	return rows
}

func (b *bench) reportDeaths(w io.Writer, deaths []sample) {
	report.Rows(w, "From SIGKILL of one worker (a killer reads the clock right before kill(2)) to", times{
		{"driver knows of the death", func(s sample) time.Duration { return s.exited }},
		{"first survivor has come, or exit", func(s sample) time.Duration { return s.left }},
		{"new world published", func(s sample) time.Duration { return s.world }},
		{"all connected and synchronised", func(s sample) time.Duration { return s.entered }},
	}.rows(deaths),
		report.Row{Name: "next step completed by all survivors", Spread: spread(deaths, func(s sample) time.Duration { return s.stepped })},
		report.Target{Name: "median", Quantile: 0.5, Limit: 25 * time.Millisecond},
		report.Target{Name: "p99", Quantile: 0.99, Limit: 150 * time.Millisecond})
}

// reportBusy reports the deaths in jobs whose spares run tasks, and the steps of both kinds.
func (b *bench) reportBusy(w io.Writer, deaths []sample) {
	fmt.Fprintf(w, "\nThe same while spares run tasks of %v: %d tasks\n", b.beside, b.ran)
	b.reportDeaths(w, deaths)
	report.Rows(w, "From one step of a worker to its next", []report.Row{{Name: "  spares wait", Spread: b.steps[false]}},
		report.Row{Name: "  spares run tasks", Spread: b.steps[true]})
	ratio := func(of func(report.Spread) time.Duration) float64 {
		return float64(of(b.steps[true])) / float64(of(b.steps[false]))
	}
	fmt.Fprintf(w, "steps with tasks / without: median %.3f, mean %.3f\n",
		ratio(func(s report.Spread) time.Duration { return s.Quantile(0.5) }), ratio(report.Spread.Mean))
}

func (b *bench) reportGrowths(w io.Writer, growths []sample) {
	title := fmt.Sprintf("Growth from %d to %d workers: from the host's appearance in the script's output to", (b.workers+1)/2, b.workers)
	report.Rows(w, title, times{
		{"driver has the new list", func(s sample) time.Duration { return s.found }},
		{"newcomers started", func(s sample) time.Duration { return s.started }},
		{"new workers have joined", func(s sample) time.Duration { return s.ready }},
		{"workers notified", func(s sample) time.Duration { return s.told }},
		{"first worker has come", func(s sample) time.Duration { return s.left }},
		{"new world published", func(s sample) time.Duration { return s.world }},
		{"all connected and synchronised", func(s sample) time.Duration { return s.entered }},
		{"first step in the larger world", func(s sample) time.Duration { return s.stepped }},
		{"pause outside of training", func(s sample) time.Duration { return s.still }},
		{"median step before", func(s sample) time.Duration { return s.usual }},
		{"median step while newcomers prepare", func(s sample) time.Duration { return s.step }},
	}.rows(growths),
		report.Row{Name: "pause of the old workers", Spread: spread(growths, func(s sample) time.Duration { return s.pause })},
		report.Target{Name: "median", Quantile: 0.5, Limit: 20 * time.Millisecond})
}

func (b *bench) reportArrivals(w io.Writer, arrivals []sample) {
	report.Rows(w, fmt.Sprintf("From the start of another agent, to %d workers over gossip, to", b.workers), times{
		{"driver has the new list", func(s sample) time.Duration { return s.found }},
		{"newcomer started", func(s sample) time.Duration { return s.started }},
		{"new worker has joined, workers notified", func(s sample) time.Duration { return s.told }},
		{"first step in the larger world", func(s sample) time.Duration { return s.stepped }},
	}.rows(arrivals),
		report.Row{Name: "Commit has told all old workers", Spread: spread(arrivals, func(s sample) time.Duration { return s.heard })},
		report.Target{Name: "median", Quantile: 0.5, Limit: time.Second})
}

// spread collects one of the times from all samples that have it.
func spread(samples []sample, of func(sample) time.Duration) report.Spread {
	var s report.Spread
	for _, x := range samples {
		if d := of(x); d != 0 {
			s = append(s, d)
		}
	}
	return s
}

// writeTSV writes all samples.
func (b *bench) writeTSV(deaths, growths, arrivals []sample) (err error) {
	if b.tsv == "" {
		return nil
	}
	f, err := os.Create(b.tsv)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := bufio.NewWriter(f)
	fmt.Fprintln(w, "kind\trank\tfound\tstarted\tready\texited\ttold\theard\tleft\tworld\tentered\tstepped\tpause\tstill")
	for _, k := range []struct {
		kind    string
		samples []sample
	}{{"kill", deaths}, {"join", growths}, {"arrival", arrivals}} {
		for _, s := range k.samples {
			fmt.Fprintf(w, "%s\t%d", k.kind, s.rank)
			for _, d := range []time.Duration{s.found, s.started, s.ready, s.exited, s.told, s.heard, s.left, s.world, s.entered, s.stepped, s.pause, s.still} {
				fmt.Fprintf(w, "\t%.3f", report.Milliseconds(d))
			}
			fmt.Fprintln(w)
		}
	}
	return w.Flush()
}
