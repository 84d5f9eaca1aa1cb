// Package rendezvous is where the workers of a job meet in a generation: the driver's server, which
// holds the published world and the joins that wait for it, and the worker's client.
//
// It is level-triggered: a join says which generation its worker has left, and is answered with the
// current world if that is newer and the worker is in it. So an answer that was lost on the way is
// simply asked for again. Who joins is read from the certificate of the connection and from nothing
// else.
package rendezvous

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
)

var (
	// ErrRemoved dismisses a worker that has no place in the new world.
	ErrRemoved = errors.New("rendezvous: this worker has no place in the new world")
	// ErrLast is ErrRemoved for a worker after which no world follows: of all ranks it is the one
	// to write the job's last commit to disk.
	ErrLast = fmt.Errorf("%w, and writes the job's last checkpoint", ErrRemoved)
	// ErrFinished dismisses a worker because the job's training is done.
	ErrFinished = errors.New("rendezvous: the job is done")
	// ErrSuperseded is returned by a Join whose place a later Join of the same Client has taken.
	ErrSuperseded = errors.New("rendezvous: another join of this worker has taken the place of this one")
)

// UnreachableError is returned by the methods of Client where the driver could not be reached for
// as long as ClientConfig.Patience.
type UnreachableError struct {
	Addr string
	For  time.Duration
	// Err is why the last try failed.
	Err error
}

// Error names the driver's address and the last reason.
func (e *UnreachableError) Error() string {
	return fmt.Sprintf("rendezvous: the driver at %s could not be reached for %v: %v",
		e.Addr, e.For.Round(time.Millisecond), e.Err)
}

// Unwrap returns why the last try failed.
func (e *UnreachableError) Unwrap() error { return e.Err }

// Joining is what a worker says when it joins. At most 64 data addresses, every address at most 256
// bytes.
type Joining struct {
	// After is the generation that the worker has left; 0 for a worker that was in none.
	After uint64
	// Commits is the number of its last commit.
	Commits uint64
	// HoldsState: it has been through a sync, and so has the job's state to give.
	HoldsState bool
	// DataAddrs are where peers reach its data listener (host:port), the best first.
	DataAddrs []string
	// NotifyAddr is where the driver reaches its notification service, host:port.
	NotifyAddr string
	// Cause is why it left its last generation, for logs. Client.Join cuts it to 4 KiB.
	Cause string
}

// Place is what a member of a new world is told of it.
type Place struct {
	Generation uint64
	// Rank is the member's own, Size the number of all.
	Rank, Size int
	// SyncRoot is the rank whose state is everybody's after the sync.
	SyncRoot int
	// Seq is the number of the last hosts-updated notification that the world takes account of.
	Seq uint64

	members []byte // a wire.Members
}

// World is a world as one of its members sees it.
type World struct {
	plan.World
	// Rank is the member's own.
	Rank int
	// SyncRoot is the rank whose state is everybody's after the sync.
	SyncRoot int
	// Seq is the number of the last hosts-updated notification that the world takes account of.
	Seq uint64

	columns *wire.Members // for DataAddrs, which are many and are needed once
}

// Member is a worker of a published world.
type Member struct {
	Incarnation string
	DataAddrs   []string
}

// Report is what a worker tells the driver without being asked.
type Report uint8

// The reports of a worker.
const (
	// Done: it has returned from training, and so has every other worker of its world.
	Done Report = iota + 1
	// Leaving: it is about to exit of its own accord, without being done.
	Leaving
	// Committed: it has made its first commit in the generation.
	Committed
	// Draining: it was asked to leave, and waits to be sent away at a step boundary.
	Draining
	// Fetching: it will join, and is bringing the state from others first.
	Fetching
	// Over…: the ranks of its generation combine memory of their devices by a backend, see [Over].
	OverNCCL
	OverIPC
	OverIPCHosts
	OverStaging
	// Writing: it has left its world and writes a last checkpoint, of the commit that the report
	// names.
	Writing
	// Written: that checkpoint is on the disk.
	Written
	// NotWritten: that checkpoint could not be written.
	NotWritten
)

// overs are the names of backends.
var overs = map[Report]string{OverNCCL: "nccl", OverIPC: "ipc", OverIPCHosts: "ipc+hosts", OverStaging: "staging"}

// Over is the report that names a backend of devices' collectives; false where there is none of
// that name.
func Over(backend string) (Report, bool) {
	for r, name := range overs {
		if name == backend {
			return r, true
		}
	}
	return 0, false
}

// Backend is the name that [Over] was given; empty for a report of something else.
func (r Report) Backend() string { return overs[r] }

// String returns "done", "leaving", "committed", "draining", "fetching", "writing", "written", "not
// written" or "over " and a backend.
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
	if name := r.Backend(); name != "" {
		return "over " + name
	}
	return fmt.Sprintf("report %d", uint8(r))
}

const (
	maxAddrs = 64
	maxAddr  = 256
	maxCause = 4 << 10
)

// validate checks what the wire's format does not bound.
func validate(req *wire.JoinRequest) error {
	if n := len(req.GetDataAddresses()); n > maxAddrs {
		return fmt.Errorf("%d data addresses; at most %d", n, maxAddrs)
	}
	for _, a := range append(slices.Clip(req.GetDataAddresses()), req.GetNotifyAddress()) {
		if len(a) > maxAddr {
			return fmt.Errorf("an address of %d bytes; at most %d", len(a), maxAddr)
		}
		if !utf8.ValidString(a) {
			return fmt.Errorf("address %q is no text", a)
		}
	}
	if n := len(req.GetCause()); n > maxCause {
		return fmt.Errorf("a cause of %d bytes; at most %d", n, maxCause)
	}
	return nil
}

// clip returns the text as the wire takes it: valid, and of so many bytes at most, cut between two
// characters.
func clip(text string, most int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return text
}

func (j Joining) toWire() *wire.JoinRequest {
	return &wire.JoinRequest{
		AfterGeneration: j.After, Commits: j.Commits, HoldsState: j.HoldsState,
		DataAddresses: j.DataAddrs, NotifyAddress: j.NotifyAddr, Cause: clip(j.Cause, maxCause),
	}
}

func joiningFromWire(req *wire.JoinRequest) Joining {
	return Joining{
		After: req.GetAfterGeneration(), Commits: req.GetCommits(), HoldsState: req.GetHoldsState(),
		DataAddrs: req.GetDataAddresses(), NotifyAddr: req.GetNotifyAddress(), Cause: req.GetCause(),
	}
}
