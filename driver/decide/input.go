package decide

import (
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Input is something that has happened: one of the types of this file. Workers are named by their
// incarnations.
type Input any

// What the source of hosts says.
type (
	// HostsFound is a new list of hosts, which has passed plan.CheckHosts.
	HostsFound struct{ Hosts []plan.Host }
	// SourceFailed: the first discovery failed.
	SourceFailed struct{ Err error }
	// SourceStale: a later discovery failed; the newest list is of that age.
	SourceStale struct {
		Err error
		Age time.Duration
	}
)

// What workers do.
type (
	// WorkerForked: the process of a worker was started.
	WorkerForked struct {
		ID  string
		PID int
	}
	// WorkerJoined: a worker asks for a world newer than its last.
	WorkerJoined struct {
		ID   string
		Join Join
	}
	// WorkerReported: a worker tells of itself. Commits is the number of the commit that it tells
	// of, where the report is about one.
	WorkerReported struct {
		ID                  string
		Report              Report
		Generation, Commits uint64
	}
	// BackendTold: the GPUs of a worker's world compute together by a backend of that name.
	BackendTold struct {
		ID         string
		Generation uint64
		Backend    string
	}
	// WorkerWrites: more of the last checkpoint that a worker writes is on the disk.
	WorkerWrites struct{ ID string }
	// WorkerEnded: the process of a worker has ended, or could not be started.
	WorkerEnded struct {
		ID   string
		Exit job.Exit
	}
)

// What is found about workers that others wait for.
type (
	// WorkerStalled: the others of its world wait for a worker. What says how long, and what the
	// worker does meanwhile.
	WorkerStalled struct {
		ID         string
		Generation uint64
		What       string
	}
	// WorkerStirred: they do not wait for it any more.
	WorkerStirred struct {
		ID         string
		Generation uint64
	}
	// WorkerHung: they have waited for too long.
	WorkerHung struct {
		ID         string
		Generation uint64
		What       string
	}
	// WorkerMoved: a worker that has not come to the next world was seen on its way there so long
	// ago: it had connected to another worker, or begun to join.
	WorkerMoved struct {
		ID         string
		Generation uint64
		Ago        time.Duration
	}
	// WorkerDying: a worker is lost, as What says, though its process is still there.
	WorkerDying struct{ ID, What string }
	// WorldJammed: all workers of a world wait, and none of them is missing.
	WorldJammed struct {
		Generation uint64
		What       string
	}
	// WorldStuck: they have waited for too long.
	WorldStuck struct {
		Generation uint64
		What       string
	}
)

// What comes from elsewhere.
type (
	// Interrupted: the job is to end, for this reason.
	Interrupted struct{ Cause error }
	// DeadlinePassed: it is the time that Machine.Deadline has told.
	DeadlinePassed struct{}
	// Resumed: another driver has taken over from the one that has fed the machine so far.
	Resumed struct{}
	// Commanded is a person's command. A stop comes as Interrupted instead.
	Commanded struct{ job.Command }
)

// Join is what a worker says when it asks for a world.
type Join struct {
	// After is the generation that the worker has left; 0 for a worker that was in none.
	After uint64
	// Commits is the number of its last commit.
	Commits uint64
	// HoldsState: it has been through a sync, and so has the job's state to give.
	HoldsState bool
	// DataAddrs are where peers reach it, NotifyAddr is where the driver does. The machine hands
	// them on.
	DataAddrs  []string
	NotifyAddr string
	// Cause is why it left its last generation, for logs.
	Cause string
}

// Report is what a worker tells of itself.
type Report uint8

// The reports. A journal holds their numbers.
const (
	ReportDone       Report = 1  // it has returned from training, as all of its world have
	ReportLeaving    Report = 2  // it is about to exit without being done
	ReportCommitted  Report = 3  // it has made its first commit in the generation
	ReportDraining   Report = 4  // it was asked to leave
	ReportFetching   Report = 5  // it brings the state from others before it joins
	ReportWriting    Report = 10 // it has left its world and writes a last checkpoint
	ReportWritten    Report = 11 // that checkpoint is on the disk
	ReportNotWritten Report = 12 // that checkpoint could not be written
)
