// Sweep finds the best hyper-parameters of a network for handwritten digits. Each training is a
// task, which runs on any worker of a job:
//
//	hvdrun -np 4 --min-np 1 --tasks-only bin/sweep
//	hvdrun tasks run bin/sweep -go -svg sweep.svg
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/examples/digits/network"
	"github.com/hvdrun/hvdrun/tasks"
)

// setting holds the hyper-parameters of a trial.
type setting struct {
	Rate, Momentum float64
	Hidden, Epochs int
}

// String returns the beginning of the setting's row in the table.
func (s setting) String() string {
	return fmt.Sprintf("%-8g %-9g %-7d", s.Rate, s.Momentum, s.Hidden)
}

// outcome is the result of a trial.
type outcome struct {
	Loss     []float64 // mean over the images, for each epoch
	Accuracy float64   // on the held-out images
}

var trial = tasks.Register[outcome]("sweep-trial/v1", train)

// train trains a network. The same setting has the same outcome, wherever and however often it
// runs.
func train(ctx context.Context, s setting) (o outcome, err error) {
	set, heldOut, err := dataset.Load()
	if err != nil {
		return o, err
	}
	const batch = 32
	m := network.New(s.Hidden, 1)
	velocity, grad := make([]float32, len(m.Params)), make([]float32, len(m.Params))
	random := rand.New(rand.NewPCG(1, 1))
	for range s.Epochs {
		loss, order := 0.0, random.Perm(set.Len())
		for images := range slices.Chunk(order, batch) {
			clear(grad)
			loss += float64(m.Gradient(grad, set, images)) * float64(len(images))
			network.Descend(m.Params, velocity, grad, float32(s.Rate), float32(s.Momentum))
		}
		o.Loss = append(o.Loss, loss/float64(set.Len()))
		if ctx.Err() != nil { // the task was cancelled, or its worker is leaving
			return o, ctx.Err()
		}
	}
	o.Accuracy = m.Accuracy(heldOut)
	return o, nil
}

// grid returns all settings to try.
func grid(epochs int) (all []setting) {
	for _, rate := range []float64{0.003, 0.01, 0.03, 0.1, 0.3} {
		for _, momentum := range []float64{0, 0.5, 0.9} {
			for _, hidden := range []int{8, 16, 32} {
				all = append(all, setting{rate, momentum, hidden, epochs})
			}
		}
	}
	return all
}

func main() {
	begin := flag.Bool("go", false, "submit the trials; otherwise this process is a worker that runs them")
	epochs := flag.Int("epochs", 10, "passes over the training images in each trial")
	svg := flag.String("svg", "", "write the loss of the best trials to `FILE`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *begin, *epochs, *svg); err != nil {
		fmt.Fprintln(os.Stderr, "sweep:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, begin bool, epochs int, svg string) error {
	switch {
	case flag.NArg() > 0 || epochs < 1:
		return errors.New("only flags are accepted, and -epochs must be at least 1")
	case !begin:
		return tasks.Serve(ctx, tasks.ServeConfig{})
	}
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	results, err := sweep(ctx, pool, grid(epochs))
	if err != nil {
		return err
	}
	first := results[:min(5, len(results))]
	fmt.Println("RATE     MOMENTUM  HIDDEN  LOSS    ACCURACY")
	for _, r := range first {
		fmt.Printf("%v %.4f  %.4f\n", r.setting, r.Loss[len(r.Loss)-1], r.Accuracy)
	}
	if svg == "" {
		return nil
	}
	return os.WriteFile(svg, []byte(picture(first)), 0o644)
}

// result is a trial that has ended, with its outcome.
type result struct {
	setting
	outcome
}

// sweep runs all trials, and returns the best first.
func sweep(ctx context.Context, pool *tasks.Pool, settings []setting) ([]result, error) {
	var futures []*tasks.Future[outcome]
	of := make(map[*tasks.Future[outcome]]setting)
	for _, s := range settings {
		f, err := trial.Submit(ctx, pool, s)
		if err != nil {
			return nil, err
		}
		futures, of[f] = append(futures, f), s
	}
	var results []result
	for f, err := range tasks.AsCompleted(ctx, futures) {
		if err != nil {
			return nil, err
		}
		o, err := f.Get(ctx)
		if err != nil {
			return nil, err
		}
		results = append(results, result{of[f], o})
		fmt.Fprintf(os.Stderr, "\r%d of %d trials", len(results), len(settings))
	}
	fmt.Fprintln(os.Stderr)
	best(results)
	return results, nil
}

// best sorts the best results first. Equal results are in the order of their settings, not in the
// order in which they arrived.
func best(results []result) {
	slices.SortFunc(results, func(a, b result) int {
		return cmp.Or(
			cmp.Compare(b.Accuracy, a.Accuracy),
			cmp.Compare(a.Rate, b.Rate), cmp.Compare(a.Momentum, b.Momentum), cmp.Compare(a.Hidden, b.Hidden),
		)
	})
}
