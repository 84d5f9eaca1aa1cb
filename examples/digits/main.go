// Digits trains a small network on handwritten digits, alone or with any number of workers:
//
//	go run ./examples/digits
//	hvdrun -np 4 bin/digits
//	hvdrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh bin/digits
//
// It shows the elements of an elastic training program: it registers the state once, averages
// gradients, lets the learning rate follow the number of workers, and commits after every few
// steps. Workers may join, leave and fail meanwhile.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/gradient"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
)

// momentum is the fraction of its velocity that the optimizer keeps per step.
const momentum = 0.9

type options struct {
	epochs, batch, hidden, commitEvery int
	warmup                             int
	rate                               float64
	seed                               int64
	stepTime                           time.Duration
	digest                             bool
}

func main() {
	var o options
	flag.IntVar(&o.epochs, "epochs", 30, "passes over the training images")
	flag.IntVar(&o.batch, "batch", 8, "images per worker and step")
	flag.IntVar(&o.hidden, "hidden", 32, "hidden units")
	flag.Float64Var(&o.rate, "lr", 0.01, "learning rate of one worker; grows with their number, as the images of a step do")
	flag.IntVar(&o.warmup, "warmup", 0, "steps in which the learning rate rises to that of more workers")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the first weights and of the order of the images")
	flag.IntVar(&o.commitEvery, "commit-every", 1, "steps from one commit to the next")
	flag.DurationVar(&o.stepTime, "step-time", 0, "least time that a step takes, to make it watchable")
	flag.BoolVar(&o.digest, "digest", false, "print a hash of the weights at the end, on every worker")
	flag.Parse()
	if flag.NArg() > 0 || min(o.epochs, o.batch, o.hidden, o.commitEvery) < 1 {
		fmt.Fprintln(os.Stderr, "digits: -epochs, -batch, -hidden and -commit-every must be at least 1, and only flags are accepted")
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
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	set, heldOut, err := dataset.Load()
	if err != nil {
		return err
	}
	m := newModel(o.hidden, uint64(o.seed))
	if err := train(ctx, w, m, set, o, newDisplay(os.Stdout, o.epochs, set.Len())); err != nil {
		return err
	}
	if w.Rank() == 0 {
		fmt.Printf("held-out accuracy %.4f\n", m.accuracy(heldOut))
	}
	if o.digest {
		fmt.Printf("digest %016x\n", m.digest())
	}
	return nil
}

// progress is the progress of training. Its fields are exported because workers send it to each
// other.
type progress struct {
	Epoch, Steps int     // over all epochs
	Images       int     // of this epoch, on all workers
	Loss         float64 // sum over these images
}

// train runs the epochs. When it returns nil, all workers have the same parameters.
func train(ctx context.Context, w *elastic.Worker, m *model, set *dataset.Images, o options, show *display) error {
	var at progress
	opt := newOptimizer(w, m)
	scaling := elastic.NewScaling(elastic.ScalingOptions{Warmup: o.warmup})
	sampler := elastic.NewSampler(set.Len(), elastic.SamplerOptions{Shuffle: true, Seed: o.seed, Batch: o.batch})
	state := elastic.NewState(w,
		elastic.Tensor("params", m.params),
		elastic.Tensor("velocity", opt.velocity),
		elastic.Value("progress", &at),
		sampler, scaling)

	return elastic.Run(ctx, state, func(ctx context.Context) error {
		for ; at.Epoch < o.epochs; at = (progress{Epoch: at.Epoch + 1, Steps: at.Steps}) {
			sampler.SetEpoch(at.Epoch) // keeps the position if the epoch has begun
			for batch, ok := sampler.Next(); ok; batch, ok = sampler.Next() {
				began := time.Now()
				loss, err := opt.step(ctx, set, batch, float32(o.rate*scaling.Next()))
				if err != nil {
					return err
				}
				time.Sleep(o.stepTime - time.Since(began))
				at.Steps++
				at.Images += len(batch) * w.Size()
				at.Loss += loss * float64(len(batch)*w.Size())
				if at.Steps%o.commitEvery == 0 {
					if err := state.Commit(); err != nil {
						return err // unchanged: Run handles it
					}
				}
				show.step(w, at)
			}
			show.epoch(w, at)
		}
		return nil
	})
}

// optimizer is stochastic gradient descent with momentum on gradients averaged over all workers.
type optimizer struct {
	model    *model
	velocity []float32                   // part of the state
	grads    *gradient.Averager[float32] // of the parameters, and the loss
}

func newOptimizer(w gradient.Worker, m *model) *optimizer {
	n := len(m.params)
	return &optimizer{model: m, velocity: make([]float32, n), grads: gradient.NewAverager[float32](w, gradient.Options{}, n, 1)}
}

// step makes one step with the mean gradient of the batches of all workers, and returns their mean
// loss. On an error the parameters are unchanged.
func (o *optimizer) step(ctx context.Context, set *dataset.Images, batch []int, rate float32) (float64, error) {
	grad, loss := o.grads.Tensor(0), o.grads.Tensor(1)
	_, err := o.grads.Pass(ctx, func() error { loss[0] = o.model.gradient(grad, set, batch); return nil })
	if err != nil {
		return 0, err
	}
	descend(o.model.params, o.velocity, grad, rate, momentum)
	return float64(loss[0]), nil
}
