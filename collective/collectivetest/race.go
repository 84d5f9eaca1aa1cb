//go:build race

package collectivetest

const raced = true // under the race detector
