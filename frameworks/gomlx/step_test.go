package gomlx

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/plan"
)

var backend = gobackend.GetBackend()

const features = 5

// meanSquares is the loss of a small network with one hidden layer.
func meanSquares(scope *model.Scope, xy []*graph.Node) *graph.Node {
	hidden := graph.Tanh(layers.Dense(scope.In("hidden"), xy[0], true, 4))
	return graph.ReduceAllMean(graph.Square(graph.Sub(layers.Dense(scope.In("out"), hidden, true, 1), xy[1])))
}

// trainer is a store and the step that trains it.
type trainer struct {
	store *model.Store
	*Step
}

func newTrainer(t *testing.T, seed int64, opt optimizer.Interface) trainer {
	t.Helper()
	store := model.NewStore()
	must(t, store.SetRNGStateFromSeed(seed))
	s, err := NewStep(backend, store, opt, meanSquares, shapes.Make(dtypes.Float32, 4, features), shapes.Make(dtypes.Float32, 4, 1))
	must(t, err)
	t.Cleanup(s.Close)
	return trainer{store, s}
}

func adam() optimizer.Interface { return optimizer.Adam().LearningRate(0.01).Done() }

// examples returns examples of a step.
func examples(step int, indices ...int) (x, y *tensors.Tensor) {
	n := len(indices)
	xs, ys := make([]float32, 0, n*features), make([]float32, 0, n)
	for _, i := range indices {
		random := rand.New(rand.NewPCG(uint64(step), uint64(i)))
		sum := float32(0)
		for range features {
			f := random.Float32()
			xs, sum = append(xs, f), sum+f
		}
		ys = append(ys, sum)
	}
	return tensors.FromFlatDataAndDimensions(xs, n, features), tensors.FromFlatDataAndDimensions(ys, n, 1)
}

// from returns n indices.
func from(first, n int) (indices []int) {
	for i := range n {
		indices = append(indices, first+i)
	}
	return indices
}

// together calls f for each rank of a group of n.
func together(t *testing.T, n int, f func(g *collective.Group)) {
	t.Helper()
	var running sync.WaitGroup
	for _, g := range collective.Local(n) {
		running.Go(func() {
			defer g.Close()
			f(g)
		})
	}
	running.Wait()
}

// step makes a step of one microbatch on every rank of the group, and returns the mean loss.
func (tr trainer) step(ctx context.Context, g *collective.Group, x, y *tensors.Tensor) (float32, error) {
	var m elastic.Micro[float32]
	for _, n := range tr.Lengths() {
		m.Gradient = append(m.Gradient, make([]float32, n))
	}
	if err := tr.Backward(m, x, y); err != nil {
		return 0, err
	}
	for _, sum := range m.Gradient {
		if err := collective.AllReduce(ctx, g, sum, collective.Average); err != nil {
			return 0, err
		}
	}
	return m.Gradient[0][0], tr.Apply(m.Gradient)
}

// TestStepTogether makes the same steps with three ranks and with one, whose examples are the union
// of the three.
func TestStepTogether(t *testing.T) {
	for name, opt := range map[string]func() optimizer.Interface{
		"adam": adam, "sgd": func() optimizer.Interface { return optimizer.StochasticGradientDescent().WithLearningRate(0.1) },
	} {
		t.Run(name, func(t *testing.T) {
			const ranks, batch, steps = 3, 4, 30
			var of [ranks]trainer
			for r := range of {
				of[r] = newTrainer(t, 1, opt())
			}
			train := func(of trainer, g *collective.Group, n int) (losses [steps]float32) {
				for step := range losses {
					x, y := examples(step, from(g.Rank()*n, n)...)
					var err error
					if losses[step], err = of.step(t.Context(), g, x, y); err != nil {
						t.Errorf("rank %d, step %d: %v", g.Rank(), step, err)
						g.Abort(err)
						return
					}
				}
				return losses
			}
			var losses [ranks][steps]float32
			together(t, ranks, func(g *collective.Group) { losses[g.Rank()] = train(of[g.Rank()], g, batch) })
			alone := newTrainer(t, 1, opt())
			want := train(alone, collective.Local(1)[0], ranks*batch)

			first := digest(t, NewState(of[0].store))
			for r := range ranks {
				if got := digest(t, NewState(of[r].store)); got != first || losses[r] != losses[0] {
					t.Errorf("rank %d and rank 0 differ", r)
				}
			}
			for step, l := range want {
				if math.Abs(float64(l-losses[0][step])) > 1e-4 {
					t.Fatalf("step %d: loss %v of three ranks, %v of one", step, losses[0][step], l)
				}
			}
			if want[steps-1] > want[0]/2 {
				t.Errorf("loss %v after %d steps, %v before: nothing was learned", want[steps-1], steps, want[0])
			}
			for v := range alone.store.IterVariables() {
				if !v.Trainable {
					continue
				}
				if !v.MustValue().InDelta(of[0].store.GetVariable(v.Path()).MustValue(), 1e-3) {
					t.Errorf("%s of three ranks differs from that of one", v.Path())
				}
			}
		})
	}
}

