// Package agentpb contains the messages between a driver and the agent of a host.
package agentpb
