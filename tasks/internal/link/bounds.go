package link

import (
	"fmt"

	"google.golang.org/protobuf/proto"
)

// Bounds on what a peer may send, in bytes unless they count things. The sender refuses or cuts
// anything larger, and the scheduler refuses it on receipt. Put measures each part of a message;
// within these bounds every part fits into a message, and into a record of the scheduler's journal.
const (
	// MaxText bounds the error of a function.
	MaxText = 64 << 10
	// MaxWhy bounds the reason for refusing a lease, and warnings to users.
	MaxWhy = 1 << 10
	// MaxName bounds the names of functions, hosts, resources and workers, and addresses.
	MaxName = 255
	// MaxSubmit bounds a task that a client submits.
	MaxSubmit = 12 << 20
	// MaxClient bounds a message of a client. Anything beyond goes into the next message.
	MaxClient = sealAt + around
	// MaxNeeds bounds the number of arguments of a task that are results or stored values.
	MaxNeeds = 100_000
	// MaxInlined bounds a result that is sent without being stored.
	MaxInlined = 1 << 20
	// MaxResults bounds the results that are sent in the same message as the task whose arguments
	// they are. Further results are sent before that message.
	MaxResults = 10 << 20
	// MaxAmounts bounds the number of resources of a task or a worker.
	MaxAmounts = 100
	// MaxFunctions bounds the number of functions of a worker, and of groups of a client.
	MaxFunctions = 10_000
	// MaxHeld bounds the number of tasks, and the number of stored values, that a worker has when
	// it connects.
	MaxHeld = 100_000
	// MaxStatus bounds the answers to users: the status, or the explanation of tasks.
	MaxStatus = 32 << 20
)

// TooLarge returns the reason why a task cannot be submitted; "": it can. needs is the number of
// its arguments that are results or stored values, and prefer the name of its preferred host.
func TooLarge(task proto.Message, needs int, prefer string) string {
	switch size := proto.Size(task); {
	case needs > MaxNeeds:
		return fmt.Sprintf("%d of its arguments are results of tasks or stored values; at most %d may be", needs, MaxNeeds)
	case size > MaxSubmit:
		return fmt.Sprintf("the task has %d bytes; at most %d may be sent", size, MaxSubmit)
	case len(prefer) > MaxName:
		return "the name of its preferred host is too long"
	}
	return ""
}
