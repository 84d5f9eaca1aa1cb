// Package discoverypb contains the messages between hvdrun and a discovery plugin.
package discoverypb
