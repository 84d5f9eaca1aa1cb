// Package gomlx makes training programs of the framework gomlx (github.com/gomlx/gomlx) elastic and
// data parallel.
//
// A State is the part of an elastic.State with all variables of a model.Store: weights, the
// optimizer's moments and step, learning rate, random state. A Step computes the gradients of the
// microbatches of elastic.Steps, and applies their mean: the final variables have the same bits,
// whatever the workers were.
//
//	step, err := gomlx.NewStep(backend, store, optimizer.Adam().Done(), loss, shapeOfX, shapeOfY)
//	steps := elastic.NewSteps[float32](w, elastic.StepsOptions{Microbatches: 8, Batches: batches}, step.Lengths()...)
//	state := elastic.NewState(w, gomlx.NewState(store), steps)
//	err = elastic.Run(ctx, state, func(ctx context.Context) error {
//		for steps.Epoch() < epochs {
//			err := steps.Step(ctx, func(m elastic.Micro[float32]) error {
//				x, y := tensors(m.Samples)
//				return step.Backward(m, x, y)
//			}, step.Apply)
//			if err != nil {
//				return err
//			}
//		}
//		return nil
//	})
//
// All backends are supported: variables and gradients are copied through host memory. The same bits
// also need a backend that computes the same bits in each process, as gomlx's own in Go does.
package gomlx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
)

var _ elastic.Part = (*State)(nil)

// State is a part of an elastic.State with the variables of a store. It keeps two copies of their
// values in host memory: the last save, and a buffer for the next. The elastic.State keeps another,
// or two during a commit, to compare the ranks and to write checkpoints.
//
// Variables may be created at any time, but those that a step creates (mostly an optimizer's) must
// exist before the first save, which elastic.Run makes when it begins, because Restore cannot
// remove them. NewStep creates them. A worker that joins late needs none: Sync creates missing
// variables.
//
// The zero value is not usable; call NewState.
type State struct {
	// Skip, if not nil, selects the variables that are neither saved nor restored nor synchronised,
	// such as metrics that only one rank computes. It must be set before the first use and select
	// the same variables on every rank.
	Skip func(*model.Variable) bool

	store        *model.Store
	saved, spare snapshot
	hasSaved     bool
	created      []string // by Sync since the last save
}

// NewState returns the state of all variables of store, including those created later.
func NewState(store *model.Store) *State { return &State{store: store} }

// snapshot is a copy of variables.
type snapshot struct {
	variables []variable
	values    []byte // of all variables, concatenated
}

// variable describes a variable without its value. Its fields are exported because ranks send it to
// each other.
type variable struct {
	Path      string
	DType     string
	Dims      []int
	Trainable bool
	// Initial: it has an initializer but no value yet.
	Initial bool `json:",omitempty"`
	Bytes   int  // size of its value
}

// same reports whether two variables can hold each other's values.
func (v variable) same(w variable) bool {
	return v.Path == w.Path && v.DType == w.DType && slices.Equal(v.Dims, w.Dims)
}

func (v variable) String() string { return fmt.Sprintf("%q (%s %v)", v.Path, v.DType, v.Dims) }

// live calls visit for every variable of the store that is not skipped, in the order of creation.
func (s *State) live(visit func(*model.Variable) error) error {
	for v := range s.store.IterVariables() {
		if s.Skip != nil && s.Skip(v) {
			continue
		}
		if err := visit(v); err != nil {
			return fmt.Errorf("gomlx: variable %q: %w", v.Path(), err)
		}
	}
	return nil
}

// describe returns the description of v without the size of its value.
func describe(v *model.Variable) variable {
	shape := v.Shape()
	return variable{
		Path: v.Path(), DType: shape.DType.String(), Dims: slices.Clone(shape.Dimensions), Trainable: v.Trainable, Initial: !v.HasValue(),
	}
}

