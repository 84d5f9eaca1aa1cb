//go:build netns && race

package netns

// buildFlags builds the programs under test with the race detector, like the tests.
var buildFlags = []string{"-race"}
