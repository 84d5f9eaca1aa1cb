// Package job defines the values that describe a job: its limits (Size, Blame, Timeouts), its
// events (Event), its status (Status), operators' commands (Command), and the outcomes of a job and
// of its workers (Exit, WorkerError, the errors). It has no behaviour of its own.
package job
