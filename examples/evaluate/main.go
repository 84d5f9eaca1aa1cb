// Evaluate trains the network of examples/digits while spare workers evaluate its checkpoints on
// images that are held out of training:
//
//	$ hvdrun -np 2 --min-np 1 --spares 1 -H localhost:3 bin/evaluate -dir /tmp/checkpoints
//	[0]<stdout>:commit 19: held-out accuracy 0.7744, by process 4812
//	[0]<stdout>:commit 57: held-out accuracy 0.9109, by process 4812
//	…
//	[0]<stdout>:21 checkpoints evaluated, 20 of them by spares
//	[0]<stdout>:COMMIT  ACCURACY
//	[0]<stdout>:743     0.9694
//
// Each evaluation is a task, which rank 0 submits. A spare calls tasks.Serve for as long as
// Worker.WhileSpare says. If it becomes a member of the world, it gives its task back, and another
// spare runs it. If rank 0 is lost, the next rank 0 submits the tasks again. When training ends,
// rank 0 evaluates the checkpoints that no spare has evaluated. A task has the path of its
// checkpoint, so all hosts must share the folder.
package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/examples/digits/network"
	"github.com/hvdrun/hvdrun/tasks"
)

// hidden is the number of hidden units.
const hidden = 32

// score is the result of an evaluation.
type score struct {
	Accuracy float64 // on the held-out images
	Host     string
	PID      int
}

var evaluate = tasks.Register[score]("evaluate-digits/v1", evaluateFile)

// evaluateFile evaluates the checkpoint at path.
func evaluateFile(_ context.Context, path string) (s score, err error) {
	_, heldOut, err := dataset.Load()
	if err != nil {
		return s, err
	}
	m := network.New(hidden, 1)
	if err := load(path, m.Params); err != nil {
		return s, err
	}
	s.Host, err = os.Hostname()
	s.Accuracy, s.PID = m.Accuracy(heldOut), os.Getpid()
	return s, err
}

// load reads the parameters of a checkpoint into params.
func load(path string, params []float32) error {
	f, err := checkpoint.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	i := slices.IndexFunc(f.About.Parts, func(p checkpoint.Part) bool { return p.Name == "params" })
	if i < 0 {
		return fmt.Errorf("%s has no part params", path)
	}
	all, err := f.Read(f.About.Parts[i])
	if err != nil {
		return err
	}
	b := slices.Concat(all...)
	if len(b) != 4*len(params) {
		return fmt.Errorf("%s has parameters of %d bytes, not %d", path, len(b), 4*len(params))
	}
	for j := range params {
		params[j] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*j:]))
	}
	return nil
}

type options struct {
	dir      string
	epochs   int
	every    time.Duration
	stepTime time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.dir, "dir", "", "the `FOLDER` of the checkpoints")
	flag.IntVar(&o.epochs, "epochs", 20, "passes over the training images")
	flag.DurationVar(&o.every, "every", time.Second, "pause between two checkpoints")
	flag.DurationVar(&o.stepTime, "step-time", 0, "minimum duration of a step, to slow down the training")
	flag.Parse()
	if flag.NArg() > 0 || o.dir == "" || o.epochs < 1 {
		fmt.Fprintln(os.Stderr, "evaluate: -dir is needed, -epochs must be at least 1, and only flags are accepted")
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

	// A spare evaluates until it becomes a member of the world.
	spare, cancel := w.WhileSpare(ctx)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := tasks.Serve(spare, tasks.ServeConfig{Grace: time.Millisecond}); err != nil && !errors.Is(err, tasks.ErrNoJob) {
			fmt.Fprintln(os.Stderr, "evaluate: no tasks here:", err)
		}
	})
	defer serving.Wait()
	defer cancel()

	results := newResults()
	if err := train(ctx, w, o, results); err != nil {
		return err
	}
	if w.Rank() != 0 {
		return nil
	}
	if err := results.rest(ctx, o.dir); err != nil {
		return err
	}
	results.print()
	return nil
}

