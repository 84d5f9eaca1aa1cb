package client

import "fmt"

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
