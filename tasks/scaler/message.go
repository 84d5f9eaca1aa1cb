package scaler

// Message is one of the types of this file, as a pointer.
type Message interface {
	// kind is the first frame.
	kind() string
	// encode returns the frames after it.
	encode() [][]byte
	decode(*frames) error
}

// Task asks a worker to call a function.
type Task struct {
	ID     []byte // 16 bytes in Scaler's programs
	Source []byte // identity of the client whose task it is
	Flags  TaskFlags
	// Function is the id of the object that says which function.
	Function []byte
	Args     []Arg
}

// Arg is an argument of a task.
type Arg struct {
	// Kind is ArgObject; ArgTask occurs only in graphs of tasks, which workers never see.
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
	// Absent flags have not been sent, which means profiling and priority 0.
	Absent    bool
	Profiling bool
	// Priority is lower for tasks that run earlier.
	Priority int32
}

// TaskCancel takes a task back: of a client, or to give it to another worker.
type TaskCancel struct {
	ID []byte
	// Force stops the task if it runs.
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

// TaskResult is the outcome of a task. Its object was sent earlier, by an ObjectInstruction.
type TaskResult struct {
	ID      []byte
	Status  Status
	Profile Profile
	// Results are ids of objects: one for Success and Failed.
	Results [][]byte
}

// Profile is the resources that a task has used.
type Profile struct {
	// Absent profiles have not been sent.
	Absent   bool
	Duration float32 // seconds
	Memory   uint64  // bytes at the peak
}

// Objects are ids of objects with their names and contents; Names and Contents may be shorter.
type Objects struct {
	IDs, Names, Contents [][]byte
}

// ObjectInstruction stores objects at the scheduler, or makes a worker forget them.
type ObjectInstruction struct {
	Kind byte // Create or Delete
	// User is the client whose objects are created, or the worker that must forget them.
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

// ObjectResponse answers an ObjectRequest. IDs are all requested ids; if one is missing, Names and
// Contents have those that were found, but do not show which.
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
	// CPU is the number of processors that the worker's agent uses: 1.5 is one and a half.
	CPU       float64
	RSS, Free uint64 // bytes that the agent has, and that the machine has left
	Queued    int    // tasks that do not run yet
	LatencyUS uint32 // half of the time to the last echo
	Locked    bool   // no task can start now
	// Processors run tasks.
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
	Shutdown = 'S' // the worker, or all of the client's cluster
	Leave    = 'D' // the client
)

// DisconnectRequest removes a worker from the scheduler, which gives its tasks to others.
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
