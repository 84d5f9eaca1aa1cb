// Package control carries commands of the user's programs to a job's driver, and its status to
// them, over a unix socket in the job's directory that only the job's user may open.
package control

import (
	"context"

	"github.com/hvdrun/hvdrun/job"
)

// SocketName is the name of the socket in a job's folder.
const SocketName = "control"

// Handler is implemented by the driver. Its methods are called concurrently and return soon after
// ctx has ended.
type Handler interface {
	// Status returns the JSON of a job.Status. A *job.RefusedError means that the job has ended.
	Status(ctx context.Context) ([]byte, error)
	// Command carries out a command that has passed Check and returns a description of what was
	// done. A refusal is a *job.RefusedError.
	Command(ctx context.Context, c job.Command) (done string, err error)
	// Stacks returns the JSON of a slice of Stacks: of the given ranks, or of all workers if ranks
	// is empty. If all is set, it includes all goroutines. A refusal is a *job.RefusedError.
	Stacks(ctx context.Context, ranks []int, all bool) ([]byte, error)
}
