package elastic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/collective"
)

// StepsOptions configure Steps. All ranks must use the same.
type StepsOptions struct {
	// Name distinguishes the steps from the other parts of the state. Empty: "steps".
	Name string
	// Microbatches is the number of microbatches of a step, from 1 to 65536. The last step of an
	// epoch has the remaining ones. The number is fixed for the job, regardless of the number of
	// workers; the usual number of workers times a power of two is cheapest.
	Microbatches int
	// Batches assigns samples to the microbatches. Nil: Micro.Samples is nil, and there is one
	// endless epoch.
	Batches Batches
	// Seed is the seed of the microbatches' random numbers.
	Seed int64
	// Balance gives fewer microbatches to ranks that need more time for one. The results are the
	// same, bit for bit.
	Balance bool
}

// Steps runs steps of training whose results do not depend on the workers. A step is a batch of a
// fixed number of microbatches, which the ranks share. Their gradients are averaged in an order
// that only the numbers of the microbatches determine. The weights are therefore the same, bit for
// bit, regardless of the number of workers and of workers that die, join or leave during training:
//
//	steps := elastic.NewSteps[float32](w, elastic.StepsOptions{
//		Microbatches: 32,
//		Batches:      elastic.NewBatches(len(images), elastic.SamplerOptions{Batch: 8, Shuffle: true}),
//	}, len(weights))
//	state := elastic.NewState(w, elastic.Tensor("weights", weights), steps)
//	err = elastic.Run(ctx, state, func(ctx context.Context) error {
//		for steps.Epoch() < epochs {
//			err := steps.Step(ctx,
//				func(m elastic.Micro[float32]) error {
//					addGradient(m.Gradient[0], weights, m.Samples)
//					return nil
//				},
//				func(mean [][]float32) error {
//					descend(weights, mean[0])
//					return nil
//				})
//			if err != nil {
//				return err
//			}
//		}
//		return nil
//	})
//
// When a worker dies, no step is lost and nothing is restored: the others keep their gradients,
// share the microbatches of the lost worker, and finish the same step.
//
// Steps are a Part of one State. They must be used by one goroutine at a time.
type Steps[T collective.Element] struct {
	part
	options StepsOptions
	lengths []int // of the tensors
	invalid error // why the steps cannot be used; nil: they can
	state   *State
	live    stepsPosition

	within bool                   // a call of Step is in progress
	apply  func(mean [][]T) error // of that call

	nextStep[T]
	free []*gradients[T]
	calm atomic.Int32 // consecutive calls of apply without a collective operation; negative: one had a collective operation
	pace pace
	last lastStep[T]
	outside[T]
}

// nextStep is the state of the step that follows the live position.
type nextStep[T collective.Element] struct {
	nodes  []held[T]     // sums that this rank has computed
	sealed bool          // mean is complete on this rank, and has not been applied
	mean   *gradients[T] // the averages of all ranks, if sealed; its memory is reused
	others roster        // what the members of the world had computed when it began
	joined uint64        // generation of the last world that began with all members in a Step
}

// outside is the state of a worker in no world, which applies the averages of others.
type outside[T collective.Element] struct {
	loans    []*gradients[T] // memory for averages of others
	caught   bool            // the worker has reached the position of the members by their averages
	caughtAt stepsPosition
}

// stepsPosition is the part of Steps that a commit saves.
type stepsPosition struct {
	applied uint64 // number of applied steps
	epoch   int    // epoch of the next step
	next    int    // number in the epoch of its first microbatch
}

// Micro is a microbatch of a step.
type Micro[T collective.Element] struct {
	Step   uint64 // number of the step, from 0
	Index  int    // number in the step, from 0
	Epoch  int
	Number int // number in the epoch, from 0
	// Samples are the indices of its samples; nil without StepsOptions.Batches.
	Samples []int
	// Gradient are the tensors to which backward adds, with the lengths passed to NewSteps. They
	// are zero when backward is called, and must not be used after it has returned.
	Gradient [][]T

	seed int64
}

