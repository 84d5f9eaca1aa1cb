//go:build race

package shm

// The race detector takes a hundred times as long for a look.
const (
	spins    = 1_000
	fewSpins = 50
)
