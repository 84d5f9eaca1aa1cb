package gomlx

import (
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
	"github.com/hvdrun/hvdrun/elastic"
)

// Step is the two halves of a training step, a graph each: Backward computes the loss and the
// gradients of a microbatch, Apply applies their mean. In between elastic.Steps averages them over
// all microbatches in host memory. A Step must be used by one goroutine at a time.
type Step struct {
	gradients, apply *model.Exec
	trained          []*model.Variable // in the order of their gradients
	random           *model.Variable   // the random state, if the graph of the gradients changes it
}

// Loss builds the graph of a scalar loss of the inputs of Backward. It must be the mean over the
// examples of the inputs. The losses and gradients of all microbatches are averaged with equal
// weights, also where the last one of an epoch has fewer examples.
type Loss func(scope *model.Scope, inputs []*graph.Node) *graph.Node

// updater is the additional method of optimizers that a Step needs. All optimizers of gomlx have
// it.
type updater interface {
	UpdateGraphWithGradients(scope *model.Scope, gradients []*graph.Node, lossType dtypes.DType)
}

// NewStep builds both graphs for inputs of these shapes, and creates and initializes all variables
// of the model and of the optimizer in store. Backward also accepts inputs of other shapes and
// compiles each combination once.
//
// Every trainable variable that the loss depends on is trained. It is an error if one has another
// type than Float32. Non-trainable variables that the graph of the loss changes, such as the means
// of batch normalization, depend on the microbatches that a rank computes, so State.Skip should
// exclude them; the random state is an exception, see Backward.
func NewStep(backend compute.Backend, store *model.Store, opt optimizer.Interface, loss Loss, inputs ...shapes.Shape) (*Step, error) {
	update, ok := opt.(updater)
	if !ok {
		return nil, fmt.Errorf("gomlx: the optimizer %T has no UpdateGraphWithGradients", opt)
	}
	s := new(Step)
	var lossType dtypes.DType
	var err error
	s.gradients, err = model.NewExec(backend, store, func(scope *model.Scope, in []*graph.Node) []*graph.Node {
		l := loss(scope, in)
		lossType = l.DType()
		s.use(scope, l.Graph())
		out := []*graph.Node{graph.ConvertDType(l, dtypes.Float32)}
		return append(out, scope.BuildTrainableVariablesGradientsGraph(l)...)
	})
	if err != nil {
		return nil, fmt.Errorf("gomlx: gradients: %w", err)
	}
	if _, err := s.gradients.Compile(inputs...); err != nil {
		return nil, fmt.Errorf("gomlx: gradients: %w", err)
	}
	if len(s.trained) == 0 {
		return nil, errors.New("gomlx: the loss depends on no trainable variable")
	}
	for _, v := range s.trained {
		if v.DType() != dtypes.Float32 {
			return nil, fmt.Errorf("gomlx: the trainable variable %q is of type %s; a Step trains Float32 only", v.Path(), v.DType())
		}
	}
	s.apply, err = model.NewExec(backend, store, func(scope *model.Scope, gradients []*graph.Node) *graph.Node {
		g := gradients[0].Graph()
		for _, v := range s.trained {
			v.NodeValue(g) // optimizers update only variables that the graph uses
		}
		update.UpdateGraphWithGradients(scope, gradients, lossType)
		return graph.ScalarZero(g, dtypes.Float32)
	})
	if err != nil {
		return nil, fmt.Errorf("gomlx: optimizer: %w", err)
	}
	var like []shapes.Shape
	for _, v := range s.trained {
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

// use finds the variables that the graph of the loss trains, and the random state.
func (s *Step) use(scope *model.Scope, g *graph.Graph) {
	s.trained, s.random = nil, nil
	for v := range scope.IterVariables() {
		if v.Trainable && v.InUseByGraph(g) {
			s.trained = append(s.trained, v)
		}
		if v.Path() == model.JoinPath("/", model.RNGStateVariableName) && v.ChangedInGraph(g) {
			s.random = v
		}
	}
}

// Lengths returns the lengths of the tensors that Backward fills, for elastic.NewSteps: 1 for the
// loss, and the size of each trained variable.
func (s *Step) Lengths() []int {
	n := []int{1}
	for _, v := range s.trained {
		n = append(n, v.Shape().Size())
	}
	return n
}

// Backward computes the loss and the gradients of a microbatch from its inputs (tensors, or Go
// values that gomlx converts), and adds them to m.Gradient, the loss to the first number. Random
// numbers of the graph, such as those of dropout, come from m.Rand. It changes no other variables
// than those that State.Skip should exclude.
func (s *Step) Backward(m elastic.Micro[float32], inputs ...any) error {
	if len(m.Gradient) != 1+len(s.trained) {
		return fmt.Errorf("gomlx: %d tensors are given for the loss and %d gradients: see Step.Lengths", len(m.Gradient), len(s.trained))
	}
	out, err := s.call(m, inputs)
	if err != nil {
		return fmt.Errorf("gomlx: gradients: %w", err)
	}
	for i, t := range out {
		sum := m.Gradient[i]
		if t.Size() != len(sum) {
			return fmt.Errorf("gomlx: %d elements for gradient %d, which has %d: see Step.Lengths", len(sum), i, t.Size())
		}
		add := func(values []float32) { collective.Combine(sum, sum, values, collective.Sum) }
		if err := tensors.ConstFlatData(t, add); err != nil {
			return fmt.Errorf("gomlx: gradient %d: %w", i, err)
		}
		if err := t.FinalizeAll(); err != nil { // frees device memory at once
			return fmt.Errorf("gomlx: %w", err)
		}
	}
	return nil
}

// call executes the graph of the gradients with the random numbers of the microbatch.
func (s *Step) call(m elastic.Micro[float32], inputs []any) ([]*tensors.Tensor, error) {
	if s.random == nil {
		return s.gradients.Call(inputs...)
	}
	value, err := s.random.Value()
	if err != nil {
		return nil, err
	}
	before, err := value.LocalClone()
	if err != nil {
		return nil, err
	}
	state := make([]uint64, graph.RNGStateShape.Size())
	random := m.Rand()
	for i := range state {
		state[i] = random.Uint64()
	}
	if err := s.random.SetValue(tensors.FromFlatDataAndDimensions(state, graph.RNGStateShape.Dimensions...)); err != nil {
		return nil, err
	}
	out, err := s.gradients.Call(inputs...)
	// Ranks that compute different microbatches must not differ in it afterwards.
	return out, errors.Join(err, s.random.SetValue(before))
}

// Apply changes the variables by the mean of what Backward has computed. It is the apply function
// of elastic.Steps.Step, or a part of it. The mean loss is mean[0][0].
func (s *Step) Apply(mean [][]float32) error {
	if len(mean) != 1+len(s.trained) {
		return fmt.Errorf("gomlx: %d tensors are given for the loss and %d gradients: see Step.Lengths", len(mean), len(s.trained))
	}
	var arguments []any
	for i, v := range s.trained {
		if len(mean[1+i]) != v.Shape().Size() {
			return fmt.Errorf("gomlx: gradient %d of %q has %d elements, not %d", i, v.Path(), len(mean[1+i]), v.Shape().Size())
		}
		arguments = append(arguments, tensors.FromFlatDataAndDimensions(mean[1+i], v.Shape().Dimensions...))
	}
	if _, err := s.apply.Call(arguments...); err != nil {
		return fmt.Errorf("gomlx: optimizer: %w", err)
	}
	for _, t := range arguments {
		if err := t.(*tensors.Tensor).FinalizeAll(); err != nil { // frees device memory at once
			return fmt.Errorf("gomlx: %w", err)
		}
	}
	return nil
}

// Close frees the memory of the compiled graphs. The variables remain.
func (s *Step) Close() {
	s.gradients.Finalize()
	s.apply.Finalize()
}
