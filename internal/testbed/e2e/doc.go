// Package e2e runs whole jobs: the real hvdrun, a discovery script whose output depends on training
// progress, and workers (internal/testbed/trainer) that die by schedule. Its tests check every line
// that a job writes; the programs chaos and recovery run their jobs with it.
package e2e
