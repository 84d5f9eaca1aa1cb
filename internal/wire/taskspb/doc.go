// Package taskspb has the messages between the scheduler of tasks and its clients and workers.
package taskspb
