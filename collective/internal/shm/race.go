//go:build race

package shm

// Under the race detector a poll takes a hundred times as long.
const (
	spins    = 1_000
	fewSpins = 50
)
