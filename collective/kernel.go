package collective

import "fmt"

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

// combiner sets dst[i] to a[i] combined with b[i], a being of the lower ranks. dst may be a or b. The slices have equal
// lengths and hold whole elements. The same code and operand order on every rank keep even NaN payloads equal.
type combiner func(dst, a, b []byte)

// divider divides every element by n.
type divider func(b []byte, n int)

var combiners = [dtypes][ops]combiner{
	float32Type:  numeric[float32](),
	float64Type:  numeric[float64](),
	int8Type:     numeric[int8](),
	int16Type:    numeric[int16](),
	int32Type:    numeric[int32](),
	int64Type:    numeric[int64](),
	uint8Type:    numeric[uint8](),
	uint16Type:   numeric[uint16](),
	uint32Type:   numeric[uint32](),
	uint64Type:   numeric[uint64](),
	float16Type:  halves(Float16.Float32, ToFloat16),
	bfloat16Type: halves(BFloat16.Float32, ToBFloat16),
}

var dividers = [dtypes]divider{
	float32Type: func(b []byte, n int) { divideFloats(elements[float32](b), float32(n)) },
	float64Type: func(b []byte, n int) { divideFloats(elements[float64](b), float64(n)) },
	int8Type:    func(b []byte, n int) { divideSigned(elements[int8](b), int64(n)) },
	int16Type:   func(b []byte, n int) { divideSigned(elements[int16](b), int64(n)) },
	int32Type:   func(b []byte, n int) { divideSigned(elements[int32](b), int64(n)) },
	int64Type:   func(b []byte, n int) { divideSigned(elements[int64](b), int64(n)) },
	uint8Type:   func(b []byte, n int) { divideUnsigned(elements[uint8](b), uint64(n)) },
	uint16Type:  func(b []byte, n int) { divideUnsigned(elements[uint16](b), uint64(n)) },
	uint32Type:  func(b []byte, n int) { divideUnsigned(elements[uint32](b), uint64(n)) },
	uint64Type:  func(b []byte, n int) { divideUnsigned(elements[uint64](b), uint64(n)) },
	float16Type: func(b []byte, n int) {
		for i, v := range elements[Float16](b) {
			elements[Float16](b)[i] = ToFloat16(v.Float32() / float32(n))
		}
	},
	bfloat16Type: func(b []byte, n int) {
		for i, v := range elements[BFloat16](b) {
			elements[BFloat16](b)[i] = ToBFloat16(v.Float32() / float32(n))
		}
	},
}

func numeric[T Element]() [ops]combiner {
	sum := func(dst, a, b []byte) { add(elements[T](dst), elements[T](a), elements[T](b)) }
	return [ops]combiner{
		Sum:     sum,
		Average: sum,
		Min:     func(dst, a, b []byte) { least(elements[T](dst), elements[T](a), elements[T](b)) },
		Max:     func(dst, a, b []byte) { greatest(elements[T](dst), elements[T](a), elements[T](b)) },
		Product: func(dst, a, b []byte) { multiply(elements[T](dst), elements[T](a), elements[T](b)) },
	}
}

// add is unrolled through array pointers, which removes the bounds checks: 18 GB/s instead of 15 in cache.
func add[T Element](dst, a, b []T) {
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

func multiply[T Element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] * b[i]
	}
}

func least[T Element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = min(a[i], b[i])
	}
}

func greatest[T Element](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = max(a[i], b[i])
	}
}

func halves[T Element](wide func(T) float32, narrow func(float32) T) [ops]combiner {
	each := func(f func(x, y float32) float32) combiner {
		return func(dst, a, b []byte) {
			d, x, y := elements[T](dst), elements[T](a), elements[T](b)
			x, y = x[:len(d)], y[:len(d)]
			for i := range d {
				d[i] = narrow(f(wide(x[i]), wide(y[i])))
			}
		}
	}
	sum := each(func(x, y float32) float32 { return x + y })
	return [ops]combiner{
		Sum:     sum,
		Average: sum,
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
