package gomlx

import (
	"math"
	"math/rand/v2"
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

// examples returns n examples of a step.
func examples(step, first, n int) (x, y *tensors.Tensor) {
	xs, ys := make([]float32, 0, n*features), make([]float32, 0, n)
	for i := range n {
		random := rand.New(rand.NewPCG(uint64(step), uint64(first+i)))
		sum := float32(0)
		for range features {
			f := random.Float32()
			xs, sum = append(xs, f), sum+f
		}
		ys = append(ys, sum)
	}
	return tensors.FromFlatDataAndDimensions(xs, n, features), tensors.FromFlatDataAndDimensions(ys, n, 1)
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
					x, y := examples(step, g.Rank()*n, n)
					var err error
					if losses[step], err = of.Run(t.Context(), g, x, y); err != nil {
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

func TestStepThatAbortsAppliesNothing(t *testing.T) {
	groups := collective.Local(2)
	must(t, groups[1].Close()) // simulates a failed peer
	defer groups[0].Close()
	one := newTrainer(t, 1, adam())
	s := NewState(one.store)
	before := digest(t, s)
	x, y := examples(0, 0, 4)
	if _, err := one.Run(t.Context(), groups[0], x, y); err == nil {
		t.Fatal("a step with a peer that is gone succeeded")
	}
	if digest(t, s) != before {
		t.Error("variables have changed")
	}
}

// TestJoiner: a worker joins after the others have made steps. It has no variables of an optimizer,
// or none at all.
func TestJoiner(t *testing.T) {
	veteran := newTrainer(t, 1, adam())
	old := NewState(veteran.store)
	for step := range 5 {
		x, y := examples(step, 0, 4)
		if _, err := veteran.Run(t.Context(), collective.Local(1)[0], x, y); err != nil {
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
	x, y := examples(0, 0, 4)
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
			x, y := examples(100+step, 4*g.Rank(), 4)
			if _, err := of[g.Rank()].Run(t.Context(), g, x, y); err != nil {
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
}

func TestAverage(t *testing.T) {
	const ranks = 3
	together(t, ranks, func(g *collective.Group) {
		r := float32(g.Rank())
		list := []*tensors.Tensor{
			tensors.MustFromAnyValue([]float32{r, 10 * r}),
			tensors.MustFromAnyValue([]float64{float64(r) + 0.5}),
			tensors.FromScalar(r),
			tensors.FromShape(shapes.Make(dtypes.Float32, 0)),
			tensors.FromShape(shapes.Make(dtypes.BFloat16, 2)),
			tensors.FromShape(shapes.Make(dtypes.Float16, 1)),
		}
		fill := func(i int, bits ...byte) {
			if err := list[i].MutableBytes(func(b []byte) { copy(b, bits) }); err != nil {
				t.Error(err)
			}
		}
		b, h := collective.ToBFloat16(r), collective.ToFloat16(r)
		fill(4, byte(b), byte(b>>8), byte(b), byte(b>>8))
		fill(5, byte(h), byte(h>>8))
		var a Averager
		for range 2 { // averages of equal values do not change
			if err := a.Average(t.Context(), g, list...); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
				return
			}
		}
		for i, want := range []any{[]float32{1, 10}, []float64{1.5}, float32(1)} {
			if !list[i].Equal(tensors.MustFromAnyValue(want)) {
				t.Errorf("rank %d: tensor %d is %v, want %v", g.Rank(), i, list[i], want)
			}
		}
		if err := list[4].ConstBytes(func(got []byte) {
			if one := collective.ToBFloat16(1); got[0] != byte(one) || got[3] != byte(one>>8) {
				t.Errorf("rank %d: mean of bfloat16 is % x", g.Rank(), got)
			}
		}); err != nil {
			t.Error(err)
		}
	})
	var a Averager
	if err := a.Average(t.Context(), collective.Local(1)[0], tensors.FromScalar(int32(1))); err == nil {
		t.Error("integers were averaged")
	}
}
