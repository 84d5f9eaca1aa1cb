package collective

import (
	"reflect"
	"unsafe"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Element is what collectives compute with. [Float16] and [BFloat16] are reduced as floating point
// numbers; any other type over uint16, one made from them included, is an integer.
type Element interface {
	~float32 | ~float64 | ~int8 | ~int16 | ~int32 | ~int64 | ~uint8 | ~uint16 | ~uint32 | ~uint64
}

// Float16 holds the bits of an IEEE 754 half-precision number. Reductions compute in float32 and
// round each partial result to the nearest Float16, ties to even.
type Float16 uint16

// BFloat16 holds the upper 16 bits of a float32. Reductions compute in float32 and round each
// partial result to the nearest BFloat16, ties to even.
type BFloat16 uint16

// ToFloat16 rounds to the nearest Float16, ties to even; what is too large becomes an infinity, NaN
// stays a quiet NaN.
func ToFloat16(f float32) Float16 { return Float16(kernel.ToFloat16(f)) }

// Float32 is exact.
func (h Float16) Float32() float32 { return kernel.FromFloat16(uint16(h)) }

// ToBFloat16 rounds to the nearest BFloat16, ties to even; NaN stays a quiet NaN.
func ToBFloat16(f float32) BFloat16 { return BFloat16(kernel.ToBFloat16(f)) }

// Float32 is exact.
func (h BFloat16) Float32() float32 { return kernel.FromBFloat16(uint16(h)) }

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

// bytesOf is the memory of data, without a copy. Elements move in the byte order of the machine;
// frames of a machine with another order are refused by their magic number.
func bytesOf[T Element](data []T) []byte {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(data[0])))
}

// elements is the inverse of bytesOf; b must be aligned for T.
func elements[T Element](b []byte) []T {
	size := int(unsafe.Sizeof(*new(T)))
	if len(b) < size {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/size)
}
