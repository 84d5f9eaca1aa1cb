package collective

import (
	"fmt"
	"math"
	"reflect"
	"unsafe"
)

// Element is what collectives compute with. [Float16] and [BFloat16] are reduced as floating point numbers; any other type
// over uint16, one made from them included, is an integer.
type Element interface {
	~float32 | ~float64 | ~int8 | ~int16 | ~int32 | ~int64 | ~uint8 | ~uint16 | ~uint32 | ~uint64
}

// Float16 holds the bits of an IEEE 754 half-precision number. Reductions compute in float32 and round each partial result
// to the nearest Float16, ties to even.
type Float16 uint16

// BFloat16 holds the upper 16 bits of a float32. Reductions compute in float32 and round each partial result to the nearest
// BFloat16, ties to even.
type BFloat16 uint16

// ToFloat16 rounds to the nearest Float16, ties to even; what is too large becomes an infinity, NaN stays a quiet NaN.
func ToFloat16(f float32) Float16 {
	b := math.Float32bits(f)
	sign := Float16(b>>16) & 0x8000
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return sign | 0x7e00 | Float16(b>>13)&0x1ff
	case b >= 0x477ff000: // 65520 and above round to infinity
		return sign | 0x7c00
	case b < 0x38800000: // below 2^-14: adding 0.5 rounds at 2^-24, the spacing of subnormal halves
		return sign | Float16(math.Float32bits(math.Float32frombits(b)+0.5)-0x3f000000)
	default: // rebias the exponent and add half a unit, less one bit when that would round a tie up to odd
		return sign | Float16((b-(127-15)<<23+0xfff+b>>13&1)>>13)
	}
}

// Float32 is exact.
func (h Float16) Float32() float32 {
	sign, exp, man := uint32(h&0x8000)<<16, uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exp {
	case 0:
		return math.Float32frombits(sign | math.Float32bits(float32(man)*(1.0/(1<<24))))
	case 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | man<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | man<<13)
}

// ToBFloat16 rounds to the nearest BFloat16, ties to even; NaN stays a quiet NaN.
func ToBFloat16(f float32) BFloat16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return BFloat16(b>>16) | 0x40
	}
	return BFloat16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32 is exact.
func (h BFloat16) Float32() float32 { return math.Float32frombits(uint32(h) << 16) }

// dtype is an element type as frames name it.
type dtype uint8

const (
	noType dtype = iota
	float32Type
	float64Type
	int8Type
	int16Type
	int32Type
	int64Type
	uint8Type
	uint16Type
	uint32Type
	uint64Type
	float16Type
	bfloat16Type
	dtypes
)

var dtypeNames = [dtypes]string{"", "float32", "float64", "int8", "int16", "int32", "int64",
	"uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"}

var dtypeSizes = [dtypes]int{0, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2}

func (t dtype) String() string {
	if t < dtypes {
		return dtypeNames[t]
	}
	return fmt.Sprintf("type(%d)", uint8(t))
}

func (t dtype) size() int { return dtypeSizes[t] }

func dtypeOf[T Element]() dtype {
	switch any(*new(T)).(type) {
	case float32:
		return float32Type
	case Float16:
		return float16Type
	case BFloat16:
		return bfloat16Type
	}
	switch reflect.TypeFor[T]().Kind() {
	case reflect.Float32:
		return float32Type
	case reflect.Float64:
		return float64Type
	case reflect.Int8:
		return int8Type
	case reflect.Int16:
		return int16Type
	case reflect.Int32:
		return int32Type
	case reflect.Int64:
		return int64Type
	case reflect.Uint8:
		return uint8Type
	case reflect.Uint16:
		return uint16Type
	case reflect.Uint32:
		return uint32Type
	}
	return uint64Type
}

// bytesOf is the memory of data, without a copy. Elements move in the byte order of the machine; frames of a machine with
// another order are refused by their magic number.
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
