//go:build !race

package shm

const (
	spins    = 100_000 // looks at a word, of about a nanosecond each, while every member has a core
	fewSpins = 500
)
