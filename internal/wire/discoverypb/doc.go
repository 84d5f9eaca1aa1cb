// Package discoverypb has the messages between hvdrun and a discovery plugin.
package discoverypb
