// Package e2e tests whole jobs: it runs the real hvdrun with workers that die on a schedule, and
// checks each line that they write. It also runs an ssh server for them.
package e2e
