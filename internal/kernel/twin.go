package kernel

import (
	"math"
	"math/bits"
	"unsafe"
)

type element interface {
	float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

// twin is the arithmetic in Go: the reference with which vector code agrees in every bit, and the
// only code if there is no vector code.
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
		Float16:  halves(Float16),
		BFloat16: halves(BFloat16),
	},
	divide: [Types]func(b []byte, n int){
		Float32:  func(b []byte, n int) { divideFloats(Elements[float32](b), float32(n)) },
		Float64:  func(b []byte, n int) { divideFloats(Elements[float64](b), float64(n)) },
		Int8:     func(b []byte, n int) { divideSigned(Elements[int8](b), int64(n)) },
		Int16:    func(b []byte, n int) { divideSigned(Elements[int16](b), int64(n)) },
		Int32:    func(b []byte, n int) { divideSigned(Elements[int32](b), int64(n)) },
		Int64:    func(b []byte, n int) { divideSigned(Elements[int64](b), int64(n)) },
		Uint8:    func(b []byte, n int) { divideUnsigned(Elements[uint8](b), uint64(n)) },
		Uint16:   func(b []byte, n int) { divideUnsigned(Elements[uint16](b), uint64(n)) },
		Uint32:   func(b []byte, n int) { divideUnsigned(Elements[uint32](b), uint64(n)) },
		Uint64:   func(b []byte, n int) { divideUnsigned(Elements[uint64](b), uint64(n)) },
		Float16:  func(b []byte, n int) { eachHalf(Float16, Elements[uint16](b), float32(n), true) },
		BFloat16: func(b []byte, n int) { eachHalf(BFloat16, Elements[uint16](b), float32(n), true) },
	},
	scale: [Types]func(b []byte, factor float64){
		Float32: func(b []byte, factor float64) { scaleFloats(Elements[float32](b), float32(factor)) },
		Float64: func(b []byte, factor float64) { scaleFloats(Elements[float64](b), factor) },
		Int8:    func(b []byte, factor float64) { scaleIntegers(Elements[int8](b), factor, math.MinInt8, math.MaxInt8) },
		Int16: func(b []byte, factor float64) {
			scaleIntegers(Elements[int16](b), factor, math.MinInt16, math.MaxInt16)
		},
		Int32: func(b []byte, factor float64) {
			scaleIntegers(Elements[int32](b), factor, math.MinInt32, math.MaxInt32)
		},
		Int64: func(b []byte, factor float64) {
			scaleIntegers(Elements[int64](b), factor, math.MinInt64, math.MaxInt64)
		},
		Uint8:  func(b []byte, factor float64) { scaleIntegers(Elements[uint8](b), factor, 0, math.MaxUint8) },
		Uint16: func(b []byte, factor float64) { scaleIntegers(Elements[uint16](b), factor, 0, math.MaxUint16) },
		Uint32: func(b []byte, factor float64) { scaleIntegers(Elements[uint32](b), factor, 0, math.MaxUint32) },
		Uint64: func(b []byte, factor float64) { scaleIntegers(Elements[uint64](b), factor, 0, math.MaxUint64) },
		Float16: func(b []byte, factor float64) {
			eachHalf(Float16, Elements[uint16](b), float32(factor), false)
		},
		BFloat16: func(b []byte, factor float64) {
			eachHalf(BFloat16, Elements[uint16](b), float32(factor), false)
		},
	},
	narrow: [Types]func(dst, src []byte){Float16: narrow(Float16), BFloat16: narrow(BFloat16)},
	widen:  [Types]func(dst, src []byte){Float16: widen(Float16), BFloat16: widen(BFloat16)},
}

func numeric[T element]() [Ops]func(dst, a, b []byte) {
	return [Ops]func(dst, a, b []byte){
		Sum:     func(dst, a, b []byte) { sums(operands[T](dst, a, b)) },
		Min:     func(dst, a, b []byte) { minima(operands[T](dst, a, b)) },
		Max:     func(dst, a, b []byte) { maxima(operands[T](dst, a, b)) },
		Product: func(dst, a, b []byte) { products(operands[T](dst, a, b)) },
	}
}

func operands[T element](dst, a, b []byte) (d, x, y []T) {
	d, x, y = Elements[T](dst), Elements[T](a), Elements[T](b)
	if len(x) != len(d) || len(y) != len(d) {
		unequal()
	}
	return d, x, y
}

// nan returns the result for two numbers whose sum, product, minimum or maximum is not a number:
// the first that is not a number, as a quiet NaN, or else the NaN that amd64 makes. It is needed
// because compilers may swap the sides of + and *, and machines differ.
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

func sums[T element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = add(a[i], b[i])
	}
}

func products[T element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = multiply(a[i], b[i])
	}
}

func minima[T element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = least(a[i], b[i])
	}
}

func maxima[T element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = greatest(a[i], b[i])
	}
}

// block is the number of halves that are widened at once.
const block = 256

func halves(t Type) [Ops]func(dst, a, b []byte) {
	over := func(op Op) func(dst, a, b []byte) {
		return func(dst, a, b []byte) {
			d, x, y := operands[uint16](dst, a, b)
			for len(d) > 0 {
				n := min(block, len(d))
				combineHalves(t, op, d[:n], x[:n], y[:n])
				d, x, y = d[n:], x[n:], y[n:]
			}
		}
	}
	return [Ops]func(dst, a, b []byte){Sum: over(Sum), Min: over(Min), Max: over(Max), Product: over(Product)}
}

