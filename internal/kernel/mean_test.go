package kernel

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestMean: the sum is computed in float32 in the order of the operands and rounded once: in every
// implementation, for lengths around those of blocks, and in place.
func TestMean(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	for _, typ := range []Type{Float16, BFloat16} {
		for _, c := range []struct {
			length  int
			weights []int
			by      int
		}{
			{1, nil, 2}, {37, nil, 3}, {meanBlock, []int{1, 4, 2}, 7}, {meanBlock + 1, []int{2, 2}, 4},
			{2*meanBlock + 5, nil, 1}, {3, []int{8}, 5}, {0, nil, 2},
		} {
			operands := make([][]uint16, max(len(c.weights), 2+r.IntN(4)))
			if c.weights != nil {
				operands = operands[:len(c.weights)]
			}
			for k := range operands {
				for range c.length {
					operands[k] = append(operands[k], uint16(r.Uint32()))
				}
			}
			var want []uint16
			for i := range c.length {
				var sum float32
				for k, o := range operands {
					v := float32Of(typ, o[i])
					if c.weights != nil && c.weights[k] != 1 {
						v = multiply(v, float32(c.weights[k]))
					}
					if k == 0 {
						sum = v
					} else {
						sum = add(sum, v)
					}
				}
				if c.by != 1 {
					sum /= float32(c.by)
				}
				want = append(want, halfOf(typ, sum))
			}
			for name, table := range implementations() {
				for k := -1; k < len(operands); k++ { // dst is one of them, or a separate vector
					all := make([][]byte, len(operands))
					for i := range operands {
						all[i] = slices.Clone(bytesOf(operands[i]))
					}
					dst := make([]byte, 2*c.length)
					if k >= 0 {
						dst = all[k]
					}
					table.mean(typ, dst, all, c.weights, c.by)
					if !bytes.Equal(dst, bytesOf(want)) {
						t.Errorf("%s: %v, %+v into %d: other bits", name, typ, c, k)
					}
				}
			}
		}
	}
}

func float32Of(t Type, h uint16) float32 {
	if t == Float16 {
		return FromFloat16(h)
	}
	return FromBFloat16(h)
}

func halfOf(t Type, f float32) uint16 {
	if t == Float16 {
		return ToFloat16(f)
	}
	return ToBFloat16(f)
}

// TestMeanIsBounded: neither large nor small numbers are lost in intermediate results.
func TestMeanIsBounded(t *testing.T) {
	for _, v := range []float32{65504, -40000, 1.0 / (1 << 24), math.Float32frombits(0x38800000)} {
		one := bytesOf([]uint16{ToFloat16(v)})
		got := make([]byte, 2)
		Mean(Float16, got, slices.Repeat([][]byte{one}, 97), nil, 97)
		if !slices.Equal(got, one) {
			t.Errorf("the mean of 97 times %v is %v", v, got)
		}
	}
	if got := testing.AllocsPerRun(100, func() { meanOfTwo() }); got > 0.5 {
		t.Errorf("%v allocations", got)
	}
}

var two, into = [][]byte{make([]byte, 9000), make([]byte, 9000)}, make([]byte, 9000)

func meanOfTwo() { Mean(Float16, into, two, nil, 2) }

// BenchmarkMean reports the bytes of dst per second.
func BenchmarkMean(b *testing.B) {
	for _, operands := range []int{2, 4} {
		for _, size := range []int{16 << 10, 1 << 20} {
			for _, typ := range []Type{Float16, BFloat16} {
				dst, all := make([]byte, size), make([][]byte, operands)
				for i := range all {
					all[i] = make([]byte, size)
				}
				b.Run(fmt.Sprintf("%v/%d/%d", typ, operands, size), func(b *testing.B) {
					b.SetBytes(int64(size))
					for b.Loop() {
						Mean(typ, dst, all, nil, operands)
					}
				})
			}
		}
	}
}
