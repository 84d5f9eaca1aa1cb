package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/hvdrun/hvdrun/internal/testbed/e2e"
)

// target is a bound on a quantile.
type target struct {
	name     string
	quantile float64
	limit    time.Duration
}

func (b *bench) report(w io.Writer, deaths, growths []sample) {
	fmt.Fprintf(w, "%d workers of %d weights, %v a step besides communication; %d CPUs\n", b.workers, b.size, b.stepTime, runtime.NumCPU())
	if len(deaths) > 0 {
		total := spread(deaths, func(s sample) time.Duration { return s.stepped })
		fmt.Fprintf(w, "\nFrom SIGKILL of one worker (a killer reads the clock right before kill(2)) to\n%s\n", e2e.SpreadHeader)
		for _, r := range []struct {
			name string
			of   func(sample) time.Duration
		}{
			{"driver knows of the exit", func(s sample) time.Duration { return s.exited }},
			{"first survivor has come, or exit", func(s sample) time.Duration { return s.left }},
			{"new world published", func(s sample) time.Duration { return s.world }},
			{"all connected and synchronised", func(s sample) time.Duration { return s.entered }},
		} {
			fmt.Fprintln(w, spread(deaths, r.of).Row("  "+r.name))
		}
		fmt.Fprintln(w, total.Row("next step completed by all survivors"))
		fmt.Fprint(w, total.Histogram())
		verdicts(w, total, target{"median", 0.5, 25 * time.Millisecond}, target{"p99", 0.99, 150 * time.Millisecond})
	}
	if len(growths) > 0 {
		pause := spread(growths, func(s sample) time.Duration { return s.pause })
		fmt.Fprintf(w, "\nGrowth from %d to %d workers: from the host's appearance in the script's output to\n%s\n",
			(b.workers+1)/2, b.workers, e2e.SpreadHeader)
		for _, r := range []struct {
			name string
			of   func(sample) time.Duration
		}{
			{"driver has the new list", func(s sample) time.Duration { return s.found }},
			{"newcomers started", func(s sample) time.Duration { return s.started }},
			{"new workers have joined", func(s sample) time.Duration { return s.ready }},
			{"workers notified", func(s sample) time.Duration { return s.told }},
			{"first worker has come", func(s sample) time.Duration { return s.left }},
			{"new world published", func(s sample) time.Duration { return s.world }},
			{"all connected and synchronised", func(s sample) time.Duration { return s.entered }},
			{"first step in the larger world", func(s sample) time.Duration { return s.stepped }},
		} {
			fmt.Fprintln(w, spread(growths, r.of).Row("  "+r.name))
		}
		fmt.Fprintln(w, pause.Row("pause of the old workers"))
		fmt.Fprintln(w, spread(growths, func(s sample) time.Duration { return s.still }).Row("of that outside of training"))
		fmt.Fprint(w, pause.Histogram())
		verdicts(w, pause, target{"median", 0.5, 20 * time.Millisecond})
	}
}

func (b *bench) reportArrivals(w io.Writer, arrivals []sample) {
	if len(arrivals) == 0 {
		return
	}
	heard := spread(arrivals, func(s sample) time.Duration { return s.heard })
	fmt.Fprintf(w, "\nFrom the start of another agent, to %d workers over gossip, to\n%s\n", b.workers, e2e.SpreadHeader)
	for _, r := range []struct {
		name string
		of   func(sample) time.Duration
	}{
		{"driver has the new list", func(s sample) time.Duration { return s.found }},
		{"newcomer started", func(s sample) time.Duration { return s.started }},
		{"new worker has joined, workers notified", func(s sample) time.Duration { return s.told }},
	} {
		fmt.Fprintln(w, spread(arrivals, r.of).Row("  "+r.name))
	}
	fmt.Fprintln(w, heard.Row("Commit has told all old workers"))
	fmt.Fprintln(w, spread(arrivals, func(s sample) time.Duration { return s.stepped }).Row("first step in the larger world"))
	verdicts(w, heard, target{"median", 0.5, time.Second})
}

// spread collects one of the times from all samples that have it.
func spread(samples []sample, of func(sample) time.Duration) e2e.Spread {
	var s e2e.Spread
	for _, x := range samples {
		if d := of(x); d != 0 {
			s = append(s, d)
		}
	}
	return s
}

func verdicts(w io.Writer, s e2e.Spread, targets ...target) {
	for _, t := range targets {
		verdict := "met"
		if s.Quantile(t.quantile) > t.limit {
			verdict = "MISSED"
		}
		fmt.Fprintf(w, "target %s at most %v: %s\n", t.name, t.limit, verdict)
	}
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
				fmt.Fprintf(w, "\t%.3f", e2e.Milliseconds(d))
			}
			fmt.Fprintln(w)
		}
	}
	return w.Flush()
}
