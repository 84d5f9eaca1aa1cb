// Package bridge has workers of Scaler run tasks of a pool of package tasks, and has a pool be
// workers in a cluster of Scaler.
package bridge
