// Gpu trains the network of examples/digits on the same images, with its parameters, its data and
// its computation on a GPU:
//
//	bin/gpu                              # alone
//	hvdrun -np 2 bin/gpu                 # two workers, also on one GPU
//	hvdrun -np 4 --min-np 1 bin/gpu      # workers may fail and be replaced
//
// A worker uses the device of its slot; if there are more slots than devices, they share devices.
// The program needs only the CUDA driver. The flag -h lists its flags.
//
// The gradient of each microbatch is copied to the host, where elastic.Steps averages the gradients
// in a fixed order. So the final parameters have the same bits, whatever the workers do, if all
// devices compute the same bits. cuda.AllReduceWith averages gradients between devices instead.
//
// This file has the training loop. network.go launches the kernels in kernels.ptx: six kernels with
// one thread per element of the result, for compute capability 7.0 or higher, written by hand for
// readability, not for speed. The tests run them in a strict PTX interpreter on the CPU, and
// compare every element with that of Go loops.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
)

// momentum is the fraction of its velocity that the optimizer keeps per step.
const momentum = 0.9

type options struct {
	epochs, micro, batch, hidden int
	rate                         float64
	seed                         int64
	stepTime                     time.Duration
	driver                       string
	digest                       bool
}

func main() {
	var o options
	flag.IntVar(&o.epochs, "epochs", 20, "passes over the training images")
	flag.IntVar(&o.micro, "microbatches", 4, "microbatches of a step, which the workers share")
	flag.IntVar(&o.batch, "batch", 8, "images per microbatch")
	flag.IntVar(&o.hidden, "hidden", 32, "hidden units")
	flag.Float64Var(&o.rate, "lr", 0.04, "learning rate")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the first weights and of the order of the images")
	flag.DurationVar(&o.stepTime, "step-time", 0, "minimum duration of a step, to slow down the training")
	flag.StringVar(&o.driver, "driver", cuda.DefaultLibrary, "library of the driver")
	flag.BoolVar(&o.digest, "digest", false, "print a hash of the weights at the end, on every worker")
	flag.Parse()
	if flag.NArg() > 0 || min(o.epochs, o.micro, o.batch, o.hidden) < 1 {
		fmt.Fprintln(os.Stderr, "gpu: -epochs, -microbatches, -batch and -hidden must be at least 1, and only flags are accepted")
		os.Exit(2)
	}
	elastic.Main(func(ctx context.Context) error { // after cuda.ErrSticky a new process is needed, which hvdrun starts
		err := run(ctx, o)
		if errors.Is(err, cuda.ErrUnavailable) {
			err = fmt.Errorf("gpu: this example needs an NVIDIA GPU: %w", err)
		}
		return err
	})
}

func run(ctx context.Context, o options) (err error) {
	devices, err := cuda.Devices(o.driver)
	if err != nil {
		return err
	}
	if len(devices) == 0 {
		return fmt.Errorf("%w: the driver sees no device", cuda.ErrUnavailable)
	}
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	d, err := cuda.Open(cuda.Config{Device: w.Slot() % len(devices), Library: o.driver})
	if err != nil {
		return err
	}
	defer d.Close()
	m, err := newNetwork(ctx, d, o.hidden, max(o.batch, 64), uint64(o.seed))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	images, heldOut, err := dataset.Load()
	if err != nil {
		return err
	}
	from, err := m.load(ctx, images)
	if err != nil {
		return err
	}
	if err := train(ctx, w, m, from, o); err != nil {
		return err
	}
	if w.Rank() == 0 {
		judged, err := m.load(ctx, heldOut)
		if err != nil {
			return err
		}
		accuracy, err := m.accuracy(ctx, judged)
		if err != nil {
			return err
		}
		fmt.Printf("held-out accuracy %.4f on %s\n", accuracy, d.Info().Name)
	}
	if o.digest {
		digest, err := m.digest(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("digest %016x\n", digest)
	}
	return nil
}

// progress is the state of the current epoch.
type progress struct {
	Images int
	Loss   float64 // sum over the images
}

// train runs the epochs. When it returns nil, all workers have the same parameters.
func train(ctx context.Context, w *elastic.Worker, m *network, from *set, o options) error {
	var at progress
	steps := elastic.NewSteps[float32](w, elastic.StepsOptions{
		Microbatches: o.micro,
		Batches:      elastic.NewBatches(from.n, elastic.SamplerOptions{Shuffle: true, Seed: o.seed, Batch: o.batch}),
	}, m.grad.Len()) // the gradient and the loss
	state := elastic.NewState(w,
		cuda.Tensor("params", m.params),
		cuda.Tensor("velocity", m.velocity),
		elastic.Value("progress", &at),
		steps)

	backward := func(b elastic.Micro[float32]) error {
		return m.gradientOf(ctx, from, b.Samples, b.Gradient[0])
	}
	apply := func(mean [][]float32) error {
		if steps.Position() == 0 {
			at = progress{}
		}
		images := min(o.micro*o.batch, from.n-at.Images)
		at.Images += images
		at.Loss += float64(mean[0][m.grad.Len()-1]) * float64(images)
		return m.step(ctx, mean[0], float32(o.rate), momentum)
	}
	return elastic.Run(ctx, state, func(ctx context.Context) error {
		for steps.Epoch() < o.epochs {
			began, epoch := time.Now(), steps.Epoch()
			if err := steps.Step(ctx, backward, apply); err != nil {
				return err // unchanged: Run handles it
			}
			time.Sleep(o.stepTime - time.Since(began))
			if w.Rank() == 0 && steps.Epoch() > epoch {
				fmt.Printf("epoch %d  loss %.4f  size %d  generation %d\n", epoch+1, at.Loss/float64(at.Images), w.Size(), w.Generation())
			}
		}
		return nil
	})
}
