package operation

import (
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Op is the operation that combines values, with the values of Op in package collective. The zero
// value is invalid.
type Op uint8

// The ops, and how many there are.
const (
	Sum Op = iota + 1
	Average
	Min
	Max
	Product
	Adasum
	Ops
)

var opNames = [Ops]string{Sum: "sum", Average: "average", Min: "min", Max: "max", Product: "product", Adasum: "adasum"}

// String returns the lower-case name.
func (o Op) String() string {
	if o >= Sum && o < Ops {
		return opNames[o]
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// Check returns an error for an operation that is invalid for elements of a type.
func (o Op) Check(t kernel.Type) error {
	switch {
	case o < Sum || o >= Ops:
		return fmt.Errorf("%v is not an operation", o)
	case o == Adasum && Exact(t):
		return fmt.Errorf("%v is for floating point numbers, not for %v", o, t)
	}
	return nil
}

// Exact reports whether sums and products of a type are independent of their order.
func Exact(t kernel.Type) bool {
	return kernel.Narrow(t) == nil && t != kernel.Float32 && t != kernel.Float64
}

// CheckParts is like Check, for operations whose results are parts of vectors.
func (o Op) CheckParts(t kernel.Type) error {
	if o == Adasum {
		return errAdasumParts
	}
	return o.Check(t)
}

// Kernels has the kernel of each op. An average is a sum that is divided when it is complete.
// Adasum does not combine single elements.
var Kernels = [Ops]kernel.Op{Sum: kernel.Sum, Average: kernel.Sum, Min: kernel.Min, Max: kernel.Max, Product: kernel.Product,
	Adasum: kernel.Ops}

// Means reports whether the call is an average that [kernel.Mean] computes, from all operands at
// once: one whose sums may overflow the type.
func (d Descriptor) Means() bool { return d.Op == Average && kernel.Narrow(d.Type) != nil }

// Combiner returns the function that sets dst[i] to a[i] combined with b[i], where a is the data of
// lower ranks; see [kernel.Combine]. The same code and operand order on every rank keep even NaN
// payloads equal.
func (d Descriptor) Combiner() func(dst, a, b []byte) { return kernel.Combine(d.Type, Kernels[d.Op]) }

// Divide divides every element of b by n, the number of ranks.
func (d Descriptor) Divide(b []byte, n int) { kernel.Divide(d.Type)(b, n) }

var errAdasumParts = errors.New("adasum is for AllReduce: it needs whole vectors")
