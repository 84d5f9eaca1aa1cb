package collective

import (
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Op says how values are combined. The zero value is no operation and is refused.
type Op uint8

const (
	// Sum adds. Integers wrap around.
	Sum Op = iota + 1
	// Average is the sum divided by the number of ranks. For integers the sum wraps around and the
	// division truncates towards zero; for floating point the division is done once, on the
	// finished sum. Values of [Float16] and [BFloat16], also those of compressed operations, are
	// summed in float32 and rounded once, so that no sum is too large for them. Where ranks of a
	// host share memory and there are several hosts, what a host has is rounded too, divided by the
	// least power of two that is not less than the number of its ranks.
	Average
	// Min takes the smaller value; −0 is smaller than +0. A NaN on any rank makes the result NaN on
	// every rank.
	Min
	// Max takes the larger value; +0 is larger than −0. A NaN on any rank makes the result NaN on
	// every rank.
	Max
	// Product multiplies. Integers wrap around.
	Product
	// Adasum adds vectors as far as they are orthogonal, and averages them as far as they are
	// parallel: adasum(a, b) = (1 − a·b/2|a|²)·a + (1 − a·b/2|b|²)·b. Ranks are taken in pairs,
	// lower ones first, then pairs of pairs; those beyond a power of two are folded in, first of
	// all, by pairs of the lowest. It is for AllReduce of floating point numbers, and all of a
	// tensor is one vector: it gives other results for two halves of a tensor, so a model's tensors
	// are reduced one by one. Products are summed in float64, block by block of 4096 elements; each
	// pair's result is rounded to the element type. The bits are the same wherever the ranks are
	// and whatever connects them. A vector whose |a|² exceeds float64 gives NaNs. A group takes up
	// to twice as much memory for it as the largest vector, and keeps that. See Maleki et al.,
	// "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
	Adasum
)

// String is the lower-case name.
func (o Op) String() string { return operation.Op(o).String() }

// Combine sets dst[i] to a[i] combined with b[i], with the arithmetic of reductions; a is the data
// of the lower rank. Average adds. All slices have the same length, and dst may be a or b. Combine
// panics if lengths differ, for elements that AllReduce refuses, and for Adasum and unknown ops.
func Combine[T Element](dst, a, b []T, op Op) {
	t := typeOf[T]()
	if err := checkReduced[T](); err != nil {
		panic("collective: " + err.Error())
	}
	if op == Adasum || operation.Op(op).Check(t) != nil || len(a) != len(dst) || len(b) != len(dst) {
		panic(fmt.Sprintf("collective: %v of %d and %d elements into %d", op, len(a), len(b), len(dst)))
	}
	kernel.Combine(t, operation.Kernels[op])(kernel.Bytes(dst), kernel.Bytes(a), kernel.Bytes(b))
}
