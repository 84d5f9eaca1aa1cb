//go:build race

package collectivetest

// Raced tells whether the race detector is on, under which everything takes several times as long.
const Raced = true
