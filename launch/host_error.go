package launch

import "fmt"

// Stage is a part of the way to a job agent on a host.
type Stage string

// The stages, in the order in which they come.
const (
	StageLookup    Stage = "name lookup"
	StageConnect   Stage = "connection"
	StageHostKey   Stage = "host key"
	StageAuth      Stage = "authentication"
	StageDirectory Stage = "directory"
	StageCopy      Stage = "copy"
	StageCommand   Stage = "command"
	StageReach     Stage = "agent's port"
)

// HostError says in one line why there is no agent on a host, and how far its start came.
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
