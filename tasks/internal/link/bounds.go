package link

// The bounds of what a peer may send, in bytes unless it is a number of things. The sender refuses
// or cuts what is larger, and so does the scheduler with what it receives. Each part of a message
// is measured by Put; with these bounds all fit, and so do the records of the scheduler's journal.
const (
	// MaxText bounds the error of a function.
	MaxText = 64 << 10
	// MaxWhy bounds why a lease is refused, and what a user is warned of.
	MaxWhy = 1 << 10
	// MaxName bounds the names of functions, hosts, resources and workers, and addresses.
	MaxName = 255
	// MaxSubmit bounds a task as its client submits it.
	MaxSubmit = 12 << 20
	// MaxClient bounds a message of a client: others go into the next.
	MaxClient = sealAt + around
	// MaxNeeds bounds the number of the arguments of a task that are results or stored values.
	MaxNeeds = 100_000
	// MaxInlined bounds a result that is not stored.
	MaxInlined = 1 << 20
	// MaxResults bounds the results that are sent in the message of the task whose arguments they
	// are; others are sent before it.
	MaxResults = 10 << 20
	// MaxAmounts bounds the number of the resources of a task or a worker.
	MaxAmounts = 100
	// MaxFunctions bounds the number of the functions of a worker, and of the groups of a client.
	MaxFunctions = 10_000
	// MaxHeld bounds the number of tasks, and that of stored values, that a worker has when it
	// connects.
	MaxHeld = 100_000
	// MaxStatus bounds what a person is told: the status, or the explanation of tasks.
	MaxStatus = 32 << 20
)
