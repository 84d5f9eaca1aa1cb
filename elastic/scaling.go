package elastic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// ScalingRule says how a learning rate follows the number of workers, and with it of examples in a
// step.
type ScalingRule uint8

const (
	// Linear multiplies the rate by the number of workers, as is usual for stochastic gradient
	// descent (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
	Linear ScalingRule = iota
	// Sqrt multiplies it by the square root of their number, as is usual for Adam and its
	// relatives.
	Sqrt
	scalingRules
)

// String is the rule's name.
func (r ScalingRule) String() string {
	if r < scalingRules {
		return [...]string{"linear", "square root"}[r]
	}
	return fmt.Sprintf("rule(%d)", uint8(r))
}

// ScalingOptions say how a learning rate follows the size of the world. The zero value multiplies
// it by the number of workers, at once. All ranks must give the same.
type ScalingOptions struct {
	Rule ScalingRule
	// Of is the number of workers for which the factor is 1. 0: one.
	Of int
	// Warmup is how many steps a rise takes, in equal parts: that from 1 when training begins, and
	// those when workers have come. 0: none. Where workers have gone the factor falls at once,
	// since a step has fewer examples from there on.
	Warmup int
}

// Scaling is the factor by which a program multiplies its learning rate so that it fits the number
// of workers. It is a Part of the State, from which it learns that number in each world; no OnReset
// function is needed:
//
//	scaling := elastic.NewScaling(elastic.ScalingOptions{Warmup: 200})
//	state := elastic.NewState(w, …, scaling)
//	…
//	rate := base * scaling.Next() // once a step
//
// All ranks get the same factors; what is not committed counts as not done. A job that goes on from
// a checkpoint goes on with its factor. A Scaling is used by one goroutine at a time.
type Scaling struct {
	opts ScalingOptions
	size int // of the world
	live scalingState
	kept alone
}

// scalingState is what a Scaling commits: the rise, or the fall, to the factor of a number of
// workers.
type scalingState struct {
	size int     // workers; 0: no step has been made yet
	from float64 // the factor before
	step int     // of the rise, made
}

// NewScaling returns a Scaling at the beginning of training. Until NewState gets it, it is that of
// one worker.
func NewScaling(o ScalingOptions) *Scaling {
	o.Of, o.Warmup = max(o.Of, 1), max(o.Warmup, 0)
	return &Scaling{opts: o, size: 1}
}

// Next returns the factor for the next step. Every rank must call it equally often.
func (s *Scaling) Next() float64 {
	if s.size != s.live.size {
		from := 1.
		if s.live.size > 0 {
			from = s.Factor()
		}
		s.live = scalingState{size: s.size, from: from}
		if from >= s.target(s.size) {
			s.live.step = s.opts.Warmup
		}
	}
	s.live.step = min(s.live.step+1, s.opts.Warmup)
	return s.Factor()
}

// Factor returns what Next has returned last; 1 before that.
func (s *Scaling) Factor() float64 {
	target := s.target(s.live.size)
	switch {
	case s.live.size == 0:
		return 1
	case s.live.step >= s.opts.Warmup:
		return target
	}
	// The conversions keep every processor from rounding only once.
	return s.live.from + float64(float64((target-s.live.from)*float64(s.live.step))/float64(s.opts.Warmup))
}

// target is the factor for so many workers.
func (s *Scaling) target(size int) float64 {
	f := float64(size) / float64(s.opts.Of)
	if s.opts.Rule == Sqrt {
		return math.Sqrt(f)
	}
	return f
}

// Save keeps the factor and how far its rise has come.
func (s *Scaling) Save() error { return s.kept.save(s) }

// Restore goes back to what was kept last.
func (s *Scaling) Restore() error { return s.kept.restore(s) }

// Sync takes over root's factor and the size of g.
func (s *Scaling) Sync(ctx context.Context, g *collective.Group, root int) error {
	s.place(g.Rank(), g.Size())
	return syncCarried(ctx, g, root, s)
}

// What follows makes it a part of ours.

func (s *Scaling) self() Part   { return s }
func (s *Scaling) name() string { return "" }
func (s *Scaling) kind() string { return "scaling" }

func (s *Scaling) layout() string {
	return fmt.Sprintf("scaling, %v, of %d, warm-up of %d steps", s.opts.Rule, s.opts.Of, s.opts.Warmup)
}

func (s *Scaling) place(_, size int)                                 { s.size = size }
func (s *Scaling) travels() bool                                     { return true }
func (s *Scaling) sources(to []image.Source) ([]image.Source, error) { return encoded(to, s) }
func (s *Scaling) restore(pieces []image.Piece) error                { return s.decode(pieces[0].Bytes()) }
func (s *Scaling) sums(pieces []image.Piece) ([]uint32, error)       { return pieces[0].Sums(), nil }
func (s *Scaling) tensors(name string) []checkpoint.Tensor {
	return []checkpoint.Tensor{{Name: name, Type: "U8"}}
}

func (s *Scaling) text(pieces []image.Piece) string {
	fresh := NewScaling(s.opts)
	if fresh.decode(pieces[0].Bytes()) != nil {
		return ""
	}
	return fmt.Sprintf("factor %.4g for %d workers", fresh.Factor(), fresh.live.size)
}

func (s *Scaling) encode() ([]byte, error) {
	if s.opts.Rule >= scalingRules {
		return nil, fmt.Errorf("elastic: scaling: %v is none", s.opts.Rule)
	}
	b := binary.AppendUvarint(nil, uint64(s.live.size))
	b = binary.AppendUvarint(b, uint64(s.live.step))
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(s.live.from)), nil
}

func (s *Scaling) decode(b []byte) error {
	size, k := binary.Uvarint(b)
	step, l := binary.Uvarint(b[max(k, 0):])
	if k <= 0 || l <= 0 || len(b) != k+l+8 || size > math.MaxInt32 || step > math.MaxInt32 {
		return errors.New("elastic: scaling: the state is none of a scaling")
	}
	from := math.Float64frombits(binary.LittleEndian.Uint64(b[k+l:]))
	if !(from >= 0 && from <= math.MaxFloat64) {
		return fmt.Errorf("elastic: scaling: a factor of %v", from)
	}
	s.live = scalingState{size: int(size), from: from, step: int(step)}
	return nil
}
