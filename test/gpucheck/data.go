package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// reductions are the operations on device memory, each with internal/kernel's function for two
// elements.
var reductions = []struct {
	op  collective.Op
	two kernel.Op
}{{collective.Sum, kernel.Sum}, {collective.Min, kernel.Min}, {collective.Max, kernel.Max},
	{collective.Product, kernel.Product}, {collective.Average, kernel.Sum}}

// fill returns n elements with random bits, about half of them edge cases: exponents and fractions
// of zeros and ones, subnormal numbers, infinities and NaNs.
func fill(r *rand.Rand, t kernel.Type, n int) []byte {
	exponent := map[kernel.Type]int{kernel.Float32: 8, kernel.Float64: 11, kernel.Float16: 5, kernel.BFloat16: 8}[t]
	width := t.Size() * 8
	fraction := width - 1 - exponent
	edges := []uint64{0, 1, 2, 1<<fraction - 1, 1<<fraction - 2, 1 << (fraction - 1), 1<<(fraction-1) - 1}
	middle := uint64(0)
	if exponent > 0 {
		middle = 1<<(exponent-1) - 1
	}
	b := make([]byte, 0, n*t.Size())
	for range n {
		v := r.Uint64()
		if r.IntN(2) == 0 {
			e := []uint64{0, 1, middle, middle + 1, 1<<exponent - 2, 1<<exponent - 1}[r.IntN(6)]
			v = e<<fraction | edges[r.IntN(len(edges))] | v&(1<<(width-1))
		}
		b = append(b, binary.LittleEndian.AppendUint64(nil, v)[:t.Size()]...)
	}
	return b
}

// exact returns n small numbers, whose sums and products over some ranks are exact in every type
// and order.
func exact(r *rand.Rand, t kernel.Type, n int) []byte {
	b := make([]byte, 0, n*t.Size())
	for range n {
		v := 1 + r.IntN(2)
		switch t {
		case kernel.Float32:
			b, _ = binary.Append(b, binary.LittleEndian, float32(v))
		case kernel.Float64:
			b, _ = binary.Append(b, binary.LittleEndian, float64(v))
		case kernel.Float16:
			b, _ = binary.Append(b, binary.LittleEndian, kernel.ToFloat16(float32(v)))
		case kernel.BFloat16:
			b, _ = binary.Append(b, binary.LittleEndian, kernel.ToBFloat16(float32(v)))
		case kernel.Int32:
			b, _ = binary.Append(b, binary.LittleEndian, int32(v))
		default:
			b, _ = binary.Append(b, binary.LittleEndian, int64(v))
		}
	}
	return b
}

// reduce returns the ranks' vectors combined in rank order.
func reduce(t kernel.Type, op collective.Op, vectors [][]byte) []byte {
	all := slices.Clone(vectors[0])
	if op == collective.Average && kernel.Narrow(t) != nil {
		kernel.Mean(t, all, vectors, nil, len(vectors))
		return all
	}
	for _, r := range reductions {
		if r.op == op {
			for _, v := range vectors[1:] {
				kernel.Combine(t, r.two)(all, all, v)
			}
		}
	}
	if op == collective.Average {
		kernel.Divide(t)(all, len(vectors))
	}
	return all
}

// elements returns bytes as elements, at an aligned address.
func elements[T collective.Element](b []byte) []T {
	v := make([]T, len(b)/int(unsafe.Sizeof(*new(T))))
	copy(bytesOf(v), b)
	return v
}

// bytesOf returns the memory of elements.
func bytesOf[T collective.Element](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), len(v)*int(unsafe.Sizeof(v[0])))
}

// same returns an error that names the first difference of two vectors, or nil.
func same(t kernel.Type, what string, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	for i := 0; i < len(want); i += t.Size() {
		if !bytes.Equal(got[i:i+t.Size()], want[i:i+t.Size()]) {
			return fmt.Errorf("%s of %v: element %d of %d is %x, want %x (bytes)", what, t, i/t.Size(), len(want)/t.Size(),
				got[i:i+t.Size()], want[i:i+t.Size()])
		}
	}
	return fmt.Errorf("%s of %v: %d bytes, want %d", what, t, len(got), len(want))
}
