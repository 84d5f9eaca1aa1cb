package scaler

// Message is one of the types of this file, as a pointer.
type Message interface {
	// kind returns the content of the first frame.
	kind() string
	// encode returns the other frames.
	encode() [][]byte
	decode(*frames) error
}

// Task asks a worker to call a function.
type Task struct {
	ID     []byte // 16 bytes in Scaler's programs
	Source []byte // identity of the task's client
	Flags  TaskFlags
	// Function is the ID of the object that identifies the function.
	Function []byte
	Args     []Arg
}

// Arg is an argument of a task.
type Arg struct {
	// Kind is ArgObject. ArgTask occurs only in graphs of tasks, which workers never receive.
	Kind byte
	ID   []byte
}

// The kinds of arguments.
const (
	ArgObject = 'R'
	ArgTask   = 'T'
)

// TaskFlags are a task's metadata.
type TaskFlags struct {
	// Absent means that the flags were not sent, which stands for profiling and priority 0.
	Absent    bool
	Profiling bool
	// Priority is lower for tasks that run earlier.
	Priority int32
}

// TaskCancel takes a task back: on behalf of its client, or to give it to another worker.
type TaskCancel struct {
	ID []byte
	// Force stops the task even if it is running.
	Force bool
	// Retrieve asks for the task's frames in the result.
	Retrieve bool
}

// Status is the outcome of a task.
type Status byte

// The statuses that workers send.
const (
	Success    Status = 'S'
	Failed     Status = 'F'
	Canceled   Status = 'C'
	NotFound   Status = 'N'
	WorkerDied Status = 'K'
	NoWorker   Status = 'W'
)

// TaskResult is the outcome of a task. Its object was sent before, by an ObjectInstruction.
type TaskResult struct {
	ID      []byte
	Status  Status
	Profile Profile
	// Results are IDs of objects: one for Success and for Failed.
	Results [][]byte
}

// Profile describes the resources that a task has used.
type Profile struct {
	// Absent means that the profile was not sent.
	Absent   bool
	Duration float32 // seconds
	Memory   uint64  // peak, in bytes
}

// Objects are IDs of objects with their names and contents. Names and Contents may be shorter than
// IDs.
type Objects struct {
	IDs, Names, Contents [][]byte
}

// ObjectInstruction stores objects at the scheduler, or makes a worker forget them.
type ObjectInstruction struct {
	Kind byte // Create or Delete
	// User is the client to which the created objects belong, or the worker that must delete
	// objects.
	User []byte
	Objects
}

// The kinds of an ObjectInstruction.
const (
	Create = 'C'
	Delete = 'D'
)

// ObjectRequest asks the scheduler for objects.
type ObjectRequest struct{ IDs [][]byte }

// ObjectResponse answers an ObjectRequest. IDs are all requested IDs. If an object is missing,
// Names and Contents contain those that were found, but do not show which.
type ObjectResponse struct {
	Kind byte // Content or NoObject
	Objects
}

// The kinds of an ObjectResponse.
const (
	Content  = 'C'
	NoObject = 'N'
)

// Heartbeat is sent by a worker to join, and to show that it is alive.
type Heartbeat struct {
	// CPU is the number of processors that the worker's agent keeps busy, for example 1.5.
	CPU       float64
	RSS, Free uint64 // bytes that the agent uses, and that the machine has free
	Queued    int    // number of tasks that do not run yet
	LatencyUS uint32 // half of the round-trip time of the last heartbeat
	Locked    bool   // no task can start at present
	// Processors are the parts of the worker that run tasks.
	Processors []Processor
}

// Processor is a part of a worker that runs one task at a time.
type Processor struct {
	PID                             uint32
	Initialized, HasTask, Suspended bool
	CPU                             float64
	RSS                             uint64
}

// HeartbeatEcho answers a Heartbeat.
type HeartbeatEcho struct{}

// ClientHeartbeat is sent by a client to join.
type ClientHeartbeat struct {
	CPU       float64
	RSS       uint64
	LatencyUS uint32
}

// ClientHeartbeatEcho answers a ClientHeartbeat.
type ClientHeartbeatEcho struct{}

// Disconnect ends a client or, from the scheduler, a worker.
type Disconnect struct{ Kind byte }

// The kinds of a Disconnect.
const (
	Shutdown = 'S' // ends the worker, or the whole cluster of the client
	Leave    = 'D' // ends only the client
)

// DisconnectRequest asks the scheduler to remove a worker and to give its tasks to others.
type DisconnectRequest struct{ Worker []byte }

// DisconnectResponse answers a DisconnectRequest.
type DisconnectResponse struct{ Worker []byte }

func (*Task) kind() string                { return "TK" }
func (*TaskCancel) kind() string          { return "TC" }
func (*TaskResult) kind() string          { return "TR" }
func (*ObjectInstruction) kind() string   { return "OI" }
func (*ObjectRequest) kind() string       { return "OR" }
func (*ObjectResponse) kind() string      { return "OA" }
func (*Heartbeat) kind() string           { return "HB" }
func (*HeartbeatEcho) kind() string       { return "HE" }
func (*ClientHeartbeat) kind() string     { return "CB" }
func (*ClientHeartbeatEcho) kind() string { return "CE" }
func (*Disconnect) kind() string          { return "CS" }
func (*DisconnectRequest) kind() string   { return "DR" }
func (*DisconnectResponse) kind() string  { return "DP" }
