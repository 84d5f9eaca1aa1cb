// Package job holds the values that describe a job: the limits within which it runs (Size, Blame,
// Timeouts), what happens to it (Event), how it is doing (Status), what a person asks of it
// (Command), and how it and its workers end (Exit, WorkerError, the errors). It does nothing.
package job
