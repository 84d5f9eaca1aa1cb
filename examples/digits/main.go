// Digits trains a small network on handwritten digits, alone or with any number of workers:
//
//	go run ./examples/digits     # alone, in a world of one, with a progress bar
//	hvdrun -np 4 bin/digits      # four workers on this machine
//	hvdrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh bin/digits    # as many workers as there are slots
//
// It shows the elements of an elastic training program: it registers the state once, and runs steps
// of a fixed number of microbatches, which the workers share. Workers may join, leave and fail
// meanwhile: the final weights are the same, bit for bit. The flag -digest prints a hash of them,
// and -h lists the other flags.
//
// The network is a perceptron of two layers (64 pixels → 32 hidden units → 10 digits) with
// gradients written by hand. Every fifth image is held out of training; at the end rank 0 prints
// the accuracy on these images, about 0.96. This file has the training loop, package network the
// network, package dataset the images and their source, display.go the output.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/examples/digits/network"
)

// momentum is the fraction of its velocity that the optimizer keeps per step.
const momentum = 0.9

type options struct {
	epochs, micro, batch, hidden int
	rate                         float64
	seed                         int64
	stepTime                     time.Duration
	digest                       bool
}

func main() {
	var o options
	flag.IntVar(&o.epochs, "epochs", 30, "passes over the training images")
	flag.IntVar(&o.micro, "microbatches", 4, "microbatches of a step, which the workers share")
	flag.IntVar(&o.batch, "batch", 8, "images per microbatch")
	flag.IntVar(&o.hidden, "hidden", 32, "hidden units")
	flag.Float64Var(&o.rate, "lr", 0.04, "learning rate")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the first weights and of the order of the images")
	flag.DurationVar(&o.stepTime, "step-time", 0, "minimum duration of a step, to slow down the training")
	flag.BoolVar(&o.digest, "digest", false, "print a hash of the weights at the end, on every worker")
	flag.Parse()
	if flag.NArg() > 0 || min(o.epochs, o.micro, o.batch, o.hidden) < 1 {
		fmt.Fprintln(os.Stderr, "digits: -epochs, -microbatches, -batch and -hidden must be at least 1, and only flags are accepted")
		os.Exit(2)
	}
	elastic.Main(func(ctx context.Context) error { return run(ctx, o) })
}

func run(ctx context.Context, o options) error {
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	set, heldOut, err := dataset.Load()
	if err != nil {
		return err
	}
	m := network.New(o.hidden, uint64(o.seed))
	if err := train(ctx, w, m, set, o, newDisplay(os.Stdout, o.epochs, set.Len())); err != nil {
		return err
	}
	if w.Rank() == 0 {
		fmt.Printf("held-out accuracy %.4f\n", m.Accuracy(heldOut))
	}
	if o.digest {
		fmt.Printf("digest %016x\n", m.Digest())
	}
	return nil
}

// progress is the state of the current epoch.
type progress struct {
	Images int
	Loss   float64 // sum over the images
}

// train runs the epochs. When it returns nil, all workers have the same parameters.
func train(ctx context.Context, w *elastic.Worker, m *network.Model, set *dataset.Images, o options, show *display) error {
	var at progress
	velocity := make([]float32, len(m.Params))
	steps := elastic.NewSteps[float32](w, elastic.StepsOptions{
		Microbatches: o.micro,
		Batches:      elastic.NewBatches(set.Len(), elastic.SamplerOptions{Shuffle: true, Seed: o.seed, Batch: o.batch}),
	}, len(m.Params), 1) // the gradient, and the loss
	state := elastic.NewState(w,
		elastic.Tensor("params", m.Params),
		elastic.Tensor("velocity", velocity),
		elastic.Value("progress", &at),
		steps)

	backward := func(b elastic.Micro[float32]) error {
		b.Gradient[1][0] = m.Gradient(b.Gradient[0], set, b.Samples)
		return nil
	}
	apply := func(mean [][]float32) error {
		if steps.Position() == 0 {
			at = progress{}
		}
		images := min(o.micro*o.batch, set.Len()-at.Images)
		at.Images += images
		at.Loss += float64(mean[1][0]) * float64(images)
		network.Descend(m.Params, velocity, mean[0], float32(o.rate), momentum)
		return nil
	}
	return elastic.Run(ctx, state, func(ctx context.Context) error {
		for steps.Epoch() < o.epochs {
			began, epoch := time.Now(), steps.Epoch()
			err := steps.Step(ctx, backward, apply)
			// A step that finds that the hosts have changed is complete: it may end an epoch.
			if err == nil || errors.As(err, new(*elastic.HostsUpdatedError)) {
				show.step(w, epoch, at)
				if steps.Epoch() > epoch {
					show.epoch(w, epoch, at)
				}
			}
			if err != nil {
				return err // unchanged: Run handles it
			}
			time.Sleep(o.stepTime - time.Since(began))
		}
		return nil
	})
}