// train trains the network. Rank 0 submits each checkpoint.
func train(ctx context.Context, w *elastic.Worker, o options, results *results) error {
	set, _, err := dataset.Load()
	if err != nil {
		return err
	}
	m := network.New(hidden, 1)
	velocity := make([]float32, len(m.Params))
	steps := elastic.NewSteps[float32](w, elastic.StepsOptions{
		Microbatches: 4,
		Batches:      elastic.NewBatches(set.Len(), elastic.SamplerOptions{Shuffle: true, Seed: 1, Batch: 8}),
	}, len(m.Params))
	state := elastic.NewState(w,
		elastic.Tensor("params", m.Params),
		elastic.Tensor("velocity", velocity),
		steps,
		&elastic.Checkpoints{Dir: o.dir, Keep: 1000, Interval: o.every})
	return elastic.Run(ctx, state, func(ctx context.Context) error {
		var watching sync.WaitGroup
		defer watching.Wait()
		if w.Rank() == 0 { // rank in this world
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			watching.Go(func() { results.watch(ctx, o.dir) })
		}
		for steps.Epoch() < o.epochs {
			began := time.Now()
			err := steps.Step(ctx,
				func(b elastic.Micro[float32]) error {
					m.Gradient(b.Gradient[0], set, b.Samples)
					return nil
				},
				func(mean [][]float32) error {
					network.Descend(m.Params, velocity, mean[0], 0.04, 0.9)
					return nil
				})
			if err != nil {
				return err // unchanged: Run handles it
			}
			time.Sleep(o.stepTime - time.Since(began))
		}
		return nil
	})
}

// results are the evaluations so far, by commit.
type results struct {
	mu     sync.Mutex
	scores map[uint64]score
}

func newResults() *results { return &results{scores: make(map[uint64]score)} }

// watch submits each checkpoint that appears in the folder, until ctx ends.
func (r *results) watch(ctx context.Context, dir string) {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, tasks.ErrNoJob) {
			fmt.Fprintln(os.Stderr, "evaluate: checkpoints are evaluated at the end:", err)
		}
		return
	}
	defer pool.Close() // cancels what has not ended
	submitted := make(map[uint64]bool)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	look := time.NewTicker(200 * time.Millisecond)
	defer look.Stop()
	for {
		commits, err := checkpoint.List(dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "evaluate:", err)
		}
		for _, n := range commits {
			if submitted[n] || r.has(n) {
				continue
			}
			submitted[n] = true
			f, err := evaluate.Submit(ctx, pool, checkpoint.Path(dir, n))
			if err != nil {
				return
			}
			waiting.Go(func() {
				if s, err := f.Get(ctx); err == nil {
					r.put(n, s)
				} else if ctx.Err() == nil {
					fmt.Fprintf(os.Stderr, "evaluate: commit %d: %v\n", n, err)
				}
			})
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

func (r *results) has(n uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.scores[n]
	return ok
}

func (r *results) put(n uint64, s score) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.scores[n] = s
	fmt.Printf("commit %d: held-out accuracy %.4f, by process %d\n", n, s.Accuracy, s.PID)
}

// rest evaluates the checkpoints that no spare has evaluated.
func (r *results) rest(ctx context.Context, dir string) error {
	commits, err := checkpoint.List(dir)
	if err != nil {
		return err
	}
	slices.Sort(commits)
	for _, n := range commits {
		if r.has(n) {
			continue
		}
		s, err := evaluateFile(ctx, checkpoint.Path(dir, n))
		if err != nil {
			return err
		}
		r.put(n, s)
	}
	return nil
}

// print prints the commits with the best results.
func (r *results) print() {
	var commits []uint64
	elsewhere := 0
	for n, s := range r.scores {
		commits = append(commits, n)
		if s.PID != os.Getpid() {
			elsewhere++
		}
	}
	slices.SortFunc(commits, func(a, b uint64) int {
		return cmp.Or(cmp.Compare(r.scores[b].Accuracy, r.scores[a].Accuracy), cmp.Compare(a, b))
	})
	fmt.Printf("%d checkpoints evaluated, %d of them by spares\nCOMMIT  ACCURACY\n", len(commits), elsewhere)
	for _, n := range commits[:min(5, len(commits))] {
		fmt.Printf("%-7d %.4f\n", n, r.scores[n].Accuracy)
	}
}
