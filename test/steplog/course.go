// Package steplog defines what the test program trainer records about its training, and checks it.
//
// Its training reveals every step that is lost, repeated or mixed from two: the state after a step
// depends on the number of steps only, any other history leads to a different state, and all
// arithmetic is exact for any number of workers.
package steplog

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
)

// modulus keeps weights small enough to be exact as float32.
const modulus = 4093

// Size is the default number of weights: enough that a sync needs more than its first message.
const Size = 5000

// Share fills data with a rank's contribution to a step. The shares of all ranks of a world sum to
// the step's Total, whatever the size.
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

// IsTotal reports whether data is the sum of all shares of the step.
func IsTotal(data []float32, step int) bool {
	for i, x := range data {
		if x != float32(total(step, i)) {
			return false
		}
	}
	return true
}

// Begin performs the half of a step that needs no peers. If a worker stops here, its weights belong
// to no step.
func Begin(weights []float32) {
	for i, w := range weights {
		weights[i] = float32(3 * int(w) % modulus)
	}
}

// Complete performs the other half, with the sum of all shares. The result depends on the order of
// steps.
func Complete(weights, sum []float32) {
	for i, w := range weights {
		weights[i] = float32((int(w) + int(sum[i])) % modulus)
	}
}

// Chain extends the chain value of all steps so far, which starts from 0, by a step.
func Chain(before uint64, step int) uint64 { return mix(before ^ mix(uint64(step))) }

// Weights returns the n weights after this number of steps.
func Weights(steps, n int) []float32 {
	weights, sum := make([]float32, n), make([]float32, n)
	for s := 1; s <= steps; s++ {
		Share(sum, s, 0, 1)
		Begin(weights)
		Complete(weights, sum)
	}
	return weights
}

// Digest returns a short hash of all bits of the weights.
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

// noise returns a small pseudo-random number.
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
