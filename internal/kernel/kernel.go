// Package kernel combines elements in raw memory: it is the arithmetic of collectives, without
// allocations, locks or goroutines. Memory holds elements in the byte order of the machine, and
// needs no alignment.
//
// The results are defined, to the last bit, by Go code (see twin). On amd64 with AVX2 or AVX-512,
// vector code computes the same results; the build tag purego excludes it. internal/gen writes that
// code with the assembler library avo. It is a separate module, so that avo is not a requirement
// of this module or of programs that import this package.
//
// A result that is not a number is the same everywhere as well: the first operand that is not a
// number, as a quiet NaN, or the negative NaN without payload if both are numbers.
package kernel

import (
	"fmt"
	"reflect"
)

// Type is the type of an element. The zero value is invalid.
type Type uint8

// The types. Frames between ranks contain these numbers.
const (
	Float32 Type = iota + 1
	Float64
	Int8
	Int16
	Int32
	Int64
	Uint8
	Uint16
	Uint32
	Uint64
	Float16  // IEEE 754 half precision
	BFloat16 // the upper half of a float32
	Types    // one more than the last
)

var typeNames = [Types]string{"", "float32", "float64", "int8", "int16", "int32", "int64",
	"uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"}

var typeSizes = [Types]int{0, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2}

// String returns the lower-case name, or "" for the zero value.
func (t Type) String() string {
	if t < Types {
		return typeNames[t]
	}
	return fmt.Sprintf("type(%d)", uint8(t))
}

// Size returns the number of bytes of an element, or 0 for an invalid type.
func (t Type) Size() int {
	if t < Types {
		return typeSizes[t]
	}
	return 0
}

// Op is the way in which two elements are combined. The zero value is not an operation.
type Op uint8

// The operations. Integers wrap around. In Min and Max, −0 is smaller than +0, and the result is
// NaN if an operand is NaN.
const (
	Sum Op = iota + 1
	Min
	Max
	Product
	Ops // one more than the last
)

// table holds a function for each type and operation.
type table struct {
	combine [Types][Ops]func(dst, a, b []byte)
	divide  [Types]func(b []byte, n int)
	scale   [Types]func(b []byte, factor float64)
	narrow  [Types]func(dst, src []byte)
	widen   [Types]func(dst, src []byte)
}

// unequal is called if slices have different numbers of elements.
func unequal() { panic("kernel: slices of unequal lengths") }

// Combine returns the function that sets dst[i] to a[i] combined with b[i], where a is from the
// lower ranks; nil for an invalid type or operation. The slices must have equal lengths and hold
// whole elements; dst may be a or b, but must not overlap them otherwise. [Float16] and [BFloat16]
// are computed in float32 and rounded to nearest, ties to even.
func Combine(t Type, op Op) func(dst, a, b []byte) {
	if t >= Types || op >= Ops {
		return nil
	}
	return chosen.combine[t][op]
}

// Divide returns the function that divides every element of b by n, which must be at least 1; nil
// for an invalid type. Integer division truncates towards zero, and n need not fit the type.
func Divide(t Type) func(b []byte, n int) {
	if t >= Types {
		return nil
	}
	return chosen.divide[t]
}

// Scale returns the function that multiplies every element of b by a factor, which is first rounded
// to the type, or to float32 for [Float16] and [BFloat16]; nil for an invalid type. Integers are
// multiplied in float64 and truncated towards zero; results outside the type become its lowest or
// highest value, and NaN becomes 0.
func Scale(t Type) func(b []byte, factor float64) {
	if t >= Types {
		return nil
	}
	return chosen.scale[t]
}

// Narrow returns the function that rounds the float32s of src to t, to nearest with ties to even;
// nil if t is neither [Float16] nor [BFloat16]. dst and src must hold equally many elements and
// must not overlap.
func Narrow(t Type) func(dst, src []byte) {
	if t >= Types {
		return nil
	}
	return chosen.narrow[t]
}

// Widen returns the inverse of [Narrow]: dst holds float32s, src elements of type t. It is exact.
func Widen(t Type) func(dst, src []byte) {
	if t >= Types {
		return nil
	}
	return chosen.widen[t]
}

// Split returns the bounds of part i of n parts of count elements: the first count%n parts have one
// element more.
func Split(count, n, i int) (lo, hi int) {
	each, more := count/n, count%n
	lo = i*each + min(i, more)
	hi = lo + each
	if i < more {
		hi++
	}
	return lo, hi
}

// Part returns part i of n parts of data. It divides data into units of unit bytes, the last of
// which may be shorter, and the units into parts as Split does.
func Part(data []byte, unit, n, i int) []byte {
	lo, hi := Split((len(data)+unit-1)/unit, n, i)
	return data[min(lo*unit, len(data)):min(hi*unit, len(data))]
}

// OfKind returns the type of a kind of Go's own numbers, which must be an integer or a float of
// fixed size.
func OfKind(k reflect.Kind) Type {
	switch k {
	case reflect.Float32:
		return Float32
	case reflect.Float64:
		return Float64
	case reflect.Int8:
		return Int8
	case reflect.Int16:
		return Int16
	case reflect.Int32:
		return Int32
	case reflect.Int64:
		return Int64
	case reflect.Uint8:
		return Uint8
	case reflect.Uint16:
		return Uint16
	case reflect.Uint32:
		return Uint32
	}
	return Uint64
}
