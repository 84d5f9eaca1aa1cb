// Fashion trains a convolutional network of the framework gomlx on the images of Fashion-MNIST,
// alone or with any number of workers:
//
//	go run .
//	hvdrun -np 2 ./fashion
//	hvdrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh ./fashion
//
// It shows how a program of a framework becomes elastic: gomlx.NewStep averages the gradients of
// all workers, and gomlx.NewState makes the variables of the model and of the optimizer part of the
// state. Workers may join, leave and fail meanwhile.
package main

import (
	"context"
	"errors"
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

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/frameworks/gomlx"
)

type options struct {
	data, checkpoints                       string
	epochs, batch, commitEvery, reportEvery int
	rate, decay                             float64
	seed                                    int64
	stepTime                                time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.data, "data", debianData, "folder with the four files of the data set")
	flag.StringVar(&o.checkpoints, "checkpoints", "", "folder of checkpoints, from which training goes on; none: there are no checkpoints")
	flag.IntVar(&o.epochs, "epochs", 3, "passes over the training images")
	flag.IntVar(&o.batch, "batch", 32, "images per worker and step")
	flag.IntVar(&o.commitEvery, "commit-every", 10, "steps from one commit to the next")
	flag.IntVar(&o.reportEvery, "report-every", 100, "steps from one line of output to the next")
	flag.Float64Var(&o.rate, "lr", 0.002, "learning rate of one worker in the first epoch; grows with the square root of their number")
	flag.Float64Var(&o.decay, "decay", 0.55, "what the learning rate is multiplied by after every epoch")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the first weights and of the order of the images")
	flag.DurationVar(&o.stepTime, "step-time", 0, "least time that a step takes, to make it watchable")
	flag.Parse()
	if flag.NArg() > 0 || min(o.epochs, o.batch, o.commitEvery, o.reportEvery) < 1 {
		fmt.Fprintln(os.Stderr, "fashion: -epochs, -batch, -commit-every and -report-every must be at least 1, and only flags are accepted")
		os.Exit(2)
	}
	switch err := run(context.Background(), o); {
	case errors.Is(err, elastic.ErrRemoved), errors.Is(err, elastic.ErrFinished):
		// The others continue or are done without this worker.
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
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
	at        progress
}

// progress is the progress of training. Its fields are exported because workers send it to each
// other.
type progress struct{ Epoch, Steps int } // steps are counted over all epochs

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

// scale sets the learning rate for the epoch and the number of workers. The optimizer's rate is a
// variable of the store.
func (t *trainer) scale(workers int) error {
	rate := t.rate * math.Pow(t.decay, float64(t.at.Epoch)) * math.Sqrt(float64(workers))
	v := t.store.GetVariable(model.JoinPath("/", optimizer.Scope, optimizer.ParamLearningRate))
	return v.SetValue(tensors.FromScalar(float32(rate)))
}

// train runs the epochs. When it returns nil, all workers have the same variables.
func (t *trainer) train(ctx context.Context, w *elastic.Worker, set *images) error {
	sampler := elastic.NewSampler(set.len(), elastic.SamplerOptions{Shuffle: true, Seed: t.seed, Batch: t.batch})
	parts := []elastic.Part{t.variables, elastic.Value("progress", &t.at), sampler}
	if t.checkpoints != "" {
		parts = append(parts, elastic.Checkpoint(t.checkpoints))
	}
	state := elastic.NewState(w, parts...)
	enter := func() error {
		fmt.Printf("generation %d: rank %d of %d, pid %d\n", w.Generation(), w.Rank(), w.Size(), os.Getpid())
		return nil
	}
	_ = enter() // of the first world; OnReset calls it in the others
	state.OnReset(enter)

	return elastic.Run(ctx, state, func(ctx context.Context) error {
		for ; t.at.Epoch < t.epochs; t.at.Epoch++ {
			if err := t.scale(w.Size()); err != nil { // also when an epoch continues in another world
				return err
			}
			sampler.SetEpoch(t.at.Epoch) // keeps the position if the epoch has begun
			for batch, ok := sampler.Next(); ok; batch, ok = sampler.Next() {
				began := time.Now()
				x, y := set.tensors(batch)
				loss, err := t.step.Run(ctx, w.Group(), x, y)
				if err != nil {
					return err
				}
				time.Sleep(t.stepTime - time.Since(began))
				t.at.Steps++
				if w.Rank() == 0 && t.at.Steps%t.reportEvery == 0 {
					fmt.Printf("epoch %d  step %d  loss %.4f  size %d\n", t.at.Epoch+1, t.at.Steps, loss, w.Size())
				}
				if t.at.Steps%t.commitEvery == 0 {
					if err := state.Commit(); err != nil {
						return err // unchanged: Run handles it
					}
				}
			}
			if err := t.compare(ctx, w.Group()); err != nil {
				return err
			}
		}
		return nil
	})
}

// compare returns an error unless all ranks have the same bits in all variables.
func (t *trainer) compare(ctx context.Context, g *collective.Group) error {
	mine, err := t.variables.Digest()
	if err != nil {
		return err
	}
	all, err := collective.AllGather(ctx, g, []uint64{mine})
	if err != nil {
		return err
	}
	for rank, digest := range all {
		if digest[0] != all[0][0] {
			return fmt.Errorf("fashion: after epoch %d the variables of rank %d differ from those of rank 0", t.at.Epoch+1, rank)
		}
	}
	return nil
}