// Rand returns a source of random numbers, for dropout and augmentation. It depends only on the
// seed of the steps, the step and the microbatch, not on the rank that computes it.
func (m Micro[T]) Rand() *rand.Rand {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(m.seed))
	binary.LittleEndian.PutUint64(seed[8:], m.Step)
	binary.LittleEndian.PutUint64(seed[16:], uint64(m.Index))
	copy(seed[24:], "microbch")
	return rand.New(rand.NewChaCha8(seed))
}

const mostMicrobatches = 1 << 16

// NewSteps returns Steps whose gradients are tensors of the given lengths, in elements. It does not
// allocate memory for them yet. A rank with k of M microbatches needs memory for n+2 gradients,
// where n is the number of nodes that it holds in a binary tree over the microbatches (1 if k and M
// are powers of two, up to 2·log2(M) otherwise). Closing the worker frees it. Invalid arguments
// cause an error of Run, Commit and Step.
func NewSteps[T collective.Element](w *Worker, o StepsOptions, lengths ...int) *Steps[T] {
	if o.Name == "" {
		o.Name = "steps"
	}
	s := &Steps[T]{options: o, lengths: lengths}
	s.c = content{
		self: s,
		name: o.Name,
		layout: func() string {
			data := "no samples"
			if o.Batches != nil {
				data = o.Batches.String()
			}
			return fmt.Sprintf("steps %q of %d microbatches, gradients %v of %T, seed %d, %s",
				o.Name, o.Microbatches, lengths, *new(T), o.Seed, data)
		},
		kind:   func() string { return fmt.Sprintf("steps %q", o.Name) },
		encode: s.encode, decode: s.decode,
		text: func(b []byte) string {
			p, err := parsePosition(b)
			if err != nil {
				return ""
			}
			return fmt.Sprintf("%d steps applied, epoch %d, microbatch %d", p.applied, p.epoch, p.next)
		},
	}
	switch {
	case w == nil:
		s.invalid = errors.New("elastic: steps: the worker is nil")
	case o.Microbatches < 1 || o.Microbatches > mostMicrobatches:
		s.invalid = fmt.Errorf("elastic: steps: Microbatches is %d: give 1 to %d", o.Microbatches, mostMicrobatches)
	}
	for i, n := range lengths {
		if n < 0 && s.invalid == nil {
			s.invalid = fmt.Errorf("elastic: steps: tensor %d has %d elements", i, n)
		}
	}
	if s.invalid == nil {
		w.use.closers = append(w.use.closers, s.close)
	}
	return s
}

// Applied returns the number of steps that have been applied.
func (s *Steps[T]) Applied() uint64 { return s.live.applied }

// Epoch returns the epoch of the next step, from 0.
func (s *Steps[T]) Epoch() int { return s.live.epoch }

// Position returns the number of applied microbatches in the current epoch.
func (s *Steps[T]) Position() int { return s.live.next }

