// Package decide holds the decisions of a job's driver. A Machine is told what has happened (Input)
// and answers with what is to be done (Action); it has no goroutine, lock, clock, socket or
// process.
//
//   - machine.go: what each input changes
//   - reconcile.go: what follows from the facts, whatever led there
//   - hosts.go, holds.go: how old hosts are, which of them failed, and which a person keeps out
//   - hung.go, stuck.go, ramp.go, drain.go, last.go, unkillable.go: one matter each
//   - command.go, status.go: what a person asks, and is told
//   - record.go, snapshot.go, resume.go: how another driver goes on with a job
//
// The stories in testdata tell what the machine does in each situation.
package decide
