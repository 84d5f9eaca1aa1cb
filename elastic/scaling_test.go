package elastic

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestScaling(t *testing.T) {
	for _, c := range []struct {
		name  string
		opts  ScalingOptions
		sizes []int // of the world in each step
		want  []float64
	}{
		{"at once", ScalingOptions{}, []int{2, 2, 4, 1}, []float64{2, 2, 4, 1}},
		{"square root of so many", ScalingOptions{Rule: Sqrt, Of: 4}, []int{1, 4, 16}, []float64{0.5, 1, 2}},
		{"one worker needs no warm-up", ScalingOptions{Warmup: 3}, []int{1, 1}, []float64{1, 1}},
		{"from the beginning", ScalingOptions{Warmup: 3}, []int{4, 4, 4, 4}, []float64{2, 3, 4, 4}},
		{"workers come", ScalingOptions{Warmup: 2}, []int{2, 2, 4, 4, 4}, []float64{1.5, 2, 3, 4, 4}},
		{"workers come in a rise", ScalingOptions{Warmup: 4}, []int{5, 5, 7, 7, 7, 7, 7}, []float64{2, 3, 4, 5, 6, 7, 7}},
		{"workers go", ScalingOptions{Warmup: 2}, []int{3, 3, 2, 2}, []float64{2, 3, 2, 2}},
		{"workers go in a rise", ScalingOptions{Warmup: 4}, []int{9, 6, 6, 6, 6}, []float64{3, 3.75, 4.5, 5.25, 6}},
		{"to fewer than one of so many", ScalingOptions{Of: 4, Warmup: 2}, []int{1, 4, 4}, []float64{0.25, 0.625, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := NewScaling(c.opts)
			if s.Factor() != 1 {
				t.Error(s.Factor())
			}
			var got []float64
			for _, n := range c.sizes {
				s.setRank(0, n)
				got = append(got, s.Next())
				if s.Factor() != got[len(got)-1] {
					t.Error(s.Factor())
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// All ranks get the root's factor. A restore resets it to that of the last commit.
func TestScalingInState(t *testing.T) {
	workers := stillWorld(t, 3, 1)
	onAll(t, 3, func(r int) error {
		s := NewScaling(ScalingOptions{Warmup: 10})
		state := NewState(workers[r], s)
		if r == 1 { // the survivor of a world of two
			s.setRank(0, 2)
			for range 5 {
				s.Next()
			}
			if s.Factor() != 1.5 {
				return fmt.Errorf("the root's factor is %v", s.Factor())
			}
		}
		if err := state.Sync(t.Context()); err != nil {
			return err
		}
		for range 2 {
			for step := 1; step <= 12; step++ {
				if got, want := s.Next(), 1.5+0.15*float64(min(step, 10)); math.Abs(got-want) > 1e-12 {
					return fmt.Errorf("rank %d, step %d: %v, want %v", r, step, got, want)
				}
			}
			if err := state.Restore(); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestScalingInCheckpoints(t *testing.T) {
	dir := t.TempDir()
	run := func(size int) (first float64) {
		workers := stillWorld(t, size, 0)
		onAll(t, size, func(r int) error {
			workers[r].log = quiet()
			s := NewScaling(ScalingOptions{Warmup: 2})
			state := NewState(workers[r], s, Checkpoint(dir))
			return Run(t.Context(), state, func(context.Context) error {
				f := s.Next()
				if r == 0 {
					first = f
				}
				s.Next()
				return state.Commit()
			})
		})
		return first
	}
	if a, b := run(2), run(4); a != 1.5 || b != 3 {
		t.Error(a, b)
	}
}

func TestScalingRefuses(t *testing.T) {
	s := NewScaling(ScalingOptions{})
	good, err := s.encode()
	if err != nil || s.decode(good) != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]byte{nil, {1}, {1, 2}, good[1:], append(good, 0), append([]byte{1, 1}, 0, 0, 0, 0, 0, 0, 0xf8, 0x7f),
		append([]byte{1, 1}, 0, 0, 0, 0, 0, 0, 0xf0, 0xbf), append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 1, 1}, good[2:]...)} {
		if s.decode(bad) == nil {
			t.Errorf("%x", bad)
		}
	}
	if _, err := NewScaling(ScalingOptions{Rule: 7}).encode(); err == nil || !strings.Contains(err.Error(), "rule(7)") {
		t.Error(err)
	}
}
