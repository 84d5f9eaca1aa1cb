package line

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
)

var (
	// ErrRemoved dismisses a worker that has no place in the new world.
	ErrRemoved = errors.New("line: this worker has no place in the new world")
	// ErrLast is ErrRemoved for the worker that must write the job's last commit to disk, because
	// no world follows.
	ErrLast = fmt.Errorf("%w, and writes the job's last checkpoint", ErrRemoved)
	// ErrFinished dismisses a worker because training is done.
	ErrFinished = errors.New("line: the job is done")
)

// Joining is a worker's request for a world. It may have at most 64 data addresses, and each
// address at most 256 bytes.
type Joining struct {
	// After is the generation that the worker has left; 0 if it was in none.
	After uint64 `json:"after,omitempty"`
	// Commits is the number of the worker's last commit.
	Commits uint64 `json:"commits,omitempty"`
	// HoldsState: the worker has completed a sync and therefore holds the job's state.
	HoldsState bool `json:"holds_state,omitempty"`
	// DataAddrs are the addresses (host:port) of its data listener, in order of preference.
	DataAddrs []string `json:"addresses,omitempty"`
	// Cause is the reason why it left its last generation, for logs. Client.Join truncates it to 4
	// KiB.
	Cause string `json:"cause,omitempty"`
	// Trained is whether its training function has returned in its last generation; nil: unknown.
	Trained *bool `json:"trained,omitempty"`
	// Lost are the ranks of its last generation that it could not reach; they may be alive. The
	// first 64 count.
	Lost []int `json:"lost,omitempty"`
	// Undone is the training time in that generation that an abort has undone: the time since the
	// last commit, to which the worker has returned.
	Undone time.Duration `json:"undone,omitempty"`
	// Handle is text that other members need to reach its program, at most 64 KiB. The driver
	// passes it on without interpreting it.
	Handle string `json:"handle,omitempty"`
	// Program is the name that the program gives itself, at most 64 bytes. Empty for programs of
	// package elastic.
	Program string `json:"program,omitempty"`
	// CanWiden: its data listener can also listen on addresses that other machines reach.
	CanWiden bool `json:"can_widen,omitempty"`
	// Has is the number of the members that the worker has from an earlier world; 0: none.
	Has uint64 `json:"has,omitempty"`
}

// Place is the answer to a join: a member's rank in a new world.
type Place struct {
	Generation uint64
	// Rank is the member's rank; Size is the number of ranks.
	Rank, Size int
	// SyncRoot is the rank whose state all ranks have after the sync.
	SyncRoot int
	// Seq is the number of the last notification that the world takes into account.
	Seq uint64
	// Store is the number of the driver's store for programs in other languages; each driver's
	// differs.
	Store uint64

	key     identity.DataKey
	members *members
}

// World is a world as seen by one of its members.
type World struct {
	plan.World
	// Rank is the member's rank.
	Rank int
	// SyncRoot is the rank whose state all ranks have after the sync.
	SyncRoot int
	// Seq is the number of the last notification that the world takes into account.
	Seq uint64
	// Key is the key of data connections among the members. In a World from Look it is the key of
	// visits to them.
	Key identity.DataKey
	// Store is the number of the driver's store for programs in other languages; each driver's
	// differs.
	Store uint64

	columns *Members // nil: no addresses are known
}

// Member is a member of a published world.
type Member struct {
	Incarnation string
	DataAddrs   []string
	// Handle is the Handle of its join.
	Handle []byte
}

// Report is a worker's report to the driver.
type Report uint8

// The reports of a worker. These numbers are in the driver's journal.
const (
	// Done: its training function has returned, as those of all other ranks of its world have.
	Done Report = iota + 1
	// Leaving: it is about to exit by itself before training is done.
	Leaving
	// Committed: it has made its first commit in the generation.
	Committed
	// Draining: it was asked to leave and waits for its dismissal at a step boundary.
	Draining
	// Fetching: it fetches the state from other workers before it joins.
	Fetching
)

// The reports about a job's last checkpoint.
const (
	// Writing: it has left its world and writes the commit named in the report as a last
	// checkpoint.
	Writing Report = iota + 10
	// Written: that checkpoint is on disk.
	Written
	// NotWritten: that checkpoint could not be written.
	NotWritten
)

// String returns "done", "leaving", "committed", "draining", "fetching", "writing", "written" or
// "not written".
func (r Report) String() string {
	if word, is := reportWords[r]; is {
		return strings.ReplaceAll(word, "_", " ")
	}
	return fmt.Sprintf("report %d", uint8(r))
}

// reportWords are the words for reports in lines.
var reportWords = map[Report]string{
	Done: "done", Leaving: "leaving", Committed: "committed", Draining: "draining", Fetching: "fetching",
	Writing: "writing", Written: "written", NotWritten: "not_written",
}

// Report returns which report it is; 0: the report of a backend or a failure.
func (r *ReportLine) Report() Report {
	for report, word := range reportWords {
		if word == r.What {
			return report
		}
	}
	return 0
}

const (
	maxAddrs = 64
	maxAddr  = 256
	maxCause = 4 << 10
	maxLost  = 64

	// MaxHandle bounds a handle, in bytes.
	MaxHandle  = 64 << 10
	maxProgram = 64

	maxBackend = 32

	// MaxError bounds the text of a worker's error, in bytes.
	MaxError = 1 << 10
)

// CleanError returns the text of an error as one line of UTF-8 without control characters, within
// MaxError.
func CleanError(text string) string {
	text = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(text, "\uFFFD"), unicode.IsControl), " ")
	if len(text) > MaxError {
		text = clip(text, MaxError-len("…")) + "…"
	}
	return text
}

// checkError returns an error for a text that CleanError would change.
func checkError(text string) error {
	if text == "" || !utf8.ValidString(text) || CleanError(text) != text {
		return fmt.Errorf("the text of an error has %d bytes; 1 to %d in one line are allowed", len(text), MaxError)
	}
	return nil
}

// Check returns an error if a request is not valid, and truncates Lost.
func (j *Joining) Check() error {
	if n := len(j.DataAddrs); n > maxAddrs {
		return fmt.Errorf("the worker has %d addresses; at most %d are allowed", n, maxAddrs)
	}
	for _, a := range j.DataAddrs {
		if len(a) > maxAddr {
			return fmt.Errorf("an address has %d bytes; at most %d are allowed", len(a), maxAddr)
		}
	}
	if n := len(j.Cause); n > maxCause {
		return fmt.Errorf("the cause has %d bytes; at most %d are allowed", n, maxCause)
	}
	for _, rank := range j.Lost {
		if rank < 0 || rank > math.MaxInt32 {
			return fmt.Errorf("the lost rank %d does not exist", rank)
		}
	}
	j.Lost = j.Lost[:min(len(j.Lost), maxLost)]
	if n := len(j.Handle); n > MaxHandle {
		return fmt.Errorf("the handle has %d bytes; at most %d are allowed", n, MaxHandle)
	}
	if p := j.Program; len(p) > maxProgram || strings.ContainsFunc(p, unicode.IsControl) {
		return fmt.Errorf("the program's name %q is invalid: it may have at most %d bytes and no control characters", clip(p, 2*maxProgram), maxProgram)
	}
	if j.Undone < 0 {
		return errOutOfRange
	}
	return nil
}

// clip returns text as valid UTF-8. It truncates a text of more than most bytes between two
// characters.
func clip(text string, most int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return text
}
