//go:build !purego

package kernel

import (
	"math"

	"golang.org/x/sys/cpu"
)

//go:generate go run -C internal/gen . ../..

var (
	hasAVX2   = cpu.X86.HasAVX2 && cpu.X86.HasF16C
	hasAVX512 = hasAVX2 && cpu.X86.HasBMI2 && cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL
)

var chosen = choose()

func choose() *table {
	switch {
	case hasAVX512:
		return avx512().inBlocks()
	case hasAVX2:
		return avx2().inBlocks()
	}
	return &twin
}

func avx2() *table {
	t := twin
	t.combine = [Types][Ops]func(dst, a, b []byte){
		Float32:  {Sum: sumFloat32AVX2, Min: minFloat32AVX2, Max: maxFloat32AVX2, Product: productFloat32AVX2},
		Float64:  {Sum: sumFloat64AVX2, Min: minFloat64AVX2, Max: maxFloat64AVX2, Product: productFloat64AVX2},
		Float16:  {Sum: sumFloat16AVX2, Min: minFloat16AVX2, Max: maxFloat16AVX2, Product: productFloat16AVX2},
		BFloat16: {Sum: sumBFloat16AVX2, Min: minBFloat16AVX2, Max: maxBFloat16AVX2, Product: productBFloat16AVX2},
		Int8:     {Sum: sumInt8AVX2, Min: minInt8AVX2, Max: maxInt8AVX2, Product: productInt8AVX2},
		Int16:    {Sum: sumInt16AVX2, Min: minInt16AVX2, Max: maxInt16AVX2, Product: productInt16AVX2},
		Int32:    {Sum: sumInt32AVX2, Min: minInt32AVX2, Max: maxInt32AVX2, Product: productInt32AVX2},
		Int64:    {Sum: sumInt64AVX2, Min: minInt64AVX2, Max: maxInt64AVX2, Product: productInt64AVX2},
		Uint8:    {Sum: sumInt8AVX2, Min: minUint8AVX2, Max: maxUint8AVX2, Product: productInt8AVX2},
		Uint16:   {Sum: sumInt16AVX2, Min: minUint16AVX2, Max: maxUint16AVX2, Product: productInt16AVX2},
		Uint32:   {Sum: sumInt32AVX2, Min: minUint32AVX2, Max: maxUint32AVX2, Product: productInt32AVX2},
		Uint64:   {Sum: sumInt64AVX2, Min: minUint64AVX2, Max: maxUint64AVX2, Product: productInt64AVX2},
	}
	t.divide[Float32] = func(b []byte, n int) { divideFloat32AVX2(b, float32(n)) }
	t.divide[Float64] = func(b []byte, n int) { divideFloat64AVX2(b, float64(n)) }
	t.divide[Float16] = func(b []byte, n int) { divideFloat16AVX2(b, float32(n)) }
	t.divide[BFloat16] = func(b []byte, n int) { divideBFloat16AVX2(b, float32(n)) }
	t.divide[Int8] = bytesBy(128, divideInt8AVX2)
	t.divide[Uint8] = bytesBy(math.MaxUint8, divideUint8AVX2)
	t.divide[Int16] = multiplied(1<<15, divideInt16AVX2)
	t.divide[Uint16] = multiplied(math.MaxUint16, divideUint16AVX2)
	t.divide[Int32] = multiplied(1<<31, divideInt32AVX2)
	t.divide[Uint32] = multiplied(math.MaxUint32, divideUint32AVX2)
	t.scale[Float32] = func(b []byte, factor float64) { scaleFloat32AVX2(b, float32(factor)) }
	t.scale[Float64] = func(b []byte, factor float64) { scaleFloat64AVX2(b, factor) }
	t.scale[Float16] = func(b []byte, factor float64) { scaleFloat16AVX2(b, float32(factor)) }
	t.scale[BFloat16] = func(b []byte, factor float64) { scaleBFloat16AVX2(b, float32(factor)) }
	t.narrow[Float16] = narrowFloat16AVX2
	t.narrow[BFloat16] = narrowBFloat16AVX2
	t.widen[Float16] = widenFloat16AVX2
	t.widen[BFloat16] = widenBFloat16AVX2
	return &t
}

