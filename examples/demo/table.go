package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// row describes one generation.
type row struct {
	generation uint64
	size       int
	cause      string
	// toStep is the time from the cause to the first step that the generation completed. pause is
	// the part of it without training, from the moment when the workers were notified or one of
	// them failed. They are 0 if the generation completed no step, and pause is 0 before training
	// begins.
	toStep, pause time.Duration
}

// table computes the cause of each generation and its durations from the events.
func table(events []event) []row {
	var rows []row
	var listed []host
	asked := false // the first hosts were found
	var why cause
	begun := make(map[uint64]cause)
	lost := make(map[int]bool) // processes that were given up before they ended
	for _, e := range events {
		switch e.Name {
		case "hosts_found":
			changes := []string{"start"}
			if asked {
				changes = compare(listed, e.Hosts)
			}
			for _, what := range changes {
				why.add(e.Time, what)
			}
			listed, asked = e.Hosts, true
		case "returned":
			if e.Slot != nil {
				why.add(e.Time, "slot returned")
			} else {
				why.add(e.Time, "host returned")
			}
		case "worker_dying":
			lost[e.PID] = true
			why.add(e.Time, "worker killed")
			why.interrupt(e.Time)
		case "worker_exited":
			if e.Cause != "failed" || lost[e.PID] {
				continue
			}
			if e.Signal != 0 {
				why.add(e.Time, "worker killed")
			} else {
				why.add(e.Time, "worker failed")
			}
			why.interrupt(e.Time)
		case "hosts_updated":
			why.interrupt(e.Time)
		case "world_published":
			rows = append(rows, row{generation: e.Generation, size: e.Size, cause: strings.Join(why.what, ", ")})
			begun[e.Generation] = why
			why = cause{}
		case "first_commit":
			for i := range rows {
				if rows[i].generation == e.Generation {
					rows[i].measure(begun[e.Generation], e.Time)
				}
			}
		}
	}
	return rows
}

func (r *row) measure(why cause, step time.Time) {
	if !why.since.IsZero() {
		r.toStep = step.Sub(why.since)
	}
	if !why.interrupted.IsZero() {
		r.pause = step.Sub(why.interrupted)
	}
}

// cause collects the events since the last generation that lead to the next.
type cause struct {
	what        []string
	since       time.Time // time of the first event
	interrupted time.Time // time of the first event that disturbed training
}

func (c *cause) add(at time.Time, what string) {
	if c.since.IsZero() {
		c.since = at
	}
	if !slices.Contains(c.what, what) {
		c.what = append(c.what, what)
	}
}

func (c *cause) interrupt(at time.Time) {
	if c.interrupted.IsZero() {
		c.interrupted = at
	}
}

// compare describes the changes of the hosts.
func compare(before, after []host) []string {
	var what []string
	for _, h := range after {
		i := slices.IndexFunc(before, func(o host) bool { return o.Host == h.Host })
		switch {
		case i < 0:
			what = append(what, "host added")
		case before[i].Slots != h.Slots:
			what = append(what, "slots changed")
		}
	}
	for _, h := range before {
		if !slices.ContainsFunc(after, func(o host) bool { return o.Host == h.Host }) {
			what = append(what, "host removed")
		}
	}
	return what
}

// writeTable prints the rows, times in milliseconds.
func writeTable(w io.Writer, rows []row) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "generation\tsize\tcause\tcause to first step, ms\tof it without training, ms\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%d\t%d\t%s\t%s\t%s\t\n", r.generation, r.size, r.cause, milliseconds(r.toStep), milliseconds(r.pause))
	}
	return t.Flush()
}

func milliseconds(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", float64(d)/float64(time.Millisecond))
}
