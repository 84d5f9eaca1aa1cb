package kernel

import (
	"math/bits"
	"sync"
)

// meanBlock is the number of halves that Mean has as float32s at once: all that it works on stays
// in a core's first-level cache.
const meanBlock = 2048

// meanRoom holds memory for the sum and for one operand.
var meanRoom = sync.Pool{New: func() any { return new([2][4 * meanBlock]byte) }}

// Mean sets dst[i] to the sum of all operands[k][i]·weights[k], in their order, divided by n. It
// computes in float32 and rounds the quotient alone to t, which is [Float16] or [BFloat16]: sums
// that t cannot hold do no harm. There is at least one operand; all have the length of dst, which
// may be one of them and must not overlap with them otherwise. Nil weights are ones. Weights and n
// are at least 1.
func Mean(t Type, dst []byte, operands [][]byte, weights []int, n int) {
	chosen.mean(t, dst, operands, weights, n)
}

// Fold is what a sum of so many values, at least one, is divided by that is rounded on the way to
// their mean: the least power of two that is not less than their number. The quotient fits their
// type, and is rounded as the sum would be.
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