func avx512() *table {
	t := twin
	t.combine = [Types][Ops]func(dst, a, b []byte){
		Float32:  {Sum: sumFloat32AVX512, Min: minFloat32AVX512, Max: maxFloat32AVX512, Product: productFloat32AVX512},
		Float64:  {Sum: sumFloat64AVX512, Min: minFloat64AVX512, Max: maxFloat64AVX512, Product: productFloat64AVX512},
		Float16:  {Sum: sumFloat16AVX512, Min: minFloat16AVX512, Max: maxFloat16AVX512, Product: productFloat16AVX512},
		BFloat16: {Sum: sumBFloat16AVX512, Min: minBFloat16AVX512, Max: maxBFloat16AVX512, Product: productBFloat16AVX512},
		Int8:     {Sum: sumInt8AVX512, Min: minInt8AVX512, Max: maxInt8AVX512, Product: productInt8AVX512},
		Int16:    {Sum: sumInt16AVX512, Min: minInt16AVX512, Max: maxInt16AVX512, Product: productInt16AVX512},
		Int32:    {Sum: sumInt32AVX512, Min: minInt32AVX512, Max: maxInt32AVX512, Product: productInt32AVX512},
		Int64:    {Sum: sumInt64AVX512, Min: minInt64AVX512, Max: maxInt64AVX512, Product: productInt64AVX512},
		Uint8:    {Sum: sumInt8AVX512, Min: minUint8AVX512, Max: maxUint8AVX512, Product: productInt8AVX512},
		Uint16:   {Sum: sumInt16AVX512, Min: minUint16AVX512, Max: maxUint16AVX512, Product: productInt16AVX512},
		Uint32:   {Sum: sumInt32AVX512, Min: minUint32AVX512, Max: maxUint32AVX512, Product: productInt32AVX512},
		Uint64:   {Sum: sumInt64AVX512, Min: minUint64AVX512, Max: maxUint64AVX512, Product: productInt64AVX512},
	}
	t.divide[Float32] = func(b []byte, n int) { divideFloat32AVX512(b, float32(n)) }
	t.divide[Float64] = func(b []byte, n int) { divideFloat64AVX512(b, float64(n)) }
	t.divide[Float16] = func(b []byte, n int) { divideFloat16AVX512(b, float32(n)) }
	t.divide[BFloat16] = func(b []byte, n int) { divideBFloat16AVX512(b, float32(n)) }
	t.divide[Int8] = bytesBy(128, divideInt8AVX512)
	t.divide[Uint8] = bytesBy(math.MaxUint8, divideUint8AVX512)
	t.divide[Int16] = multiplied(1<<15, divideInt16AVX512)
	t.divide[Uint16] = multiplied(math.MaxUint16, divideUint16AVX512)
	t.divide[Int32] = multiplied(1<<31, divideInt32AVX512)
	t.divide[Uint32] = multiplied(math.MaxUint32, divideUint32AVX512)
	t.scale[Float32] = func(b []byte, factor float64) { scaleFloat32AVX512(b, float32(factor)) }
	t.scale[Float64] = func(b []byte, factor float64) { scaleFloat64AVX512(b, factor) }
	t.scale[Float16] = func(b []byte, factor float64) { scaleFloat16AVX512(b, float32(factor)) }
	t.scale[BFloat16] = func(b []byte, factor float64) { scaleBFloat16AVX512(b, float32(factor)) }
	t.narrow[Float16] = narrowFloat16AVX512
	t.narrow[BFloat16] = narrowBFloat16AVX512
	t.widen[Float16] = widenFloat16AVX512
	t.widen[BFloat16] = widenBFloat16AVX512
	return &t
}

// bytesBy returns a division of bytes that uses code, which takes the upper half of the product of
// each element and a 16-bit reciprocal; the argument of code has the reciprocal twice. The result
// is exact: the reciprocal times n exceeds 2^16 by less than n, and n does not exceed most, the
// largest magnitude of an element.
func bytesBy(most int, code func(b []byte, x uint32)) func(b []byte, n int) {
	return func(b []byte, n int) {
		switch {
		case n > most:
			clear(b)
		case n > 1:
			m := uint32(math.MaxUint16/n + 1)
			code(b, m<<16|m)
		}
	}
}

// multiplied returns a division of integers that uses code, which multiplies them, as floating
// point numbers, by a reciprocal that is too large by less than an ulp, and truncates. The result
// is exact: the product is too large by less than x/n times two ulps. That is less than 1/n, the
// least distance from a quotient that is not an integer to the next integer, since elements have
// fewer bits than the fraction.
func multiplied[F float32 | float64](most int, code func(b []byte, x F)) func(b []byte, n int) {
	return func(b []byte, n int) {
		switch {
		case n > most:
			clear(b)
		case n > 1:
			code(b, above(1/F(n), F(n)))
		}
	}
}

// above returns x, or the next larger number, such that x·n is at least 1.
func above[F float32 | float64](x, n F) F {
	switch x := any(x).(type) {
	case float32:
		if float64(x)*float64(n) < 1 { // exact, for n of up to 24 bits
			return F(math.Nextafter32(x, 2))
		}
	case float64:
		if math.FMA(x, float64(n), -1) < 0 {
			return F(math.Nextafter(x, 2))
		}
	}
	return x
}