// capture copies all variables into to, whose memory it reuses.
func (s *State) capture(to *snapshot) error {
	to.variables, to.values = to.variables[:0], to.values[:0]
	return s.live(func(v *model.Variable) error {
		d := describe(v)
		if d.Initial {
			to.variables = append(to.variables, d)
			return nil
		}
		value, err := v.Value()
		if err != nil {
			return err
		}
		err = value.ConstBytes(func(b []byte) {
			d.Bytes = len(b)
			to.values = append(to.values, b...)
		})
		if err != nil {
			return err
		}
		to.variables = append(to.variables, d)
		_, err = d.shape() // fails for a variable that could not be restored
		return err
	})
}

// Save keeps a copy of all values.
func (s *State) Save() error {
	if err := s.capture(&s.spare); err != nil {
		return err
	}
	s.saved, s.spare = s.spare, s.saved
	s.hasSaved, s.created = true, nil
	return nil
}

// Restore sets every variable to its value at the last save. A variable that had only an
// initializer then is initialized again when a graph next uses it. Variables that Sync has created
// since are deleted; another variable that did not exist then is an error.
func (s *State) Restore() error {
	if !s.hasSaved {
		return errors.New("gomlx: there is no save to restore")
	}
	// No graph uses them yet, because a save follows every successful Sync.
	for _, path := range s.created {
		if err := s.store.DeleteVariable(path); err != nil {
			return fmt.Errorf("gomlx: variable %q: %w", path, err)
		}
	}
	s.created = nil
	if err := s.complete(s.saved); err != nil {
		return fmt.Errorf("%w: create all variables before training, as NewStep does", err)
	}
	return s.assign(s.saved)
}

// complete returns an error if a variable of the store is missing in from.
func (s *State) complete(from snapshot) error {
	there := make(map[string]bool, len(from.variables))
	for _, v := range from.variables {
		there[v.Path] = true
	}
	return s.live(func(v *model.Variable) error {
		if !there[v.Path()] {
			return errors.New("it does not exist in the state to restore")
		}
		return nil
	})
}

// assign sets the variables of the store to from, and creates missing ones.
func (s *State) assign(from snapshot) error {
	rest := from.values
	for _, d := range from.variables {
		value := rest[:d.Bytes]
		rest = rest[d.Bytes:]
		if err := s.set(d, value); err != nil {
			return fmt.Errorf("gomlx: variable %v: %w", d, err)
		}
	}
	return nil
}

func (s *State) set(d variable, value []byte) error {
	v := s.store.GetVariable(d.Path)
	if d.Initial {
		if v == nil || !v.HasValue() {
			return nil // the graph that uses it creates or initializes it
		}
		return v.SetValue(nil)
	}
	shape, err := d.shape()
	if err != nil {
		return err
	}
	t := tensors.FromShape(shape)
	var room int
	if err := t.MutableBytes(func(b []byte) { room = copy(b, value) + len(b) - len(value) }); err != nil {
		return err
	}
	if room != len(value) {
		return fmt.Errorf("the value has %d bytes instead of %d", len(value), room)
	}
	if v == nil {
		if v, err = s.store.CreateVariable(d.Path, t); err != nil {
			return err
		}
		s.created = append(s.created, d.Path)
	} else if err := v.SetValue(t); err != nil {
		return err
	}
	v.SetTrainable(d.Trainable)
	return nil
}

// shape validates a description from another rank before memory is allocated for it.
func (v variable) shape() (shapes.Shape, error) {
	dtype, err := dtypes.DTypeString(v.DType)
	if err != nil {
		return shapes.Shape{}, err
	}
	if !dtype.IsSupported() || dtype.IsPacked() {
		return shapes.Shape{}, fmt.Errorf("the type %s is not supported", v.DType)
	}
	elements := 1
	for _, d := range v.Dims {
		if d < 0 || d > 0 && elements > math.MaxInt/16/d {
			return shapes.Shape{}, fmt.Errorf("its dimensions are %v", v.Dims)
		}
		elements *= d
	}
	if n := dtype.SizeForDimensions(v.Dims...); n != v.Bytes {
		return shapes.Shape{}, fmt.Errorf("its value has %d bytes, not %d", v.Bytes, n)
	}
	return shapes.Make(dtype, v.Dims...), nil
}

