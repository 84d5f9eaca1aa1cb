// Package driver runs a job: it follows the source of hosts, starts and stops workers, publishes
// worlds, and tells workers when the hosts have changed.
//
// What is to be done is decided by package decide, which is pure. One loop (loop.go) feeds it with
// what happens, writes that down in the job's journal (book.go), and carries out what it answers.
package driver
