package kernel

import (
	"math/bits"
	"sync"
)

// meanBlock is the number of halves that Mean processes as float32s at once: its working set fits a
// core's first-level cache.
const meanBlock = 2048

// meanRoom holds memory for the sum and one operand.
var meanRoom = sync.Pool{New: func() any { return new([2][4 * meanBlock]byte) }}

// Mean sets dst[i] to the sum of all operands[k][i]·weights[k], in order, divided by n. It computes
// in float32 and rounds only the quotient to t, which must be [Float16] or [BFloat16], so the sum
// may exceed the range of t. There must be at least one operand; all have the length of dst, which
// may be one of them and must not overlap them otherwise. Nil weights are ones. Weights and n must
// be at least 1.
func Mean(t Type, dst []byte, operands [][]byte, weights []int, n int) {
	chosen.mean(t, dst, operands, weights, n)
}

// Fold returns the divisor of an intermediate sum that is rounded on the way to the mean of that
// many values, at least one: the least power of two that is not less than their number. The
// quotient fits the type of the values, and is rounded as the sum would be.
func Fold(values int) int { return 1 << bits.Len(uint(values-1)) }

func (c *table) mean(t Type, dst []byte, operands [][]byte, weights []int, n int) {
	for _, o := range operands {
		if len(o) != len(dst) {
			unequal()
		}
	}
	widen, add, scale := c.widen[t], c.combine[Float32][Sum], c.scale[Float32]
	room := meanRoom.Get().(*[2][4 * meanBlock]byte)
	defer meanRoom.Put(room)
	for lo, size := 0, t.Size(); lo < len(dst); lo += meanBlock * size {
		hi := min(lo+meanBlock*size, len(dst))
		sum, one := room[0][:(hi-lo)/size*4], room[1][:(hi-lo)/size*4]
		for k, o := range operands {
			into := one
			if k == 0 {
				into = sum
			}
			widen(into, o[lo:hi])
			if weights != nil && weights[k] != 1 {
				scale(into, float64(weights[k]))
			}
			if k > 0 {
				add(sum, sum, one)
			}
		}
		if n != 1 {
			c.divide[Float32](sum, n)
		}
		c.narrow[t](dst[lo:hi], sum)
	}
}
