package steplog

// Strike is a kill of a worker during a commit.
type Strike struct {
	PID        int    `json:"pid"`
	Rank       int    `json:"rank"`
	Generation uint64 `json:"generation"`
	Step       int    `json:"step"` // the step being committed
	Moment     Moment `json:"moment"`
}

// Moment is the worker's activity when it is killed.
type Moment string

// The moments of a commit.
const (
	Encoding Moment = "encoding" // values are encoded
	Copying  Moment = "copying"  // tensors are copied
	Agreeing Moment = "agreeing" // the ranks agree
	Returned Moment = "returned" // Commit has just returned
)
