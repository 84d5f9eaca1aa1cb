// Package e2e runs whole jobs: the real hvdrun, a real discovery script whose output depends on how
// far training has come, and workers (internal/trainee) that die by schedule. Its tests look at
// every line that a job has written; the programs chaos and recovery use it to run theirs.
package e2e
