package scaler

// message is one of the types of this file, as a pointer.
type message interface {
	// kind returns the content of the first frame.
	kind() string
}

// outgoing is a message that workers send.
type outgoing interface {
	message
	// encode returns all frames but the first.
	encode() [][]byte
}

// incoming is a message that workers receive.
type incoming interface {
	message
	decode(*frames) error
}

// task asks a worker to call a function.
type task struct {
	ID     []byte // 16 bytes in Scaler's programs
	Source []byte // identity of the task's client
	Flags  taskFlags
	// Function is the ID of the object that identifies the function.
	Function []byte
	Args     []argument
}

// argument is an argument of a task.
type argument struct {
	// Kind is argObject, or T in graphs of tasks, which workers never receive.
	Kind byte
	ID   []byte
}

// argObject is the kind of an argument that is an object.
const argObject = 'R'

// taskFlags are a task's metadata.
type taskFlags struct {
	// Absent means that the flags were not sent, which stands for profiling and priority 0.
	Absent    bool
	Profiling bool
	// Priority is lower for tasks that run earlier.
	Priority int32
}

// taskCancel takes a task back: on behalf of its client, or to give it to another worker.
type taskCancel struct {
	ID []byte
	// Force stops the task even if it is running.
	Force bool
	// Retrieve asks for the task's frames in the result.
	Retrieve bool
}

// taskStatus is the outcome of a task.
type taskStatus byte

// The statuses that workers send.
const (
	success  taskStatus = 'S'
	failed   taskStatus = 'F'
	canceled taskStatus = 'C'
	notFound taskStatus = 'N'
)

// taskResult is the outcome of a task. Its object was sent before, by an objectInstruction.
type taskResult struct {
	ID      []byte
	Status  taskStatus
	Profile profile
	// Results are IDs of objects: one for success and for failed.
	Results [][]byte
}

// profile describes the resources that a task has used.
type profile struct {
	// Absent means that the profile was not sent.
	Absent   bool
	Duration float32 // seconds
	Memory   uint64  // peak, in bytes
}

// objects are IDs of objects with their names and contents. Names and Contents may be shorter than
// IDs.
type objects struct {
	IDs, Names, Contents [][]byte
}

// objectInstruction stores objects at the scheduler, or makes a worker forget them.
type objectInstruction struct {
	Kind byte // createObjects or deleteObjects
	// User is the client to which the created objects belong, or the worker that must delete
	// objects.
	User []byte
	objects
}

// The kinds of an objectInstruction.
const (
	createObjects = 'C'
	deleteObjects = 'D'
)

// objectRequest asks the scheduler for objects.
type objectRequest struct{ IDs [][]byte }

// objectResponse answers an objectRequest. IDs are all requested IDs. If an object is missing,
// Names and Contents contain those that were found, but do not show which.
type objectResponse struct {
	Kind byte // contentFound, or N if there is no object
	objects
}

// contentFound is the kind of an objectResponse with objects.
const contentFound = 'C'

// heartbeat is sent by a worker to join, and to show that it is alive.
type heartbeat struct {
	// CPU is the number of processors that the worker's agent keeps busy, for example 1.5.
	CPU       float64
	RSS, Free uint64 // bytes that the agent uses, and that the machine has free
	Queued    int    // number of tasks that do not run yet
	LatencyUS uint32 // half of the round-trip time of the last heartbeat
	Locked    bool   // no task can start at present
	// Processors are the parts of the worker that run tasks.
	Processors []processor
}

// processor is a part of a worker that runs one task at a time.
type processor struct {
	PID                             uint32
	Initialized, HasTask, Suspended bool
	CPU                             float64
	RSS                             uint64
}

// heartbeatEcho answers a heartbeat.
type heartbeatEcho struct{}

// disconnect ends a client or, from the scheduler, a worker.
type disconnect struct{ Kind byte }

// shutdown is the kind of a disconnect that ends the worker, or the whole cluster of the client.
const shutdown = 'S'

// disconnectRequest asks the scheduler to remove a worker and to give its tasks to others.
type disconnectRequest struct{ Worker []byte }

// disconnectResponse answers a disconnectRequest.
type disconnectResponse struct{ Worker []byte }

func (*task) kind() string               { return "TK" }
func (*taskCancel) kind() string         { return "TC" }
func (*taskResult) kind() string         { return "TR" }
func (*objectInstruction) kind() string  { return "OI" }
func (*objectRequest) kind() string      { return "OR" }
func (*objectResponse) kind() string     { return "OA" }
func (*heartbeat) kind() string          { return "HB" }
func (*heartbeatEcho) kind() string      { return "HE" }
func (*disconnect) kind() string         { return "CS" }
func (*disconnectRequest) kind() string  { return "DR" }
func (*disconnectResponse) kind() string { return "DP" }
