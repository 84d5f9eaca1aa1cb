//go:build race

package e2e

// buildFlags: what is tested under the race detector runs under it too.
var buildFlags = []string{"-race"}
