package client

import (
	"errors"
	"fmt"
)

// Stage is a step of the start of a job agent on a host.
type Stage string

// The stages, in the order in which they come.
const (
	stageLookup  Stage = "name lookup"
	stageConnect Stage = "connection"
	stageHostKey Stage = "host key"
	stageAuth    Stage = "authentication"
	stageCopy    Stage = "copy"
	stageCommand Stage = "command"
	stageReach   Stage = "agent's port"
)

// droppedError wraps the error of a connection that was dropped before authentication. The sshd of
// a bastion drops some connections when many arrive.
type droppedError struct{ error }

// passes returns whether a retry may succeed soon. With await, this includes a host that does not
// resolve or accept connections yet.
func passes(err error, await bool) bool {
	at, ok := errors.AsType[*HostError](err)
	if !ok {
		return false
	}
	_, dropped := at.Err.(droppedError)
	return dropped || await && (at.Stage == stageConnect || at.Stage == stageLookup)
}

// HostError says, in one line, why there is no agent on a host, and names the step that failed.
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
