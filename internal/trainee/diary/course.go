// Package diary is what the test program trainee writes down of its training, and what must stand
// there.
//
// Its training is such that every step that is lost, repeated or put together from two shows: the
// state after a step is a function of the number of steps alone, of any other history it is
// another, and all arithmetic is exact, whatever the number of workers.
package diary

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
)

// modulus keeps weights small enough to be exact as float32.
const modulus = 4093

// Size is how many weights there are unless a job asks for others: so many that they do not come
// with the first message of a sync, but after it.
const Size = 5000

// Share fills data with what a rank adds to a step. Over all ranks of a world, the shares of a step
// sum to that step's Total, whatever the size.
func Share(data []float32, step, rank, size int) {
	for i := range data {
		if rank > 0 {
			data[i] = float32(noise(step, rank, i))
			continue
		}
		rest := total(step, i)
		for r := 1; r < size; r++ {
			rest -= noise(step, r, i)
		}
		data[i] = float32(rest)
	}
}

// IsTotal tells whether data is the sum of all shares of the step.
func IsTotal(data []float32, step int) bool {
	for i, x := range data {
		if x != float32(total(step, i)) {
			return false
		}
	}
	return true
}

// Begin does the half of a step that needs no peers. A worker that is stopped here has weights that
// belong to no step.
func Begin(weights []float32) {
	for i, w := range weights {
		weights[i] = float32(3 * int(w) % modulus)
	}
}

// Complete does the other half, where sum is that of all shares. The order of steps matters.
func Complete(weights, sum []float32) {
	for i, w := range weights {
		weights[i] = float32((int(w) + int(sum[i])) % modulus)
	}
}

// Chain continues the chain that all steps up to this one make; it starts from 0.
func Chain(before uint64, step int) uint64 { return mix(before ^ mix(uint64(step))) }

// Weights are the weights after so many steps.
func Weights(steps, n int) []float32 {
	weights, sum := make([]float32, n), make([]float32, n)
	for s := 1; s <= steps; s++ {
		Share(sum, s, 0, 1)
		Begin(weights)
		Complete(weights, sum)
	}
	return weights
}

// Digest is a short fingerprint of weights, of all their bits.
func Digest(weights []float32) string {
	h := sha256.New()
	var b [4]byte
	for _, w := range weights {
		binary.LittleEndian.PutUint32(b[:], math.Float32bits(w))
		h.Write(b[:])
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

func total(step, i int) int { return noise(step, -1, i) }

// noise is a small number that has nothing to do with its neighbours'.
func noise(step, rank, i int) int {
	return int(mix(uint64(step)<<40^uint64(rank+1)<<24^uint64(i)) & 63)
}

// mix is the finaliser of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
