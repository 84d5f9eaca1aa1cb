//go:build !race

package collectivetest

const raced = false // under the race detector
