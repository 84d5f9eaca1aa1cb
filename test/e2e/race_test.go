//go:build race

package e2e

// buildFlags: programs under test use the race detector if the tests do.
var buildFlags = []string{"-race"}
