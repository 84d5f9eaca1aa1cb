//go:build race

package e2e

// buildFlags builds the programs under test with the race detector, like the tests.
var buildFlags = []string{"-race"}
