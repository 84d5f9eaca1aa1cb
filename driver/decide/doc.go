// Package decide holds the decisions of a job's driver as a state machine. A Machine takes each
// event as an Input and returns the Actions to perform. It has no goroutine, lock, clock, socket or
// process.
//
//   - machine.go: the facts
//   - step.go: one step, from an input to what is missing: workers, worlds, notifications
//   - worker.go: what workers report, how they end, and whose failure that is
//   - loss.go: worlds that cannot continue; finish.go: the end of the job
//   - wait.go: every deadline of the machine
//   - internal/hosts: age, exclusions and holds of hosts and slots
//   - internal/ledger, goodput.go: how the job's time is spent
//   - hung.go, ramp.go, drain.go, last_checkpoint.go: one concern each
//   - command.go, status.go: commands and status for operators
//   - record.go, snapshot.go, resume.go: how another driver takes over a job
//
// The scenarios in testdata show the machine's actions in each situation.
package decide
