// Package rendezvous forms the worlds of a job: the driver's server, which holds the current world
// and the joins that wait for the next, and the worker's client.
//
// It is level-triggered: a join names the generation that its worker has left, and is answered with
// the current world if that is newer and includes the worker. A worker whose answer was lost
// repeats the join. The server identifies workers by their certificates only.
package rendezvous

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/plan"
)

var (
	// ErrRemoved dismisses a worker that has no place in the new world.
	ErrRemoved = errors.New("rendezvous: this worker has no place in the new world")
	// ErrLast is ErrRemoved for the worker that has to write the job's last commit to disk, because
	// no world follows.
	ErrLast = fmt.Errorf("%w, and writes the job's last checkpoint", ErrRemoved)
	// ErrFinished dismisses a worker because training is done.
	ErrFinished = errors.New("rendezvous: the job is done")
	// ErrSuperseded is returned by a Join that a later Join of the same Client has replaced.
	ErrSuperseded = errors.New("rendezvous: another join of this worker has replaced this one")
)

// UnreachableError is returned by the methods of Client if the driver was unreachable for
// ClientConfig.Patience.
type UnreachableError struct {
	Addr string
	For  time.Duration
	// Err is the error of the last attempt.
	Err error
}

// Error includes the driver's address and the last error.
func (e *UnreachableError) Error() string {
	return fmt.Sprintf("rendezvous: the driver at %s could not be reached for %v: %v",
		e.Addr, e.For.Round(time.Millisecond), e.Err)
}

// Unwrap returns the error of the last attempt.
func (e *UnreachableError) Unwrap() error { return e.Err }

// Joining is a worker's request for a world. It may have at most 64 data addresses, and each
// address at most 256 bytes.
type Joining struct {
	// After is the generation that the worker has left; 0 if it was in none.
	After uint64
	// Commits is the number of the worker's last commit.
	Commits uint64
	// HoldsState: the worker has completed a sync and so has the job's state.
	HoldsState bool
	// DataAddrs are the addresses (host:port) of its data listener, in order of preference.
	DataAddrs []string
	// NotifyAddr is the address (host:port) of its notification service.
	NotifyAddr string
	// Cause is why it left its last generation, for logs. Client.Join truncates it to 4 KiB.
	Cause string
	// Trained is whether its training function has returned in its last generation; nil: unknown.
	Trained *bool
	// Lost are the ranks of its last generation with which it could not go on, as far as it knows:
	// they may live. Client.Join sends the first 64.
	Lost []int
	// Undone is the time of training in that generation that an abort has undone: since the last
	// commit, to which the worker has gone back.
	Undone time.Duration
	// Handle is what other members need to reach its program, at most 64 KiB, which the driver
	// passes on unread.
	Handle []byte
	// Program is what the program of a worker that speaks by its socket says it is. Client.Join
	// truncates it to 64 bytes. Empty for others.
	Program string
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
	// Store names the driver's store for programs in other languages: another driver has another.
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
	// Key is the key of data connections among the members, or, of a World that Look has returned,
	// of visits to them.
	Key identity.DataKey
	// Store names the driver's store for programs in other languages: another driver has another.
	Store uint64

	columns *rendezvouspb.Members // decoded by DataAddrs on demand
}

// Member is a member of a published world.
type Member struct {
	Incarnation string
	DataAddrs   []string
	// Handle is that of its join.
	Handle []byte
}

// Report is a worker's report to the driver.
type Report uint8

// The reports of a worker. The driver's journal contains these numbers.
const (
	// Done: its training function has returned, as on every other rank of its world.
	Done Report = iota + 1
	// Leaving: it is about to exit by itself without being done.
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
	switch r {
	case Writing:
		return "writing"
	case Written:
		return "written"
	case NotWritten:
		return "not written"
	case Done:
		return "done"
	case Leaving:
		return "leaving"
	case Committed:
		return "committed"
	case Draining:
		return "draining"
	case Fetching:
		return "fetching"
	}
	return fmt.Sprintf("report %d", uint8(r))
}

const (
	maxAddrs = 64
	maxAddr  = 256
	maxCause = 4 << 10
	maxLost  = 64

	// MaxHandle bounds a handle, in bytes.
	MaxHandle = 64 << 10
	// maxHandles bounds the handles of all workers together: each member of a world gets them.
	maxHandles = 8 << 20
	maxProgram = 64

	maxBackend = 32

	// MaxError bounds what a worker says of its error, in bytes.
	MaxError = 1 << 10
)

