// Package taskspb contains the messages between the scheduler of tasks and its clients and workers.
package taskspb
