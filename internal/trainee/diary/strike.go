package diary

// Strike is a worker that is killed at a moment of a commit.
type Strike struct {
	PID        int    `json:"pid"`
	Rank       int    `json:"rank"`
	Generation uint64 `json:"generation"`
	Step       int    `json:"step"` // that is being committed
	Moment     Moment `json:"moment"`
}

// Moment is what a worker does that is struck.
type Moment string

// The moments of a commit.
const (
	Encoding Moment = "encoding" // values are written down
	Copying  Moment = "copying"  // tensors are copied
	Agreeing Moment = "agreeing" // the ranks meet
	Returned Moment = "returned" // Commit has, a moment ago
)