// Sync sets the variables of every rank to those of root. It is collective and blocks. It creates
// missing variables, so a worker that joins late may have an empty store. A rank returns an error
// and changes nothing if it has a variable that root does not have or of another shape, or if its
// trainable variables are in another order, which is the order of their gradients.
func (s *State) Sync(ctx context.Context, g *collective.Group, root int) error {
	var message []byte
	if g.Rank() == root {
		if err := s.capture(&s.spare); err != nil {
			return err
		}
		var err error
		if message, err = json.Marshal(s.spare.variables); err != nil {
			return fmt.Errorf("gomlx: %w", err)
		}
	}
	// Memory grows with the received data, regardless of the length that the root announces.
	message, err := collective.BroadcastBytes(ctx, g, message, root)
	if err != nil {
		return err
	}
	values, err := collective.BroadcastBytes(ctx, g, s.spare.values, root)
	if err != nil || g.Rank() == root {
		return err
	}
	var from snapshot
	if err := json.Unmarshal(message, &from.variables); err != nil {
		return fmt.Errorf("gomlx: variables of rank %d: %w", root, err)
	}
	from.values = values
	if err := s.fits(from); err != nil {
		return err
	}
	return s.assign(from)
}

// fits returns an error unless the root's message is complete and matches this rank's store.
func (s *State) fits(from snapshot) error {
	left := len(from.values)
	theirs := make(map[string]variable, len(from.variables))
	var order, mine []string // of trainable variables
	for _, d := range from.variables {
		if _, err := d.shape(); !d.Initial && err != nil {
			return fmt.Errorf("gomlx: the root's variable %v: %w", d, err)
		}
		if d.Bytes < 0 || d.Bytes > left || d.Initial && d.Bytes > 0 {
			return fmt.Errorf("gomlx: the root's variable %v: its value is truncated", d)
		}
		left -= d.Bytes
		theirs[d.Path] = d
		if d.Trainable {
			order = append(order, d.Path)
		}
	}
	if left != 0 || len(theirs) != len(from.variables) {
		return errors.New("gomlx: the root's variables do not match the length of their values")
	}
	err := s.live(func(v *model.Variable) error {
		d, there := theirs[v.Path()]
		if own := describe(v); !there {
			return errors.New("the root of the sync does not have it")
		} else if !own.same(d) {
			return fmt.Errorf("this rank's is a %s %v, the root's a %s %v", own.DType, own.Dims, d.DType, d.Dims)
		}
		if d.Trainable {
			mine = append(mine, v.Path())
		}
		return nil
	})
	if err != nil {
		return err
	}
	// Variables that are missing here are created last, in the root's order.
	for _, path := range order {
		if !slices.Contains(mine, path) {
			mine = append(mine, path)
		}
	}
	if !slices.Equal(mine, order) {
		return fmt.Errorf("gomlx: trainable variables were created in the order %v on this rank and %v on the root of the sync", mine, order)
	}
	return nil
}

// Digest returns a hash of all names, shapes and values. Equal variables have equal digests on all
// ranks.
func (s *State) Digest() (uint64, error) {
	if err := s.capture(&s.spare); err != nil {
		return 0, err
	}
	// The order of creation differs on a rank whose variables were created by Sync.
	value := make(map[string][]byte, len(s.spare.variables))
	rest := s.spare.values
	for _, d := range s.spare.variables {
		value[d.Path], rest = rest[:d.Bytes], rest[d.Bytes:]
	}
	slices.SortFunc(s.spare.variables, func(a, b variable) int { return strings.Compare(a.Path, b.Path) })
	h := fnv.New64a()
	for _, d := range s.spare.variables {
		fmt.Fprintf(h, "%v %t %d\n", d, d.Initial, d.Bytes)
		h.Write(value[d.Path])
	}
	return h.Sum64(), nil
}
