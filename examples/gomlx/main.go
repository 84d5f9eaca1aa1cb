// Fashion trains a convolutional network of the framework gomlx (https://github.com/gomlx/gomlx),
// with its backend in pure Go, on the images of Fashion-MNIST
// (https://github.com/zalandoresearch/fashion-mnist), alone or with any number of workers:
//
//	cd examples/gomlx && go build -o fashion .
//	./fashion                    # alone, in a world of one
//	hvdrun -np 2 ./fashion       # two workers on this machine
//	hvdrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh ./fashion    # as many workers as there are slots
//
// The images are those of the Debian package dataset-fashion-mnist, in
// /usr/share/datasets/fashion-mnist. The flag -data names another folder with the same four files,
// and -h lists the other flags. With GOEXPERIMENT=simd go build, gomlx uses vector instructions,
// which shortens a step by about a quarter.
//
// It shows how a program of a framework becomes elastic: gomlx.NewState makes the variables of the
// model and of the optimizer part of the state, and a gomlx.Step computes and applies the gradients
// of elastic.Steps. Workers may join, leave and fail meanwhile: the final variables are the same,
// bit for bit. At the end each worker prints a hash of all variables, and rank 0 the accuracy on
// the 10,000 held-out images.
//
// The network has two convolutions with stride 2 and two dense layers, 108,874 weights, and is
// trained by Adam. This file has the training loop, model.go the network, data.go the images. It is
// a separate module, as your own program would be. make demo-gomlx trains it undisturbed with
// one worker, and again while five workers are killed and the hosts change four times; it fails if
// the bits differ or an accuracy is below 0.88. upstream/infra-2.patch adds an example to gomlx
// itself.
package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/frameworks/gomlx"
)

type options struct {
	data, checkpoints                 string
	epochs, micro, batch, reportEvery int
	rate, decay                       float64
	seed                              int64
	stepTime                          time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.data, "data", debianData, "folder with the four files of the data set")
	flag.StringVar(&o.checkpoints, "checkpoints", "", "folder of checkpoints, from which training continues; empty: no checkpoints")
	flag.IntVar(&o.epochs, "epochs", 3, "passes over the training images")
	flag.IntVar(&o.micro, "microbatches", 4, "microbatches of a step, which the workers share")
	flag.IntVar(&o.batch, "batch", 16, "images per microbatch")
	flag.IntVar(&o.reportEvery, "report-every", 100, "number of steps between two lines of output")
	flag.Float64Var(&o.rate, "lr", 0.003, "learning rate of the first epoch")
	flag.Float64Var(&o.decay, "decay", 0.55, "what the learning rate is multiplied by after every epoch")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the first weights and of the order of the images")
	flag.DurationVar(&o.stepTime, "step-time", 0, "minimum duration of a step, to slow down the training")
	flag.Parse()
	if flag.NArg() > 0 || min(o.epochs, o.micro, o.batch, o.reportEvery) < 1 {
		fmt.Fprintln(os.Stderr, "fashion: -epochs, -microbatches, -batch and -report-every must be at least 1, and only flags are accepted")
		os.Exit(2)
	}
	elastic.Main(func(ctx context.Context) error { return run(ctx, o) })
}

func run(ctx context.Context, o options) error {
	// Slow preparation comes before Init: afterwards, other workers can be waiting for this one.
	set, heldOut, err := load(o.data)
	if err != nil {
		return err
	}
	t, err := newTrainer(o)
	if err != nil {
		return err
	}
	defer t.step.Close()

	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	if err := t.train(ctx, w, set); err != nil {
		return err
	}
	digest, err := t.variables.Digest()
	if err != nil {
		return err
	}
	fmt.Printf("digest %016x\n", digest)
	if w.Rank() == 0 {
		share, err := accuracy(t.backend, t.store, heldOut)
		if err != nil {
			return err
		}
		fmt.Printf("held-out accuracy %.4f\n", share)
	}
	return nil
}

// trainer trains a model.
type trainer struct {
	options
	backend   compute.Backend
	store     *model.Store // all variables: weights, moments, learning rate
	step      *gomlx.Step
	variables *gomlx.State
}

func newTrainer(o options) (*trainer, error) {
	t := &trainer{options: o, store: model.NewStore()}
	var err error
	if t.backend, err = gobackend.New(""); err != nil {
		return nil, err
	}
	if err := t.store.SetRNGStateFromSeed(o.seed); err != nil {
		return nil, err
	}
	t.step, err = gomlx.NewStep(t.backend, t.store, optimizer.Adam().LearningRate(o.rate).Done(), crossEntropy, inputShapes(o.batch)...)
	if err != nil {
		return nil, err
	}
	t.variables = gomlx.NewState(t.store)
	return t, nil
}

// train runs the epochs. When it returns nil, all workers have the same variables.
func (t *trainer) train(ctx context.Context, w *elastic.Worker, set *images) error {
	steps := elastic.NewSteps[float32](w, elastic.StepsOptions{
		Microbatches: t.micro,
		Batches:      elastic.NewBatches(set.len(), elastic.SamplerOptions{Shuffle: true, Seed: t.seed, Batch: t.batch}),
	}, t.step.Lengths()...)
	parts := []elastic.Part{t.variables, steps}
	if t.checkpoints != "" {
		parts = append(parts, elastic.Checkpoint(t.checkpoints))
	}
	state := elastic.NewState(w, parts...)
	var world uint64
	enter := func() error {
		if world != w.Generation() {
			world = w.Generation()
			fmt.Printf("generation %d: rank %d of %d, pid %d\n", world, w.Rank(), w.Size(), os.Getpid())
		}
		return nil
	}
	state.OnReset(enter)

	backward := func(m elastic.Micro[float32]) error {
		x, y := set.tensors(m.Samples)
		return t.step.Backward(m, x, y)
	}
	var loss float32
	apply := func(mean [][]float32) error {
		loss = mean[0][0]
		if err := t.setRate(steps.Epoch()); err != nil {
			return err
		}
		return t.step.Apply(mean)
	}
	return elastic.Run(ctx, state, func(ctx context.Context) error {
		_ = enter() // the worker enters its first world
		for steps.Epoch() < t.epochs {
			began, epoch := time.Now(), steps.Epoch()
			if err := steps.Step(ctx, backward, apply); err != nil {
				return err // unchanged: Run handles it
			}
			time.Sleep(t.stepTime - time.Since(began))
			if n := steps.Applied(); w.Rank() == 0 && n%uint64(t.reportEvery) == 0 {
				fmt.Printf("epoch %d  step %d  loss %.4f  size %d\n", epoch+1, n, loss, w.Size())
			}
		}
		return nil
	})
}

// setRate sets the learning rate, which is a variable of the optimizer, for an epoch.
func (t *trainer) setRate(epoch int) error {
	rate := t.rate * math.Pow(t.decay, float64(epoch))
	v := t.store.GetVariable(model.JoinPath("/", optimizer.Scope, optimizer.ParamLearningRate))
	return v.SetValue(tensors.FromScalar(float32(rate)))
}
