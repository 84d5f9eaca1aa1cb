package main

import (
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/test/report"
)

// tally counts cases by kind.
type tally struct {
	began time.Time
	rows  map[string]*row
}

type row struct {
	cases, skipped, workers int
	state                   int64
	worlds, exits, steps    int
	took                    time.Duration
	failed                  []uint64 // seeds
	findings
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

func (t *tally) add(s setup, took time.Duration, jobs []*job, found findings, err error) {
	r := row{cases: 1, workers: s.Workers, state: s.State, took: took, findings: found}
	for _, j := range jobs {
		r.worlds += j.Count("world_published")
		r.exits += j.Exits
		r.steps += j.Step
	}
	if err != nil {
		r.failed = []uint64{s.Seed}
	}
	t.row(s).add(&r)
}

func (r *row) add(o *row) {
	r.cases, r.skipped = r.cases+o.cases, r.skipped+o.skipped
	r.workers, r.state = max(r.workers, o.workers), max(r.state, o.state)
	r.worlds, r.exits, r.steps, r.took = r.worlds+o.worlds, r.exits+o.exits, r.steps+o.steps, r.took+o.took
	r.failed = append(r.failed, o.failed...)
	r.findings.add(o.findings)
}

// all returns the sum of the rows of all kinds.
func (t *tally) all() *row {
	var all row
	for _, k := range kinds {
		if r := t.rows[k.name]; r != nil {
			all.add(r)
		}
	}
	return &all
}

// String formats a table, with a line for each kind and one for all.
func (t *tally) String() string {
	var table report.Table
	table.Add("kind", "cases", "failed", "left out", "most workers", "most state", "worlds", "exits", "steps", "seconds")
	add := func(name string, r *row) {
		if r != nil {
			table.Add(name, r.cases, len(r.failed), r.skipped, r.workers, size(r.state), r.worlds, r.exits, r.steps, fmt.Sprintf("%.1f", r.took.Seconds()))
		}
	}
	for _, k := range kinds {
		add(k.name, t.rows[k.name])
	}
	all := t.all()
	add("all", all)
	text := "\n" + table.Text()
	for _, k := range kinds {
		if r := t.rows[k.name]; r != nil && r.cases > 1 && len(r.counts) > 0 {
			text += fmt.Sprintf("%s: %s\n", k.name, &r.findings)
		}
	}
	if len(all.failed) > 0 {
		text += fmt.Sprintf("seeds of failed ones: %v\n", all.failed)
	}
	return text
}
