package gomlx

import (
	"context"
	"errors"
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/hvdrun/hvdrun/collective"
)

// Step is one step of data-parallel training: two graphs, one that computes loss and gradients, and
// one that applies gradients, between which the gradients of all ranks are averaged on the host.
// One goroutine at a time uses it.
type Step struct {
	gradients, apply *model.Exec
	averager         Averager
	arguments        []any // of apply, kept for its memory
}

// Loss builds the graph of a loss, a scalar, of the inputs that are given to Run. It is the mean
// over the examples in them: what ranks compute is averaged with equal weights.
type Loss func(scope *model.Scope, inputs []*graph.Node) *graph.Node

// updater is what an optimizer of gomlx can do besides optimizer.Interface; those of gomlx all can.
type updater interface {
	UpdateGraphWithGradients(scope *model.Scope, gradients []*graph.Node, lossType dtypes.DType)
}

// NewStep builds both graphs for inputs of these shapes, and with them creates and initializes all
// variables of the model and of the optimizer in store. Run may be given inputs of other shapes as
// well; each new combination is compiled once.
//
// Every trainable variable that the loss depends on is trained. Variables that the loss's graph
// itself changes are each rank's own affair: the random state changes alike on all ranks; means of
// batch normalization do not, and belong to those that State.Skip names.
func NewStep(backend compute.Backend, store *model.Store, opt optimizer.Interface, loss Loss, inputs ...shapes.Shape) (*Step, error) {
	update, ok := opt.(updater)
	if !ok {
		return nil, fmt.Errorf("gomlx: the optimizer %T has no UpdateGraphWithGradients", opt)
	}
	s := new(Step)
	var trained []*model.Variable // in the order of their gradients
	var lossType dtypes.DType
	var err error
	s.gradients, err = model.NewExec(backend, store, func(scope *model.Scope, in []*graph.Node) []*graph.Node {
		l := loss(scope, in)
		trained, lossType = nil, l.DType()
		for v := range scope.IterVariables() {
			if v.Trainable && v.InUseByGraph(l.Graph()) {
				trained = append(trained, v)
			}
		}
		out := []*graph.Node{graph.ConvertDType(l, dtypes.Float32)}
		return append(out, scope.BuildTrainableVariablesGradientsGraph(l)...)
	})
	if err != nil {
		return nil, fmt.Errorf("gomlx: gradients: %w", err)
	}
	if _, err := s.gradients.Compile(inputs...); err != nil {
		return nil, fmt.Errorf("gomlx: gradients: %w", err)
	}
	if len(trained) == 0 {
		return nil, errors.New("gomlx: the loss depends on no trainable variable")
	}
	s.apply, err = model.NewExec(backend, store, func(scope *model.Scope, gradients []*graph.Node) *graph.Node {
		g := gradients[0].Graph()
		for _, v := range trained {
			v.NodeValue(g) // optimizers take only variables that the graph uses
		}
		update.UpdateGraphWithGradients(scope, gradients, lossType)
		return graph.ScalarZero(g, dtypes.Float32)
	})
	if err != nil {
		return nil, fmt.Errorf("gomlx: optimizer: %w", err)
	}
	var like []shapes.Shape
	for _, v := range trained {
		like = append(like, v.Shape())
	}
	if _, err := s.apply.Compile(like...); err != nil {
		return nil, fmt.Errorf("gomlx: optimizer: %w", err)
	}
	if err := store.InitializeVariables(backend, nil); err != nil {
		return nil, fmt.Errorf("gomlx: %w", err)
	}
	return s, nil
}

// Run computes the gradients of this rank's inputs (tensors, or Go values that gomlx makes tensors
// of), averages them over the group, applies them, and returns the mean of all ranks' losses. It is
// collective. Where it returns an error of the collective, the gradients have not been applied.
func (s *Step) Run(ctx context.Context, g *collective.Group, inputs ...any) (float32, error) {
	out, err := s.gradients.Call(inputs...)
	if err != nil {
		return 0, fmt.Errorf("gomlx: gradients: %w", err)
	}
	if err := s.averager.Average(ctx, g, out...); err != nil {
		return 0, err
	}
	s.arguments = s.arguments[:0]
	for _, t := range out[1:] {
		s.arguments = append(s.arguments, t)
	}
	if _, err := s.apply.Call(s.arguments...); err != nil {
		return 0, fmt.Errorf("gomlx: optimizer: %w", err)
	}
	loss := tensors.ToScalar[float32](out[0])
	for _, t := range out {
		if err := t.FinalizeAll(); err != nil { // gives the memory of devices back at once
			return 0, fmt.Errorf("gomlx: %w", err)
		}
	}
	return loss, nil
}

// Close gives back the memory of the compiled graphs. The variables stay.
func (s *Step) Close() {
	s.gradients.Finalize()
	s.apply.Finalize()
}
