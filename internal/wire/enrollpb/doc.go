// Package enrollpb contains the messages between an agent and the authority of its cluster.
package enrollpb
