package collective

import (
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Op is the operation that combines values. The zero value is invalid and is refused.
type Op uint8

const (
	// Sum adds. Integers wrap around.
	Sum Op = Op(operation.Sum)
	// Average is the sum divided by the number of ranks. For integers the sum wraps around and the
	// division truncates towards zero; for floating point the finished sum is divided once. Values
	// of [Float16] and [BFloat16], also in compressed operations, are summed in float32 and rounded
	// once, so that a sum never overflows a Float16, and overflows a BFloat16 only if it overflows
	// a float32. If there are several hosts and ranks of a host share memory, each host's sum is
	// rounded too, after division by the smallest power of two that is not less than the number of
	// its ranks.
	Average Op = Op(operation.Average)
	// Min takes the smaller value; −0 is smaller than +0. A NaN on any rank makes the result NaN on
	// every rank.
	Min Op = Op(operation.Min)
	// Max takes the larger value; +0 is larger than −0. A NaN on any rank makes the result NaN on
	// every rank.
	Max Op = Op(operation.Max)
	// Product multiplies. Integers wrap around.
	Product Op = Op(operation.Product)
	// Adasum adds orthogonal vectors and averages parallel ones: adasum(a, b) = (1 − a·b/2|a|²)·a +
	// (1 − a·b/2|b|²)·b. Ranks are combined in pairs, lower ones first, then pairs of pairs; ranks
	// beyond a power of two are first combined with the lowest ones. It is for AllReduce of
	// floating point numbers. A whole tensor is one vector: the result for two halves of a tensor
	// differs, so reduce a model's tensors one by one. Products are summed in float64, block by
	// block of 4096 elements; each pair's result is rounded to the element type. The bits are the
	// same wherever the ranks are and however they are connected. A vector whose |a|² exceeds
	// float64 gives NaNs. A group allocates up to twice the memory of the largest vector for this,
	// and keeps it. See Maleki et al., "Scaling Distributed Training with Adaptive Summation",
	// MLSys 2021.
	Adasum Op = Op(operation.Adasum)
)

// String returns the lower-case name.
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
		panic(fmt.Sprintf("collective: Combine cannot compute the %v of %d and %d elements into %d", op, len(a), len(b), len(dst)))
	}
	kernel.Combine(t, operation.Kernels[op])(kernel.Bytes(dst), kernel.Bytes(a), kernel.Bytes(b))
}
