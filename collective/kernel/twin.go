package kernel

import (
	"math"
	"unsafe"
)

type element interface {
	float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

// twin is the arithmetic in Go: the reference that vector code agrees with in every bit, and all there is without it.
var twin = table{
	combine: [Types][Ops]func(dst, a, b []byte){
		Float32:  numeric[float32](),
		Float64:  numeric[float64](),
		Int8:     numeric[int8](),
		Int16:    numeric[int16](),
		Int32:    numeric[int32](),
		Int64:    numeric[int64](),
		Uint8:    numeric[uint8](),
		Uint16:   numeric[uint16](),
		Uint32:   numeric[uint32](),
		Uint64:   numeric[uint64](),
		Float16:  halves(FromFloat16, ToFloat16),
		BFloat16: halves(FromBFloat16, ToBFloat16),
	},
	divide: [Types]func(b []byte, n int){
		Float32:  func(b []byte, n int) { divideFloats(elements[float32](b), float32(n)) },
		Float64:  func(b []byte, n int) { divideFloats(elements[float64](b), float64(n)) },
		Int8:     func(b []byte, n int) { divideSigned(elements[int8](b), int64(n)) },
		Int16:    func(b []byte, n int) { divideSigned(elements[int16](b), int64(n)) },
		Int32:    func(b []byte, n int) { divideSigned(elements[int32](b), int64(n)) },
		Int64:    func(b []byte, n int) { divideSigned(elements[int64](b), int64(n)) },
		Uint8:    func(b []byte, n int) { divideUnsigned(elements[uint8](b), uint64(n)) },
		Uint16:   func(b []byte, n int) { divideUnsigned(elements[uint16](b), uint64(n)) },
		Uint32:   func(b []byte, n int) { divideUnsigned(elements[uint32](b), uint64(n)) },
		Uint64:   func(b []byte, n int) { divideUnsigned(elements[uint64](b), uint64(n)) },
		Float16:  func(b []byte, n int) { divideHalves(elements[uint16](b), float32(n), FromFloat16, ToFloat16) },
		BFloat16: func(b []byte, n int) { divideHalves(elements[uint16](b), float32(n), FromBFloat16, ToBFloat16) },
	},
	scale: [Types]func(b []byte, factor float64){
		Float32: func(b []byte, factor float64) { scaleFloats(elements[float32](b), float32(factor)) },
		Float64: func(b []byte, factor float64) { scaleFloats(elements[float64](b), factor) },
		Int8:    func(b []byte, factor float64) { scaleIntegers(elements[int8](b), factor, math.MinInt8, math.MaxInt8) },
		Int16: func(b []byte, factor float64) {
			scaleIntegers(elements[int16](b), factor, math.MinInt16, math.MaxInt16)
		},
		Int32: func(b []byte, factor float64) {
			scaleIntegers(elements[int32](b), factor, math.MinInt32, math.MaxInt32)
		},
		Int64: func(b []byte, factor float64) {
			scaleIntegers(elements[int64](b), factor, math.MinInt64, math.MaxInt64)
		},
		Uint8:  func(b []byte, factor float64) { scaleIntegers(elements[uint8](b), factor, 0, math.MaxUint8) },
		Uint16: func(b []byte, factor float64) { scaleIntegers(elements[uint16](b), factor, 0, math.MaxUint16) },
		Uint32: func(b []byte, factor float64) { scaleIntegers(elements[uint32](b), factor, 0, math.MaxUint32) },
		Uint64: func(b []byte, factor float64) { scaleIntegers(elements[uint64](b), factor, 0, math.MaxUint64) },
		Float16: func(b []byte, factor float64) {
			scaleHalves(elements[uint16](b), float32(factor), FromFloat16, ToFloat16)
		},
		BFloat16: func(b []byte, factor float64) {
			scaleHalves(elements[uint16](b), float32(factor), FromBFloat16, ToBFloat16)
		},
	},
	narrow: [Types]func(dst, src []byte){Float16: narrow(ToFloat16), BFloat16: narrow(ToBFloat16)},
	widen:  [Types]func(dst, src []byte){Float16: widen(FromFloat16), BFloat16: widen(FromBFloat16)},
}

func numeric[T element]() [Ops]func(dst, a, b []byte) {
	over := func(f func(dst, a, b []T)) func(dst, a, b []byte) {
		return func(dst, a, b []byte) {
			if len(a) != len(dst) || len(b) != len(dst) {
				unequal()
			}
			f(elements[T](dst), elements[T](a), elements[T](b))
		}
	}
	return [Ops]func(dst, a, b []byte){
		Sum: over(sums[T]),
		Min: over(func(dst, a, b []T) {
			for i := range dst {
				dst[i] = least(a[i], b[i])
			}
		}),
		Max: over(func(dst, a, b []T) {
			for i := range dst {
				dst[i] = greatest(a[i], b[i])
			}
		}),
		Product: over(func(dst, a, b []T) {
			for i := range dst {
				dst[i] = multiply(a[i], b[i])
			}
		}),
	}
}

// nan is what two numbers make whose sum, product, minimum or maximum is not a number: the first that is none, as a quiet NaN, or else
// the NaN that amd64 makes. Compilers may swap the sides of + and *, and machines differ.
//
//go:noinline
func nan[T element](x, y T) T {
	switch {
	case x != x:
		return x + x
	case y != y:
		return y + y
	}
	return T(math.Float64frombits(0xfff8 << 48))
}

func add[T element](x, y T) T {
	r := x + y
	if r != r {
		return nan(x, y)
	}
	return r
}

func multiply[T element](x, y T) T {
	r := x * y
	if r != r {
		return nan(x, y)
	}
	return r
}

func least[T element](x, y T) T {
	r := min(x, y)
	if r != r {
		return nan(x, y)
	}
	return r
}

func greatest[T element](x, y T) T {
	r := max(x, y)
	if r != r {
		return nan(x, y)
	}
	return r
}

// sums is unrolled through array pointers, which removes the bounds checks.
func sums[T element](dst, a, b []T) {
	i := 0
	for ; i+8 <= len(dst); i += 8 {
		d, x, y := (*[8]T)(dst[i:]), (*[8]T)(a[i:]), (*[8]T)(b[i:])
		d[0] = add(x[0], y[0])
		d[1] = add(x[1], y[1])
		d[2] = add(x[2], y[2])
		d[3] = add(x[3], y[3])
		d[4] = add(x[4], y[4])
		d[5] = add(x[5], y[5])
		d[6] = add(x[6], y[6])
		d[7] = add(x[7], y[7])
	}
	for ; i < len(dst); i++ {
		dst[i] = add(a[i], b[i])
	}
}

func halves(wide func(uint16) float32, narrow func(float32) uint16) [Ops]func(dst, a, b []byte) {
	each := func(f func(x, y float32) float32) func(dst, a, b []byte) {
		return func(dst, a, b []byte) {
			if len(a) != len(dst) || len(b) != len(dst) {
				unequal()
			}
			d, x, y := elements[uint16](dst), elements[uint16](a), elements[uint16](b)
			for i := range d {
				d[i] = narrow(f(wide(x[i]), wide(y[i])))
			}
		}
	}
	return [Ops]func(dst, a, b []byte){
		Sum: each(add[float32]), Min: each(least[float32]), Max: each(greatest[float32]), Product: each(multiply[float32]),
	}
}

func divideFloats[T float32 | float64](d []T, n T) {
	for i := range d {
		d[i] /= n
	}
}

// divideSigned divides as int64, since the number of ranks need not fit T.
func divideSigned[T int8 | int16 | int32 | int64](d []T, n int64) {
	for i := range d {
		d[i] = T(int64(d[i]) / n)
	}
}

func divideUnsigned[T uint8 | uint16 | uint32 | uint64](d []T, n uint64) {
	for i := range d {
		d[i] = T(uint64(d[i]) / n)
	}
}

func divideHalves(d []uint16, n float32, wide func(uint16) float32, narrow func(float32) uint16) {
	for i, v := range d {
		d[i] = narrow(wide(v) / n)
	}
}

func scaleFloats[T float32 | float64](d []T, factor T) {
	for i := range d {
		d[i] = multiply(d[i], factor)
	}
}

func scaleHalves(d []uint16, factor float32, wide func(uint16) float32, narrow func(float32) uint16) {
	for i, v := range d {
		d[i] = narrow(multiply(wide(v), factor))
	}
}

// scaleIntegers leaves everything as it is when the factor is 1: not every 64-bit integer is a float64.
func scaleIntegers[T element](d []T, factor float64, lowest, highest T) {
	if factor == 1 {
		return
	}
	for i, v := range d {
		switch f := float64(v) * factor; {
		case f != f:
			d[i] = 0
		case f <= float64(lowest):
			d[i] = lowest
		case f >= float64(highest):
			d[i] = highest
		default:
			d[i] = T(f)
		}
	}
}

func narrow(round func(float32) uint16) func(dst, src []byte) {
	return func(dst, src []byte) {
		d, s := elements[uint16](dst), elements[float32](src)
		if len(s) != len(d) {
			unequal()
		}
		for i, v := range s {
			d[i] = round(v)
		}
	}
}

func widen(wide func(uint16) float32) func(dst, src []byte) {
	return func(dst, src []byte) {
		d, s := elements[float32](dst), elements[uint16](src)
		if len(s) != len(d) {
			unequal()
		}
		for i, v := range s {
			d[i] = wide(v)
		}
	}
}

// elements is the memory of b as whole elements.
func elements[T element](b []byte) []T {
	size := int(unsafe.Sizeof(*new(T)))
	if len(b) < size {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/size)
}
