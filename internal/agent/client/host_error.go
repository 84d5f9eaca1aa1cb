package client

import (
	"errors"
	"fmt"
)

// Stage is a step of the start of a job agent on a host.
type Stage string

// The stages, in the order in which they come.
const (
	stageLookup    Stage = "name lookup"
	stageConnect   Stage = "connection"
	stageHostKey   Stage = "host key"
	stageAuth      Stage = "authentication"
	stageDirectory Stage = "directory"
	stageCopy      Stage = "copy"
	stageCommand   Stage = "command"
	stageReach     Stage = "agent's port"
)

// droppedError is of a connection that was dropped before authentication, as the sshd of a bastion
// does with some of many.
type droppedError struct{ error }

// passes returns whether another try may do better soon; with await also where the host is not
// there yet.
func passes(err error, await bool) bool {
	at, ok := errors.AsType[*HostError](err)
	if !ok {
		return false
	}
	_, dropped := at.Err.(droppedError)
	return dropped || await && (at.Stage == stageConnect || at.Stage == stageLookup)
}

// HostError is the reason, in one line, why there is no agent on a host, and the step that failed.
type HostError struct {
	Host  string
	Stage Stage
	Err   error
}

// Error returns "host b: authentication failed: …".
func (e *HostError) Error() string {
	return fmt.Sprintf("host %s: %s failed: %v", e.Host, e.Stage, e.Err)
}

// Unwrap returns the cause.
func (e *HostError) Unwrap() error { return e.Err }
