//go:build race

package collectivetest

// Raced reports whether the race detector is on, under which everything takes several times as
// long.
const Raced = true
