package main

import (
	"fmt"
	"strings"
	"time"
)

// tally counts cases by kind.
type tally struct {
	began time.Time
	rows  map[string]*row
}

type row struct {
	cases, failed, skipped, workers int
	state                           int64
	worlds, exits, steps            int
	took                            time.Duration
	seeds                           []uint64 // of failed cases
}

func (t *tally) row(s setup) *row {
	if t.rows == nil {
		t.rows = make(map[string]*row)
	}
	if t.rows[s.Kind] == nil {
		t.rows[s.Kind] = &row{}
	}
	return t.rows[s.Kind]
}

func (t *tally) skip(s setup) { t.row(s).skipped++ }

func (t *tally) add(s setup, took time.Duration, jobs []*job, err error) {
	r := t.row(s)
	r.cases++
	r.took += took
	r.workers, r.state = max(r.workers, s.Workers), max(r.state, s.State)
	for _, j := range jobs {
		r.worlds += j.count("world_published")
		r.exits += j.exits
		r.steps += j.step
	}
	if err != nil {
		r.failed++
		r.seeds = append(r.seeds, s.Seed)
	}
}

func (t *tally) failed() int {
	n := 0
	for _, r := range t.rows {
		n += r.failed
	}
	return n
}

// String formats a table, with a line for each kind and one for all.
func (t *tally) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "\n%-10s %6s %6s %8s %12s %10s %7s %8s %8s %9s\n", "kind", "cases", "failed", "left out", "most workers", "most state", "worlds",
		"exits", "steps", "seconds")
	all := row{}
	for _, k := range kinds {
		r := t.rows[k.name]
		if r == nil {
			continue
		}
		fmt.Fprintf(&text, "%-10s %s\n", k.name, r)
		all.cases, all.failed, all.skipped = all.cases+r.cases, all.failed+r.failed, all.skipped+r.skipped
		all.workers, all.state = max(all.workers, r.workers), max(all.state, r.state)
		all.worlds, all.exits, all.steps, all.took = all.worlds+r.worlds, all.exits+r.exits, all.steps+r.steps, all.took+r.took
		all.seeds = append(all.seeds, r.seeds...)
	}
	fmt.Fprintf(&text, "%-10s %s\n", "all", &all)
	if len(all.seeds) > 0 {
		fmt.Fprintf(&text, "seeds of those that failed: %v\n", all.seeds)
	}
	return text.String()
}

func (r *row) String() string {
	return fmt.Sprintf("%6d %6d %8d %12d %10s %7d %8d %8d %9.1f", r.cases, r.failed, r.skipped, r.workers, size(r.state), r.worlds, r.exits,
		r.steps, r.took.Seconds())
}
