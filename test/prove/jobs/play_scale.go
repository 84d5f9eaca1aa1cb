package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/prove/jobs/internal/crowd"
)

// playScale measures a real driver with real agents and simulated workers.
func playScale(ctx context.Context, t *trial) error {
	var sizes []int
	for text := range strings.SplitSeq(cmp.Or(t.Sizes, strconv.Itoa(t.Workers)), ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 10 {
			return fmt.Errorf("%q is not a number of simulated workers of at least 10", text)
		}
		sizes = append(sizes, n)
	}
	slices.Sort(sizes)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	t.programs = follow.Programs{Hvdrun: self}
	var rows []crowd.Sample
	for _, n := range sizes {
		var samples []crowd.Sample
		for range t.Rounds {
			s, err := t.crowd(ctx, n)
			if err != nil {
				return fmt.Errorf("%d workers: %w", n, err)
			}
			samples = append(samples, s)
		}
		rows = append(rows, crowd.Median(samples))
	}
	t.table = crowd.Table(sizes, rows)
	return nil
}

// crowd runs a job of n simulated workers. This program plays its driver and hosts.
func (t *trial) crowd(ctx context.Context, n int) (s crowd.Sample, err error) {
	j, err := t.job()
	if err != nil {
		return s, err
	}
	if err := j.apart("crowd"); err != nil {
		return s, err
	}
	sc := crowd.Scenario{Workers: n, Each: cmp.Or(t.Each, 500), Result: j.plan.OutputPath() + ".json", Profile: t.Profile, Heap: t.Heap, Verbose: t.Verbose}
	text, err := json.Marshal(sc)
	if err != nil {
		return s, err
	}
	j.plan.Flags = []string{"--scenario", string(text)}
	j.plan.Env = append(j.plan.Env, crowd.Role+"="+crowd.Driver)
	if err := j.start(); err != nil {
		return s, err
	}
	if err := j.end(ctx); err != nil {
		return s, err
	}
	if text, err = os.ReadFile(sc.Result); err == nil {
		err = json.Unmarshal(text, &s)
	}
	return s, err
}
