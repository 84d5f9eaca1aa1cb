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

// Step makes steps of data-parallel training with two graphs: one computes the loss and the
// gradients, the other applies gradients. In between the gradients are averaged over all ranks in
// host memory. A Step must be used by one goroutine at a time.
type Step struct {
	gradients, apply *model.Exec
	averager         Averager
	arguments        []any // of apply, reused
}

// Loss builds the graph of a scalar loss of the inputs of Run. It must be the mean over the
// examples of the inputs, because the losses and gradients of all ranks are averaged with equal
// weights.
type Loss func(scope *model.Scope, inputs []*graph.Node) *graph.Node

// updater is the additional method of optimizers that a Step needs. All optimizers of gomlx have
// it.
type updater interface {
	UpdateGraphWithGradients(scope *model.Scope, gradients []*graph.Node, lossType dtypes.DType)
}

// NewStep builds both graphs for inputs of these shapes, and creates and initializes all variables
// of the model and of the optimizer in store. Run also accepts inputs of other shapes and compiles
// each combination once.
//
// Every trainable variable that the loss depends on is trained. Variables that the graph of the
// loss changes itself are not averaged: the random state changes equally on all ranks, but the
// means of batch normalization do not, so State.Skip should exclude them.
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
			v.NodeValue(g) // optimizers update only variables that the graph uses
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

// Run computes the gradients of this rank's inputs (tensors, or Go values that gomlx converts),
// averages them over the group, applies them, and returns the mean loss of all ranks. It is
// collective and blocks. If it returns an error of the collective, the gradients have not been
// applied.
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
		if err := t.FinalizeAll(); err != nil { // frees device memory at once
			return 0, fmt.Errorf("gomlx: %w", err)
		}
	}
	return loss, nil
}

// Close frees the memory of the compiled graphs. The variables remain.
func (s *Step) Close() {
	s.gradients.Finalize()
	s.apply.Finalize()
}
