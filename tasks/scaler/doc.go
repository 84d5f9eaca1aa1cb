// Package scaler speaks the protocol of the workers of Scaler 1.7.14, a task scheduler in Python
// over ZeroMQ.
package scaler
