// Package e2e has tests of whole jobs: the real hvdrun with workers that die by schedule, of which
// each line that they write is checked. It also runs an ssh server for them.
package e2e
