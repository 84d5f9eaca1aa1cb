package main

import (
	"encoding/json"
	"io"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

func TestDiffers(t *testing.T) {
	one := pattern[int32](place{seed: 1}, kind{signed: true})
	for _, n := range []int{0, 1, period - 1, period, 200 * period} {
		for _, at := range []int{0, 5, 3*period + 7} {
			whole := make([]int32, at+n)
			fill(whole, one)
			data := whole[at:]
			if i := differs(data, one, at); i >= 0 {
				t.Fatalf("%d elements from %d on: element %d", n, at, i)
			}
			for _, i := range []int{0, n / 2, n - 1} {
				if n == 0 {
					continue
				}
				data[i]++
				if got := differs(data, one, at); got != i {
					t.Fatalf("%d elements from %d on, of which %d is wrong: %d", n, at, i, got)
				}
				data[i]--
			}
		}
	}
}

func TestCombine(t *testing.T) {
	if v := combineAll(collective.Average, [][]int8{repeat(int8(-3)), repeat(int8(-4))}, nil)[0]; v != -3 {
		t.Errorf("the average of -3 and -4 is %d", v)
	}
	if v := combineAll(collective.Sum, [][]uint8{repeat(uint8(200)), repeat(uint8(100))}, nil)[0]; v != 44 {
		t.Errorf("200 + 100 is %d", v)
	}
	third := collective.ToFloat16(1).Float32() / 3
	one, two := repeat(collective.ToFloat16(1)), repeat(collective.ToFloat16(0))
	if v := combineAll(collective.Average, [][]collective.Float16{one, two, two}, nil)[0]; v != collective.ToFloat16(third) {
		t.Errorf("the average of 1, 0 and 0 is %v", v.Float32())
	}
	if v := adasumAll([][]float64{{2, 4}, {2, 4}, {2, 4}}); !slices.Equal(v, []float64{2, 4}) {
		t.Errorf("Adasum of equal vectors is %v", v)
	}
	if i := far([]float64{1, 2, math.NaN()}, []float64{1, 2, 3}, 0.1, 1); i != 2 {
		t.Errorf("what is not a number differs at %d", i)
	}
}

func repeat[T any](v T) []T { return slices.Repeat([]T{v}, period) }

// TestSmallPrograms runs programs in one process on groups of goroutines: the package agrees with
// the reference, and invalid calls are refused.
func TestSmallPrograms(t *testing.T) {
	for seed := range uint64(24) {
		p := generate(seed)
		for i := range p.Hosts {
			p.Hosts[i] = min(p.Hosts[i], 2)
		}
		for i := range p.Steps {
			s := &p.Steps[i]
			s.Count, s.Times = min(s.Count, 3000), min(s.Times, 2)
			for j := range s.Tensors {
				s.Tensors[j] = min(s.Tensors[j], 3000)
			}
		}
		p.tidy().Disturbed = nil
		p.Sockets = nil
		for host := range p.Hosts { // groups of goroutines have one level
			p.Sockets = append(p.Sockets, host)
		}
		c := &crew{program: p}
		var all sync.WaitGroup
		for rank, g := range collective.Local(p.ranks()) {
			a := &actor{ctx: t.Context(), duty: duty{p, rank, "", nil}, out: json.NewEncoder(io.Discard), lanes: map[laneKey]chan func(){}, groups: []*collective.Group{g}}
			c.ranks = append(c.ranks, &member{rank: rank, verdict: &a.verdict})
			all.Go(func() {
				if err := a.divide(); err != nil {
					a.fail(-1, err)
				} else {
					a.act()
				}
			})
		}
		all.Wait()
		if c.judge(); c.outcome.Class != "" {
			t.Errorf("seed %d: %s: %s\n%s", seed, c.outcome.Class, c.outcome.Text, p)
		}
	}
}
