package collective

import (
	"fmt"

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
	ops
)

// String is the lower-case name.
func (o Op) String() string {
	switch o {
	case Sum:
		return "sum"
	case Average:
		return "average"
	case Min:
		return "min"
	case Max:
		return "max"
	case Product:
		return "product"
	case Adasum:
		return "adasum"
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// check refuses an invalid operation on elements of a type.
func (o Op) check(t kernel.Type) error {
	switch {
	case o < Sum || o >= ops:
		return fmt.Errorf("%v is not an operation", o)
	case o == Adasum && exact(t):
		return fmt.Errorf("%v is for floating point numbers, not for %v", o, t)
	}
	return nil
}

// exact reports whether sums and products of a type do not depend on their order.
func exact(t kernel.Type) bool {
	return kernel.Narrow(t) == nil && t != kernel.Float32 && t != kernel.Float64
}

// checkParts is check for an operation whose results are parts of vectors.
func (o Op) checkParts(t kernel.Type) error {
	if o == Adasum {
		return errAdasumParts
	}
	return o.check(t)
}

// kernels are the operations that combine; an average is a sum that is divided when it is complete.
// Adasum combines no elements.
var kernels = [ops]kernel.Op{Sum: kernel.Sum, Average: kernel.Sum, Min: kernel.Min, Max: kernel.Max, Product: kernel.Product,
	Adasum: kernel.Ops}

// means reports whether the call is an average that [kernel.Mean] computes, from all operands at
// once: one whose sums need not fit the type.
func (a descriptor) means() bool { return a.reduce == Average && kernel.Narrow(a.dtype) != nil }

// combiner sets dst[i] to a[i] combined with b[i], a being of the lower ranks; see
// [kernel.Combine]. The same code and operand order on every rank keep even NaN payloads equal.
type combiner = func(dst, a, b []byte)

func (a descriptor) combiner() combiner { return kernel.Combine(a.dtype, kernels[a.reduce]) }

// divide divides every element by the number of ranks.
func (a descriptor) divide(b []byte, n int) { kernel.Divide(a.dtype)(b, n) }

// Combine sets dst[i] to a[i] combined with b[i], with the arithmetic of reductions; a is the data
// of the lower rank. Average adds. All slices have the same length, and dst may be a or b. Combine
// panics if lengths differ, for elements that AllReduce refuses, and for Adasum and unknown ops.
func Combine[T Element](dst, a, b []T, op Op) {
	t := typeOf[T]()
	if err := checkReduced[T](); err != nil {
		panic("collective: " + err.Error())
	}
	if op == Adasum || op.check(t) != nil || len(a) != len(dst) || len(b) != len(dst) {
		panic(fmt.Sprintf("collective: %v of %d and %d elements into %d", op, len(a), len(b), len(dst)))
	}
	kernel.Combine(t, kernels[op])(kernel.Bytes(dst), kernel.Bytes(a), kernel.Bytes(b))
}