func combineHalves(t Type, op Op, dst, a, b []uint16) {
	var bufferX, bufferY [block]float32
	x, y := bufferX[:len(dst)], bufferY[:len(dst)]
	widenHalves(t, x, a)
	widenHalves(t, y, b)
	switch op {
	case Sum:
		sums(x, x, y)
	case Min:
		minima(x, x, y)
	case Max:
		maxima(x, x, y)
	case Product:
		products(x, x, y)
	}
	narrowHalves(t, dst, x)
}

func widenHalves(t Type, dst []float32, src []uint16) {
	if len(src) != len(dst) {
		unequal()
	}
	if t == Float16 {
		for i, v := range src {
			dst[i] = FromFloat16(v)
		}
		return
	}
	for i, v := range src {
		dst[i] = FromBFloat16(v)
	}
}

func narrowHalves(t Type, dst []uint16, src []float32) {
	if len(src) != len(dst) {
		unequal()
	}
	if t == Float16 {
		for i, v := range src {
			dst[i] = ToFloat16(v)
		}
		return
	}
	for i, v := range src {
		dst[i] = ToBFloat16(v)
	}
}

// eachHalf multiplies or divides halves.
func eachHalf(t Type, d []uint16, by float32, divide bool) {
	var buffer [block]float32
	for len(d) > 0 {
		x := buffer[:min(block, len(d))]
		widenHalves(t, x, d[:len(x)])
		if divide {
			divideFloats(x, by)
		} else {
			scaleFloats(x, by)
		}
		narrowHalves(t, d[:len(x)], x)
		d = d[len(x):]
	}
}

func divideFloats[T float32 | float64](d []T, n T) {
	for i := range d {
		d[i] /= n
	}
}

// divideSigned divides as int64, since the number of ranks need not fit T. It multiplies by a
// reciprocal, which is exact and much faster.
func divideSigned[T int8 | int16 | int32 | int64](d []T, n int64) {
	m, exact := reciprocal(uint64(n), unsafe.Sizeof(*new(T)))
	if !exact {
		by := newDivisor(uint64(n))
		for i, v := range d {
			x := int64(v)
			sign := x >> 63
			d[i] = T((int64(by.quotient(uint64((x^sign)-sign))) ^ sign) - sign)
		}
		return
	}
	for i, v := range d {
		x := int64(v)
		sign := x >> 63
		q, _ := bits.Mul64(uint64((x^sign)-sign), m)
		d[i] = T((int64(q) ^ sign) - sign)
	}
}

func divideUnsigned[T uint8 | uint16 | uint32 | uint64](d []T, n uint64) {
	m, exact := reciprocal(n, unsafe.Sizeof(*new(T)))
	if !exact {
		by := newDivisor(n)
		for i, v := range d {
			d[i] = T(by.quotient(uint64(v)))
		}
		return
	}
	for i, v := range d {
		q, _ := bits.Mul64(uint64(v), m)
		d[i] = T(q)
	}
}

// reciprocal returns m, 2^64/n rounded up. exact reports that for all x of that many bytes, the
// upper half of x·m is x/n rounded down. Since m·n exceeds 2^64 by less than n, the error of
// x·m/2^64 is less than x/2^64. That must be less than 1/n, the least distance from a quotient that
// is not an integer to the next integer.
func reciprocal(n uint64, bytes uintptr) (m uint64, exact bool) {
	if bytes > 4 || n < 2 || n > math.MaxUint32 {
		return 0, false
	}
	return math.MaxUint64/n + 1, true
}

// divisor divides all 64-bit integers by one number, with a reciprocal of 65 bits, the first of
// which is 1: see Granlund and Montgomery, "Division by Invariant Integers using Multiplication",
// 1994, figure 4.1.
type divisor struct {
	m     uint64 // 2^64·(2^l−n)/n rounded down, plus 1; l is the least number for which 2^l is not less than n
	shift uint   // l−1
	one   bool   // n is 1
}

func newDivisor(n uint64) divisor {
	l := uint(bits.Len64(n - 1))
	if l == 0 {
		return divisor{one: true}
	}
	m, _ := bits.Div64(1<<l-n, 0, n) // 1<<64 is 0, and 2^64−n is right
	return divisor{m: m + 1, shift: l - 1}
}

func (d divisor) quotient(x uint64) uint64 {
	if d.one {
		return x
	}
	t, _ := bits.Mul64(d.m, x)
	return (t + (x-t)>>1) >> d.shift
}

func scaleFloats[T float32 | float64](d []T, factor T) {
	for i := range d {
		d[i] = multiply(d[i], factor)
	}
}

// scaleIntegers changes nothing if the factor is 1, since not every 64-bit integer is a float64.
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

func narrow(t Type) func(dst, src []byte) {
	return func(dst, src []byte) { narrowHalves(t, Elements[uint16](dst), Elements[float32](src)) }
}

func widen(t Type) func(dst, src []byte) {
	return func(dst, src []byte) { widenHalves(t, Elements[float32](dst), Elements[uint16](src)) }
}
