// Package driver runs a job. Run, or Resume for a job whose driver has died, follows the source of
// hosts, starts and stops workers, publishes worlds, and notifies workers when the hosts have
// changed.
//
// Package decide makes the decisions, without I/O. One loop (loop.go) passes every event to it,
// records the event in the job's journal (journal.go), and performs the returned actions.
package driver
