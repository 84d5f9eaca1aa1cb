package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
)

// checkGenerations checks whether worlds leak device memory.
func checkGenerations(ctx context.Context, o *options) ([]figure, error) {
	n := 4
	if o.Quick {
		n = 2
	}
	answers, err := crew(ctx, o, n, "generations", "")
	if err != nil {
		return nil, err
	}
	count, most := worlds(o), answers[0].Growth
	all := []figure{{Name: "generations", Value: float64(count)},
		{Name: fmt.Sprintf("memory of the device, taken by %d of them", count-early), Value: float64(most) / (1 << 20), Unit: "MiB"}}
	if most >= int64(vectorBytes(o)) {
		return all, fmt.Errorf("%d bytes of the device's memory are lost after %d generations", most, count)
	}
	return all, nil
}

// worlds is the number of generations.
func worlds(o *options) int {
	if o.Quick {
		return 30
	}
	return 150
}

// early is the generation after which everything that stays allocated has been allocated.
const early = 10

// vectorBytes is the size of each generation's vector.
func vectorBytes(o *options) int {
	if o.Quick {
		return 64 << 10
	}
	return 4 << 20
}

// generations is the task: the ranks combine a new vector in each of many worlds. In every third
// world a rank aborts.
func (s *seat) generations(ctx context.Context, a *answer) error {
	var before uint64
	count := worlds(&s.Options)
	for generation := 1; generation <= count; generation++ {
		broken := generation%3 == 2
		free, err := s.world(ctx, uint64(generation), broken)
		if broken && errors.Is(err, collective.ErrAborted) {
			continue
		}
		if err != nil {
			return fmt.Errorf("generation %d: %w", generation, err)
		}
		switch {
		case generation == early:
			before = free
		case generation > early && (generation-early)%3 == 0:
			a.Growth = int64(before) - int64(free)
		}
	}
	return nil
}

// world runs a generation until all ranks have reached its end, and returns the free memory of the
// device then.
func (s *seat) world(ctx context.Context, generation uint64, broken bool) (free uint64, err error) {
	g, err := s.meet(ctx, generation)
	if err != nil {
		return 0, err
	}
	defer g.Close()
	v, err := cuda.Alloc[float32](s.device, vectorBytes(&s.Options)/4)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, v.Free()) }()
	if err := v.CopyFrom(ctx, slices.Repeat([]float32{1}, v.Len())); err != nil {
		return 0, err
	}
	if err := cuda.AllReduce(ctx, g, v, collective.Sum); err != nil {
		return 0, err
	}
	got := make([]float32, v.Len())
	if err := v.CopyTo(ctx, got); err != nil {
		return 0, err
	}
	if got[0] != float32(s.Size) || got[len(got)-1] != float32(s.Size) {
		return 0, fmt.Errorf("the sum of %d ones is %v", s.Size, got[0])
	}
	if broken && s.Rank == int(generation)%s.Size {
		g.Abort(errors.New("broken off by the check"))
	}
	if err := cuda.AllReduce(ctx, g, v, collective.Max); err != nil {
		return 0, err
	}
	if free, _, err = s.device.Memory(); err != nil {
		return 0, err
	}
	return free, collective.Barrier(ctx, g)
}
