package collective

import (
	"reflect"
	"unsafe"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Element is the type of elements of collectives. [Float16] and [BFloat16] are reduced as floating
// point numbers; any other type over uint16 is an integer. If such a type looks like a floating
// point number of another package, by its name or a method Float32, its reductions are refused:
// [AsFloat16] and [AsBFloat16] convert its slices.
type Element interface {
	~float32 | ~float64 | ~int8 | ~int16 | ~int32 | ~int64 | ~uint8 | ~uint16 | ~uint32 | ~uint64
}

// Float16 holds the bits of an IEEE 754 half-precision number. Reductions compute in float32 and
// round each partial result to the nearest Float16, ties to even; [Average] rounds later. A [Sum]
// above 65504 in magnitude is infinite.
type Float16 uint16

// BFloat16 holds the upper 16 bits of a float32. Reductions compute in float32 and round each
// partial result to the nearest BFloat16, ties to even; [Average] rounds later.
type BFloat16 uint16

// ToFloat16 rounds to the nearest Float16, ties to even. Too large values become infinite, and a
// NaN becomes a quiet NaN.
func ToFloat16(f float32) Float16 { return Float16(kernel.ToFloat16(f)) }

// Float32 returns the number, which a float32 represents exactly.
func (h Float16) Float32() float32 { return kernel.FromFloat16(uint16(h)) }

// ToBFloat16 rounds to the nearest BFloat16, ties to even. A NaN becomes a quiet NaN.
func ToBFloat16(f float32) BFloat16 { return BFloat16(kernel.ToBFloat16(f)) }

// Float32 returns the number, which a float32 represents exactly.
func (h BFloat16) Float32() float32 { return kernel.FromBFloat16(uint16(h)) }

// AsFloat16 returns data as Float16s, without a copy. It is for other types of IEEE 754
// half-precision numbers.
func AsFloat16[T ~uint16](data []T) []Float16 { return reinterpreted[Float16](data) }

// AsBFloat16 returns data as BFloat16s, without a copy.
func AsBFloat16[T ~uint16](data []T) []BFloat16 { return reinterpreted[BFloat16](data) }

// AsUint16 returns data as integers, without a copy.
func AsUint16[T ~uint16](data []T) []uint16 { return reinterpreted[uint16](data) }

func reinterpreted[To, T ~uint16](data []T) []To {
	return unsafe.Slice((*To)(unsafe.Pointer(unsafe.SliceData(data))), len(data))
}

// checkReduced returns an error for a type that looks like a floating point number but would be
// reduced as an integer.
func checkReduced[T Element]() error {
	if unsafe.Sizeof(*new(T)) != 2 {
		return nil
	}
	switch any(*new(T)).(type) {
	case int16, uint16, Float16, BFloat16:
		return nil
	}
	return kernel.CheckAlien(reflect.TypeFor[T]())
}

// typeOf returns the type of an element.
func typeOf[T Element]() kernel.Type {
	switch any(*new(T)).(type) {
	case float32:
		return kernel.Float32
	case Float16:
		return kernel.Float16
	case BFloat16:
		return kernel.BFloat16
	}
	return kernel.OfKind(reflect.TypeFor[T]().Kind())
}