// Step makes the next step and commits. It calls backward for each microbatch of this rank's share;
// backward adds its gradient to m.Gradient and reads the state without changing it. When all ranks
// have all averages, Step calls apply with them: with the mean over the microbatches of the step,
// which apply may overwrite. apply changes the state and must not call collective operations. It
// runs once per step on every rank, and its result must depend only on the state and the mean. Then
// Step does what [State.Commit] does.
//
// It is collective and blocks until the commit has been made. When a worker is lost, Step enters
// the next world and continues the same step: finished computations are not repeated, and if any
// rank had all averages, all ranks get them. Step returns an error after which training continues
// only if new workers have joined, or if other workers were not in a Step. train must return that
// error unchanged, and Run calls train again with the live state. All other errors are those of
// Commit, backward and apply, and ErrRemoved.
//
// Between two steps, train must not change a tensor of the state. A commit may not copy the
// tensors, so Restore does not undo such a change.
//
// Run also calls train on a worker that is in no world yet because the others have started without
// it. There, Step waits for the averages of the others' next step, calls apply with them but not
// backward, saves the state on this worker alone, and returns nil. Once the worker is in a world,
// Step returns an error after which Run calls train again. Any other collective call of train ends
// this phase.
func (s *Steps[T]) Step(ctx context.Context, backward func(m Micro[T]) error, apply func(mean [][]T) error) error {
	if err := s.usable(); err != nil {
		return err
	}
	if backward == nil || apply == nil {
		return errors.New("elastic: Step needs two functions, for the backward pass and for applying the averages: one is nil")
	}
	s.within = true
	s.apply = apply
	defer func() { s.within, s.apply = false, nil }()
	if s.state.catchingUp() {
		return s.replay(ctx)
	}
	for want := s.live.applied + 1; s.live.applied < want; {
		err := s.try(ctx, backward)
		if err == nil {
			continue
		}
		if !goesOn(err) {
			return err
		}
		together, err := s.state.goOn(err)
		if err != nil {
			return err
		}
		if !together {
			return errRejoined
		}
	}
	return nil
}

// usable returns an error if Step cannot begin.
func (s *Steps[T]) usable() error {
	switch {
	case s.invalid != nil:
		return s.invalid
	case s.state == nil:
		return errors.New("elastic: Step of a Steps that is not a part of a state: give it to NewState")
	case s.state.run == nil:
		return errors.New("elastic: Step outside of Run: call it from the function that Run calls")
	case s.within:
		return errors.New("elastic: Step was called during another Step")
	case s.count() == 0:
		return fmt.Errorf("elastic: epoch %d has no microbatches", s.live.epoch)
	}
	return nil
}

// errRejoined ends a Step, and the train function, in a new world whose members are not all in a
// Step. Run calls train again.
var errRejoined = errors.New("elastic: the world has changed; training goes on with the same state")

// count returns the number of microbatches of the next step.
func (s *Steps[T]) count() int {
	if s.options.Batches == nil {
		return s.options.Microbatches
	}
	return max(0, min(s.options.Microbatches, s.options.Batches.Len(s.live.epoch)-s.live.next))
}

// micro returns a microbatch of the next step.
func (s *Steps[T]) micro(index int) Micro[T] {
	m := Micro[T]{Step: s.live.applied, Index: index, Epoch: s.live.epoch, Number: s.live.next + index, seed: s.options.Seed}
	if s.options.Batches != nil {
		m.Samples = s.options.Batches.Samples(m.Epoch, m.Number)
	}
	return m
}

// advance moves to the position after the next step.
func (s *Steps[T]) advance() {
	s.live.next += s.count()
	s.live.applied++
	if b := s.options.Batches; b != nil && s.live.next >= b.Len(s.live.epoch) {
		s.live.epoch, s.live.next = s.live.epoch+1, 0
	}
	s.forget()
}

func (s *Steps[T]) encode() ([]byte, error) {
	b := binary.AppendUvarint(nil, s.live.applied)
	b = binary.AppendUvarint(b, uint64(s.live.epoch))
	return binary.AppendUvarint(b, uint64(s.live.next)), nil
}

func (s *Steps[T]) decode(b []byte) error {
	p, err := parsePosition(b)
	if err != nil {
		return err
	}
	if p != s.live {
		s.live = p
		s.forget()
	}
	return nil
}

func parsePosition(b []byte) (p stepsPosition, err error) {
	var all [3]uint64
	for i := range all {
		n, k := binary.Uvarint(b)
		if k <= 0 || i > 0 && n > 1<<48 {
			return p, errors.New("elastic: steps: the saved position is not valid")
		}
		all[i], b = n, b[k:]
	}
	if len(b) > 0 {
		return p, errors.New("elastic: steps: the saved position is not valid")
	}
	return stepsPosition{all[0], int(all[1]), int(all[2])}, nil
}
