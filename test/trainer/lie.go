package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/plan"
)

// liar sends false reports to the driver, with this worker's credentials.
type liar struct {
	env    plan.Worker
	err    error        // the reason why it cannot lie
	client *line.Client // nil: not connected yet
}

// lieBound limits the time of a lie: the driver may never answer it.
const lieBound = 20 * time.Second

// lies are the false reports that a fault can make this worker send while it continues to train, by
// name.
var lies = map[string]func(ctx context.Context, l *liar, generation uint64) error{
	"lie-done": func(ctx context.Context, l *liar, generation uint64) error {
		return l.client.Report(ctx, line.Done, generation, math.MaxUint64)
	},
	"lie-drain": func(ctx context.Context, l *liar, generation uint64) error {
		return l.client.Report(ctx, line.Draining, generation, 0)
	},
	"lie-commits": func(_ context.Context, l *liar, generation uint64) error {
		// This worker's other client continues to train, and joins when the driver asks for it.
		go l.client.Join(context.Background(), line.Joining{
			After: generation, Commits: 1 << 63, HoldsState: true, DataAddrs: []string{"127.0.0.1:9"},
		})
		return nil
	},
	"lie-generation": func(_ context.Context, l *liar, _ uint64) error {
		go l.client.Join(context.Background(), line.Joining{After: 1 << 63, Commits: 7, HoldsState: true})
		return nil
	},
	"lie-beats": func(_ context.Context, l *liar, generation uint64) error {
		go l.beats(generation)
		return nil
	},
	"lie-reports": func(ctx context.Context, l *liar, generation uint64) error {
		for r := line.Leaving; r <= line.NotWritten; r++ {
			if r == line.Draining {
				continue // the worker would be asked to leave
			}
			for _, n := range []uint64{0, generation, math.MaxInt64, math.MaxUint64} {
				for _, commits := range []uint64{0, 1, 1 << 63, math.MaxUint64} {
					_ = l.client.Report(ctx, r, n, commits) // some numbers are not reports, and are refused
				}
			}
		}
		for i := range 100 {
			if err := l.client.ReportBackend(ctx, generation, fmt.Sprint("none-", i)); err != nil {
				return err
			}
		}
		return nil
	},
}

// beats reports, until this process ends, that it has always waited for all other workers.
func (l *liar) beats(generation uint64) {
	for {
		_ = l.client.Beat(context.Background(), line.Beat{
			Generation: generation, Phase: line.Training, Quiet: math.MaxInt64, Commits: math.MaxUint64, Written: math.MaxUint64,
			Lanes: []line.Lane{{Operation: math.MaxUint64, Waiting: true, For: math.MaxInt64, What: "AllReduce"}},
		})
		time.Sleep(20 * time.Millisecond)
	}
}

// lie sends a false report.
func (l *liar) lie(what string) error {
	if l.err != nil {
		return l.err
	}
	if l.client == nil {
		var err error
		if l.client, err = line.NewClient(line.ClientConfig{Worker: l.env}); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), lieBound)
	defer cancel()
	world, err := l.client.Look(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("%s in generation %d\n", what, world.Generation)
	return lies[what](ctx, l, world.Generation)
}

// prepare keeps the credentials, which elastic.Init removes from the environment.
func (l *liar) prepare() { l.env, _, l.err = plan.WorkerFromEnv(os.LookupEnv) }
