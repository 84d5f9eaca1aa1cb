package main

import (
	"slices"
	"testing"
)

// TestShrink: the program fails if two hosts have two ranks each and a step reduces much data. It
// is shrunk to little else.
func TestShrink(t *testing.T) {
	fails := func(p *program) bool {
		crowded := 0
		for _, n := range p.Hosts {
			if n >= 2 {
				crowded++
			}
		}
		return crowded >= 2 && slices.ContainsFunc(p.Steps, func(s step) bool { return s.Do == allReduce && s.bytes() >= 1000 })
	}
	found := 0
	for seed := range uint64(60) {
		p := generate(seed)
		if !fails(p) {
			continue
		}
		found++
		step := slices.IndexFunc(p.Steps, func(s step) bool { return s.Do == allReduce && s.bytes() >= 1000 })
		q := shrink(p, step, fails, func() bool { return true })
		if !fails(q) || q.ranks() != 4 || len(q.Steps) != 1 || len(q.Disturbed)+q.Busy+q.Buffers+len(q.Subsets) > 0 || q.Steps[0].bytes() >= 2000 {
			t.Errorf("seed %d: %s", seed, q)
		}
	}
	if found < 5 {
		t.Errorf("%d programs fail", found)
	}
}

// TestSmaller: smaller programs can be run, weigh less, and do not change the original.
func TestSmaller(t *testing.T) {
	for seed := range uint64(20) {
		p := generate(seed)
		for _, q := range smaller(p, len(p.Steps)-1) {
			if q.weight() >= p.weight() || q.String() != q.clone().tidy().String() {
				t.Fatalf("seed %d: %s", seed, q)
			}
			for i := range q.Steps {
				if s := &q.Steps[i]; s.Group > len(q.Subsets) || s.Root >= len(q.members(s.Group)) || s.Times < 1 {
					t.Fatalf("seed %d: %s", seed, q)
				}
			}
		}
		if p.String() != generate(seed).String() {
			t.Fatalf("seed %d has changed", seed)
		}
	}
}

// TestShrinkEnds: shrinking stops when more returns false.
func TestShrinkEnds(t *testing.T) {
	p, left := generate(3), 5
	q := shrink(p, 0, func(*program) bool { return true }, func() bool { left--; return left >= 0 })
	if left != -1 || q.weight() >= p.weight() {
		t.Errorf("%d left: %s", left, q)
	}
}
