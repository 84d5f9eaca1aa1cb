// Package job defines the values that describe a job: its limits (Size, Blame, Timeouts), its
// events (Event), what leads from one world to the next (Reasons), its status (Status), operators'
// commands (Command), and the outcomes of a job and of its workers (Exit, WorkerError, the errors).
// It starts nothing and waits for nothing.
package job