// CleanError returns the text of an error in one line without control characters, within MaxError.
func CleanError(text string) string {
	text = strings.Join(strings.FieldsFunc(text, unicode.IsControl), " ")
	if len(text) > MaxError {
		text = text[:MaxError-len("…")]
		for !utf8.ValidString(text) {
			text = text[:len(text)-1]
		}
		text += "…"
	}
	return text
}

// checkError refuses what CleanError does not return.
func checkError(text string) error {
	if text == "" || !utf8.ValidString(text) || CleanError(text) != text {
		return fmt.Errorf("an error's text of %d bytes; 1 to %d in one line are allowed", len(text), MaxError)
	}
	return nil
}

// checkBackend validates the name of a backend.
func checkBackend(name string) error {
	if name == "" || len(name) > maxBackend {
		return fmt.Errorf("a backend name of %d bytes; 1 to %d are allowed", len(name), maxBackend)
	}
	for _, c := range name {
		if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789+-._", c) {
			return fmt.Errorf("backend name %q; only a-z, 0-9, +, -, . and _ are allowed", name)
		}
	}
	return nil
}

// validate checks the bounds that the wire format does not.
func validate(req *rendezvouspb.JoinRequest) error {
	if n := len(req.GetDataAddresses()); n > maxAddrs {
		return fmt.Errorf("%d data addresses; at most %d", n, maxAddrs)
	}
	for _, a := range append(slices.Clip(req.GetDataAddresses()), req.GetNotifyAddress()) {
		if len(a) > maxAddr {
			return fmt.Errorf("an address of %d bytes; at most %d", len(a), maxAddr)
		}
		if !utf8.ValidString(a) {
			return fmt.Errorf("address %q is not valid UTF-8", a)
		}
	}
	if n := len(req.GetCause()); n > maxCause {
		return fmt.Errorf("a cause of %d bytes; at most %d", n, maxCause)
	}
	if n := len(req.GetLost()); n > maxLost {
		return fmt.Errorf("%d ranks lost; at most %d", n, maxLost)
	}
	for _, rank := range req.GetLost() {
		if rank > math.MaxInt32 {
			return fmt.Errorf("rank %d is lost; there is none", rank)
		}
	}
	if n := len(req.GetHandle()); n > MaxHandle {
		return fmt.Errorf("a handle of %d bytes; at most %d", n, MaxHandle)
	}
	if p := req.GetProgram(); len(p) > maxProgram || strings.ContainsFunc(p, unicode.IsControl) {
		return fmt.Errorf("the program's name %q; at most %d bytes, without control characters", clip(p, 2*maxProgram), maxProgram)
	}
	if req.GetUndoneNanoseconds() > math.MaxInt64 {
		return errors.New("a duration out of range")
	}
	return nil
}

// clip returns text as valid UTF-8, truncated between two characters to at most most bytes.
func clip(text string, most int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return text
}

func (j Joining) toWire() *rendezvouspb.JoinRequest {
	var lost []uint32
	for _, rank := range j.Lost[:min(len(j.Lost), maxLost)] {
		lost = append(lost, uint32(rank))
	}
	return &rendezvouspb.JoinRequest{
		AfterGeneration: j.After, Commits: j.Commits, HoldsState: j.HoldsState,
		DataAddresses: j.DataAddrs, NotifyAddress: j.NotifyAddr, Cause: clip(j.Cause, maxCause), Lost: lost,
		Trained: j.Trained, UndoneNanoseconds: uint64(max(0, j.Undone)), Handle: j.Handle, Program: clip(j.Program, maxProgram),
	}
}

func joiningFromWire(req *rendezvouspb.JoinRequest) Joining {
	var lost []int
	for _, rank := range req.GetLost() {
		lost = append(lost, int(rank))
	}
	return Joining{
		After: req.GetAfterGeneration(), Commits: req.GetCommits(), HoldsState: req.GetHoldsState(),
		DataAddrs: req.GetDataAddresses(), NotifyAddr: req.GetNotifyAddress(), Cause: req.GetCause(), Lost: lost,
		Trained: req.Trained, Undone: time.Duration(req.GetUndoneNanoseconds()), Handle: req.GetHandle(), Program: req.GetProgram(),
	}
}
