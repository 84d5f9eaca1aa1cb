//go:build netns && race

package netns

// buildFlags: programs under test use the race detector if the tests do.
var buildFlags = []string{"-race"}
