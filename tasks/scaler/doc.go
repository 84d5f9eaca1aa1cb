// Package scaler implements the protocol of the workers of Scaler 1.7.14, a task scheduler in
// Python over ZeroMQ: messages as frames, and Work, a worker that runs functions in Go. Later
// versions of Scaler use other protocols.
package scaler