// TestSteps trains while workers die and come, with dropout: all variables at the end have the bits
// of an undisturbed worker, the optimizer's and the random state included.
func TestSteps(t *testing.T) {
	err := elastictest.Undisturbed(elastictest.Config{
		Hosts: []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 1}},
		Deaths: []elastictest.Moment{
			{Rank: 0, Phase: elastictest.Saved, Commit: 5},
			{Rank: 1, Phase: elastictest.Saved, Commit: 11},
			{Rank: 1, Phase: elastictest.Syncing, Generation: 3},
		},
	}, func(ctx context.Context) (uint64, error) {
		return train(ctx, 4, nil)
	}, func(job *elastictest.Job) error {
		if err := job.Await(elastictest.Commit(20)); err != nil {
			return err
		}
		job.AddHost("c", 2)
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// dropout is like meanSquares, with dropout of the inputs.
func dropout(scope *model.Scope, xy []*graph.Node) *graph.Node {
	keep := scope.RandomBernoulli(graph.Const(xy[0].Graph(), float32(0.8)), xy[0].Shape())
	return meanSquares(scope, []*graph.Node{graph.Mul(xy[0], keep), xy[1]})
}

// train trains a network by elastic.Steps until the end of an epoch, and returns the digest of the
// variables. Applied, if not nil, is called after each step.
func train(ctx context.Context, epochs int, applied func(*elastic.Steps[float32]) error, more ...elastic.Part) (uint64, error) {
	store := model.NewStore()
	if err := store.SetRNGStateFromSeed(1); err != nil {
		return 0, err
	}
	step, err := NewStep(backend, store, adam(), dropout, shapes.Make(dtypes.Float32, 4, features), shapes.Make(dtypes.Float32, 4, 1))
	if err != nil {
		return 0, err
	}
	defer step.Close()
	w, err := elastic.Init(ctx)
	if err != nil {
		return 0, err
	}
	defer w.Close()
	steps := elastic.NewSteps[float32](w, elastic.StepsOptions{
		Microbatches: 4,
		Batches:      elastic.NewBatches(150, elastic.SamplerOptions{Batch: 4, Shuffle: true}), // 38, the last one of two
	}, step.Lengths()...)
	variables := NewState(store)
	state := elastic.NewState(w, append(more, variables, steps)...)
	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		for steps.Epoch() < epochs {
			err := steps.Step(ctx, func(m elastic.Micro[float32]) error {
				x, y := examples(0, m.Samples...)
				return step.Backward(m, x, y)
			}, step.Apply)
			if err != nil {
				return err
			}
			if applied != nil {
				if err := applied(steps); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return variables.Digest()
}

// TestBackward adds to what is there, by random numbers of the microbatch alone, and changes
// no variable.
func TestBackward(t *testing.T) {
	store := model.NewStore()
	must(t, store.SetRNGStateFromSeed(1))
	s, err := NewStep(backend, store, adam(), dropout, shapes.Make(dtypes.Float32, 4, features), shapes.Make(dtypes.Float32, 4, 1))
	must(t, err)
	defer s.Close()
	before := digest(t, NewState(store))
	x, y := examples(0, from(0, 4)...)
	losses := map[float32]int{}
	for index := range 3 {
		m := elastic.Micro[float32]{Index: index}
		for _, n := range s.Lengths() {
			m.Gradient = append(m.Gradient, make([]float32, n))
		}
		must(t, s.Backward(m, x, y))
		once := slices.Concat(m.Gradient...)
		must(t, s.Backward(m, x, y))
		for i, twice := range slices.Concat(m.Gradient...) {
			if twice != 2*once[i] {
				t.Fatalf("microbatch %d: number %d is %v, and %v after another backward", index, i, once[i], twice)
			}
		}
		losses[once[0]]++
	}
	if len(losses) != 3 {
		t.Errorf("losses %v: all microbatches have the same random numbers", losses)
	}
	if digest(t, NewState(store)) != before {
		t.Error("variables have changed")
	}
	for _, wrong := range [][][]float32{nil, make([][]float32, len(s.Lengths()))} {
		if err := s.Backward(elastic.Micro[float32]{Gradient: wrong}, x, y); err == nil || !strings.Contains(err.Error(), "Step.Lengths") {
			t.Errorf("Backward into tensors of other lengths: %v", err)
		}
		if err := s.Apply(wrong); err == nil {
			t.Error("tensors of other lengths were applied")
		}
	}
	if digest(t, NewState(store)) != before {
		t.Error("variables have changed")
	}
}

// TestJoiner: a worker joins after the others have made steps. It has no variables of an optimizer,
// or none at all.
func TestJoiner(t *testing.T) {
	veteran := newTrainer(t, 1, adam())
	old := NewState(veteran.store)
	for step := range 5 {
		x, y := examples(step, from(0, 4)...)
		if _, err := veteran.step(t.Context(), collective.Local(1)[0], x, y); err != nil {
			t.Fatal(err)
		}
	}
	bare := trainer{store: model.NewStore()} // gets its variables before its graphs exist
	newcomer := NewState(bare.store)
	must(t, newcomer.Save())
	must(t, syncAll(t.Context(), 0, old, newcomer)[1])
	step, err := NewStep(backend, bare.store, adam(), meanSquares, shapes.Make(dtypes.Float32, 4, features), shapes.Make(dtypes.Float32, 4, 1))
	must(t, err)
	defer step.Close()
	bare.Step = step
	if digest(t, newcomer) != digest(t, old) {
		t.Fatal("building the graphs has changed what was synchronised")
	}

	forward := trainer{store: model.NewStore()} // has weights of another seed, but none of the optimizer's variables
	must(t, forward.store.SetRNGStateFromSeed(2))
	predict, err := model.NewExec(backend, forward.store, func(scope *model.Scope, xy []*graph.Node) *graph.Node { return meanSquares(scope, xy) })
	must(t, err)
	defer predict.Finalize()
	x, y := examples(0, from(0, 4)...)
	if _, err := predict.Call(x, y); err != nil {
		t.Fatal(err)
	}
	second := NewState(forward.store)
	must(t, second.Save())
	must(t, syncAll(t.Context(), 0, old, second)[1])
	step, err = NewStep(backend, forward.store, adam(), meanSquares, shapes.Make(dtypes.Float32, 4, features), shapes.Make(dtypes.Float32, 4, 1))
	must(t, err)
	defer step.Close()
	forward.Step = step

	of := []trainer{veteran, bare, forward}
	together(t, len(of), func(g *collective.Group) {
		for step := range 10 {
			x, y := examples(100+step, from(4*g.Rank(), 4)...)
			if _, err := of[g.Rank()].step(t.Context(), g, x, y); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
				g.Abort(err)
				return
			}
		}
	})
	if a, b, c := digest(t, old), digest(t, newcomer), digest(t, second); a != b || a != c {
		t.Errorf("the ranks differ after ten steps: %x, %x, %x", a, b, c)
	}
}

func TestNewStepRefuses(t *testing.T) {
	shape := shapes.Make(dtypes.Float32, 4, features)
	if _, err := NewStep(backend, model.NewStore(), nil, meanSquares, shape, shape); err == nil {
		t.Error("no optimizer was taken for one")
	}
	constant := func(_ *model.Scope, in []*graph.Node) *graph.Node { return graph.ReduceAllMean(in[0]) }
	if _, err := NewStep(backend, model.NewStore(), adam(), constant, shape); err == nil {
		t.Error("a loss without variables was taken")
	}
	if _, err := NewStep(backend, model.NewStore(), adam(), meanSquares, shape, shapes.Make(dtypes.Float32, 3, 7)); err == nil {
		t.Error("inputs that do not fit were taken")
	}
	wide := newStore(t, "w", []float64{1, 2})
	double := func(scope *model.Scope, in []*graph.Node) *graph.Node {
		return graph.ReduceAllSum(wide.GetVariable("/w").NodeValue(in[0].Graph()))
	}
	if _, err := NewStep(backend, wide, adam(), double, shape); err == nil || !strings.Contains(err.Error(), `"/w" is of type Float64; a Step trains Float32 only`) {
		t.Errorf("a variable of float64: %v", err)
	}
}
