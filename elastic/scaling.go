package elastic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// ScalingRule says how a learning rate depends on the number of workers, and so on the number of
// examples per step.
type ScalingRule uint8

const (
	// Linear multiplies the rate by the number of workers, as is usual for stochastic gradient
	// descent (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
	Linear ScalingRule = iota
	// Sqrt multiplies it by the square root of the number of workers, as is usual for Adam and
	// similar optimizers.
	Sqrt
	scalingRules
)

// String returns the rule's name.
func (r ScalingRule) String() string {
	if r < scalingRules {
		return [...]string{"linear", "square root"}[r]
	}
	return fmt.Sprintf("rule(%d)", uint8(r))
}

// ScalingOptions configure a Scaling. The zero value multiplies the rate by the number of workers
// without a warm-up. All ranks must use the same.
type ScalingOptions struct {
	Rule ScalingRule
	// Of is the number of workers for which the factor is 1. 0 or less: one.
	Of int
	// Warmup is the number of steps over which the factor rises linearly, from 1 when training
	// begins and from its last value when workers are added. 0 or less: none. When workers leave,
	// the factor falls at once, because a step then has fewer examples.
	Warmup int
}

// Scaling computes the factor by which a program multiplies its learning rate to match the number
// of workers. It is a Part of the State, which sets that number in each world, so no OnReset
// function is needed:
//
//	scaling := elastic.NewScaling(elastic.ScalingOptions{Warmup: 200})
//	state := elastic.NewState(w, …, scaling)
//	…
//	rate := base * scaling.Next() // once a step
//
// All ranks get the same factors. A restore goes back to the factor of the last commit, and a job
// that continues from a checkpoint continues with its factor. A Scaling must be used by one
// goroutine at a time.
type Scaling struct {
	part
	opts ScalingOptions
	size int // of the world
	live scalingState
}

// scalingState is what a Scaling saves: the transition to the factor of a number of workers.
type scalingState struct {
	size int     // number of workers; 0: before the first step
	from float64 // the factor before the transition
	step int     // completed steps of the transition
}

// NewScaling returns a Scaling at the beginning of training, for one worker until NewState sets the
// number.
func NewScaling(o ScalingOptions) *Scaling {
	o.Of, o.Warmup = max(o.Of, 1), max(o.Warmup, 0)
	s := &Scaling{opts: o, size: 1}
	s.c = content{
		self:   s,
		layout: func() string { return fmt.Sprintf("scaling, %v, of %d, warm-up of %d steps", o.Rule, o.Of, o.Warmup) },
		kind:   func() string { return "scaling" },
		encode: s.encode, decode: s.decode, setRank: s.setRank,
		text: func(b []byte) string {
			fresh := NewScaling(o)
			if fresh.decode(b) != nil {
				return ""
			}
			return fmt.Sprintf("factor %.4g for %d workers", fresh.Factor(), fresh.live.size)
		},
	}
	return s
}

// Next returns the factor for the next step. Every rank must call it the same number of times.
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

// Factor returns the last result of Next; 1 before the first.
func (s *Scaling) Factor() float64 {
	target := s.target(s.live.size)
	switch {
	case s.live.size == 0:
		return 1
	case s.live.step >= s.opts.Warmup:
		return target
	}
	// The conversions prevent fused multiply-add, so that all architectures round alike.
	return s.live.from + float64(float64((target-s.live.from)*float64(s.live.step))/float64(s.opts.Warmup))
}

// target returns the factor for size workers.
func (s *Scaling) target(size int) float64 {
	f := float64(size) / float64(s.opts.Of)
	if s.opts.Rule == Sqrt {
		return math.Sqrt(f)
	}
	return f
}

func (s *Scaling) setRank(_, size int) { s.size = size }

func (s *Scaling) encode() ([]byte, error) {
	if s.opts.Rule >= scalingRules {
		return nil, fmt.Errorf("elastic: scaling: %v is not a rule", s.opts.Rule)
	}
	b := binary.AppendUvarint(nil, uint64(s.live.size))
	b = binary.AppendUvarint(b, uint64(s.live.step))
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(s.live.from)), nil
}

func (s *Scaling) decode(b []byte) error {
	size, k := binary.Uvarint(b)
	step, l := binary.Uvarint(b[max(k, 0):])
	if k <= 0 || l <= 0 || len(b) != k+l+8 || size > math.MaxInt32 || step > math.MaxInt32 {
		return errors.New("elastic: scaling: the saved value is not valid")
	}
	from := math.Float64frombits(binary.LittleEndian.Uint64(b[k+l:]))
	if !(from >= 0 && from <= math.MaxFloat64) {
		return fmt.Errorf("elastic: scaling: the saved factor %v is not valid", from)
	}
	s.live = scalingState{size: int(size), from: from, step: int(step)}
	return nil
}
