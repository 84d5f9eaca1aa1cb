package collective

import (
	"fmt"

	"github.com/hvdrun/hvdrun/collective/kernel"
)

// Op says how values are combined. The zero value is no operation and is refused.
type Op uint8

const (
	// Sum adds. Integers wrap around.
	Sum Op = iota + 1
	// Average is the sum divided by the number of ranks. For integers the sum wraps around and the division truncates
	// towards zero; for floating point the division is done once, on the finished sum.
	Average
	// Min takes the smaller value; −0 is smaller than +0. A NaN on any rank makes the result NaN on every rank.
	Min
	// Max takes the larger value; +0 is larger than −0. A NaN on any rank makes the result NaN on every rank.
	Max
	// Product multiplies. Integers wrap around.
	Product
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
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

func (o Op) valid() bool { return o >= Sum && o < ops }

// kernels are the operations that combine; an average is a sum that is divided when it is complete.
var kernels = [ops]kernel.Op{Sum: kernel.Sum, Average: kernel.Sum, Min: kernel.Min, Max: kernel.Max, Product: kernel.Product}

// combiner sets dst[i] to a[i] combined with b[i], a being of the lower ranks; see [kernel.Combine]. The same code and operand
// order on every rank keep even NaN payloads equal.
type combiner = func(dst, a, b []byte)

func (a descriptor) combiner() combiner { return kernel.Combine(a.dtype, kernels[a.reduce]) }

// divide divides every element by the number of ranks.
func (a descriptor) divide(b []byte, n int) { kernel.Divide(a.dtype)(b, n) }
