// Package controlpb contains the messages between a user's program and the driver of a job.
package controlpb
