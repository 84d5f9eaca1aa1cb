package main

import (
	"errors"
	"math/rand/v2"

	"github.com/hvdrun/hvdrun/collective"
)

// reduceTree reduces a random tree whose nodes are distributed at random among the ranks.
func (t *turnOf[T]) reduceTree() error {
	d := rand.New(rand.NewPCG(t.Program.Seed, uint64(t.number)<<32|uint64(t.turn)))
	leaves := 1 + d.IntN(2*t.g.Size()+2)
	held := make([][]collective.Node, t.g.Size())
	for first := 0; first < leaves; {
		end := min(leaves, first+1+d.IntN(leaves))
		rank := d.IntN(len(held))
		held[rank] = append(held[rank], collective.Cover(first, end, leaves)...)
		first = end
	}
	p, err := collective.NewPartials(leaves, held)
	if err != nil {
		return err
	}
	parts := make([][]T, len(held[t.g.Rank()]))
	for i, n := range held[t.g.Rank()] {
		if parts[i], err = t.memory(); err != nil {
			return err
		}
		fill(parts[i], t.valueOf(n, leaves))
	}
	defer func() {
		if t.step.Alloc {
			for _, part := range parts {
				collective.Free(part)
			}
		}
	}()
	result := t.room[0]
	if err := collective.ReduceTree(t.ctx, t.g, p, parts, result, t.op); err != nil {
		return err
	}
	t.digest = digest(t.digest, result)
	wrong := t.same(result, t.rootOf(leaves), 0, "")
	for i, n := range held[t.g.Rank()] {
		wrong = errors.Join(wrong, t.same(parts[i], t.valueOf(n, leaves), 0, "a part"))
	}
	return wrong
}

// memory returns memory for another tensor of the step.
func (t *turnOf[T]) memory() ([]T, error) {
	if t.step.Alloc {
		return collective.Alloc[T](t.step.Count)
	}
	return make([]T, t.step.Count), nil
}

// valueOf returns one period of the value of a node.
func (t *turnOf[T]) valueOf(n collective.Node, leaves int) []T {
	if n.Level == 0 {
		return t.input(0, n.Index, 0)
	}
	left := collective.Node{Level: n.Level - 1, Index: 2 * n.Index}
	if left.Sibling().First() >= leaves {
		return t.valueOf(left, leaves)
	}
	a, b := t.valueOf(left, leaves), t.valueOf(left.Sibling(), leaves)
	if !means[T](t.op) {
		return combineVectors(t.op, a, b)
	}
	fold := func(n collective.Node) float32 { return foldOf(n.End(leaves) - n.First()) }
	sum, more := sumSingle([][]T{a}, fold(left)), sumSingle([][]T{b}, fold(left.Sibling()))
	for i := range sum {
		sum[i] += more[i]
	}
	return quotient[T](sum, fold(n))
}

// rootOf returns one period of the result.
func (t *turnOf[T]) rootOf(leaves int) []T {
	value := t.valueOf(collective.Root(leaves), leaves)
	switch {
	case means[T](t.op):
		return quotient[T](sumSingle([][]T{value}, foldOf(leaves)), float32(leaves))
	case t.op == collective.Average:
		for i := range value {
			value[i] = divide(value[i], leaves)
		}
	}
	return value
}

// halves returns partials in which each rank has one leaf.
func halves[T collective.Element](g *collective.Group, count int, value func(leaf int) []T) (*collective.Partials, [][]T) {
	held := make([][]collective.Node, g.Size())
	for r := range held {
		held[r] = []collective.Node{{Index: r}}
	}
	p, err := collective.NewPartials(g.Size(), held)
	if err != nil {
		panic(err) // each leaf occurs once
	}
	return p, [][]T{value(g.Rank())[:count]}
}
