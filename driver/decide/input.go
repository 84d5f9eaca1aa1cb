package decide

import (
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Input is an event that the machine handles: one of the types of this file. Workers are identified
// by their incarnations.
type Input any

// Inputs from discovery.
type (
	// HostsFound: discovery returned a list of hosts, which has passed plan.CheckHosts.
	HostsFound struct{ Hosts []plan.Host }
	// SourceFailed: the first discovery failed.
	SourceFailed struct{ Err error }
	// SourceStale: a later discovery failed. Age is the age of the newest list.
	SourceStale struct {
		Err error
		Age time.Duration
	}
)

// Inputs from workers and their processes.
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
	// WorkerReported: a worker sent a report. Commits is the number of the commit that the report
	// is about, if any.
	WorkerReported struct {
		ID                  string
		Report              Report
		Generation, Commits uint64
	}
	// BackendTold: a worker reported the collective backend of its world's GPUs.
	BackendTold struct {
		ID         string
		Generation uint64
		Backend    string
	}
	// WorkerFailing: the program of a worker says which error ends it, before its process ends.
	WorkerFailing struct{ ID, Said string }
	// WorkerWrites: the last checkpoint of a worker has grown on disk.
	WorkerWrites struct{ ID string }
	// WorkerEnded: the process of a worker has ended or could not be started. Ran are the functions
	// whose tasks it ran then.
	WorkerEnded struct {
		ID   string
		Exit job.Exit
		Ran  []string
	}
)

// Findings about workers that hold up others.
type (
	// WorkerStalled: the other members of a world wait for a worker. What says for how long and
	// what the worker does meanwhile.
	WorkerStalled struct {
		ID         string
		Generation uint64
		What       string
		Long       time.Duration // how long they have waited
	}
	// WorkerLocated: it was found out where a worker is that holds up others. What says what it
	// does to them, and Where has the frames of the user's code, or what the kernel tells of it.
	WorkerLocated struct {
		ID          string
		Generation  uint64
		What, Where string
	}
	// WorkerStirred: the others do not wait for the worker any more.
	WorkerStirred struct {
		ID         string
		Generation uint64
	}
	// WorkerHung: the others have waited for the worker longer than the stall timeout.
	WorkerHung struct {
		ID         string
		Generation uint64
		What       string
	}
	// WorkerMoved: a worker that has not joined the next world yet made progress towards it: it
	// connected to another worker or began to join. Ago is how long ago.
	WorkerMoved struct {
		ID         string
		Generation uint64
		Ago        time.Duration
	}
	// WorkerDying: a worker is lost for the reason in What, although its process still exists.
	// Signal, if not 0, is what is ending it, and all there is to say.
	WorkerDying struct {
		ID, What string
		Signal   syscall.Signal
	}
	// WorkerTrains: after another member of the generation has reported done, heartbeats of this
	// one show that it still trains.
	WorkerTrains struct {
		ID         string
		Generation uint64
	}
	// WorldJammed: all members of a world wait in an operation, and none is missing.
	WorldJammed struct {
		Generation uint64
		What       string
		Long       time.Duration // how long they have waited
	}
	// WorldStirred: after a WorldJammed, a member waits no more.
	WorldStirred struct{ Generation uint64 }
	// WorldTrains: rank 0 of a generation has synchronised and trains.
	WorldTrains struct{ Generation uint64 }
	// WorldStuck: all members have waited longer than the stall timeout.
	WorldStuck struct {
		Generation uint64
		What       string
	}
)

// Other inputs.
type (
	// Interrupted: the job has to end for this reason.
	Interrupted struct{ Cause error }
	// DeadlinePassed: the time of Machine.Deadline has come.
	DeadlinePassed struct{}
	// Resumed: another driver has taken over the job.
	Resumed struct{}
	// Commanded is an operator's command. A stop is an Interrupted instead.
	Commanded struct{ job.Command }
	// Audited is the record of something that the driver has done, or refused.
	Audited struct{ audit.Record }
	// TasksTold is what the scheduler of tasks tells operators.
	TasksTold struct{ job.TaskEvent }
)

// Join is a worker's request for a world.
type Join struct {
	// After is the generation that the worker has left; 0 if it was in none.
	After uint64
	// Commits is the number of the worker's last commit.
	Commits uint64
	// HoldsState: the worker has completed a sync and so has the job's state.
	HoldsState bool
	// DataAddrs are the addresses for peers. The machine only passes them on.
	DataAddrs []string
	// Cause is why the worker left its last generation, for logs.
	Cause string
	// Trained is whether its training function has returned in its last generation; nil: unknown.
	Trained *bool `json:",omitempty"`
	// Lost are the ranks of that generation with which it could not go on, as far as it knows.
	Lost []int `json:",omitempty"`
	// Undone is the time of training in that generation that an abort has undone.
	Undone time.Duration `json:",omitempty"`
	// Handle is what other members need to reach its program. The machine only passes it on.
	Handle []byte `json:",omitempty"`
	// Program is what the program of a worker that speaks by its socket says it is; empty for
	// others.
	Program string `json:",omitempty"`
}

// Report is a worker's report about itself.
type Report uint8

// The reports. Journals contain these numbers.
const (
	ReportDone       Report = 1  // its training function has returned, as in all of its world
	ReportLeaving    Report = 2  // it is about to exit without being done
	ReportCommitted  Report = 3  // it has made its first commit in the generation
	ReportDraining   Report = 4  // it was asked to leave
	ReportFetching   Report = 5  // it fetches the state from others before it joins
	ReportWriting    Report = 10 // it has left its world and writes a last checkpoint
	ReportWritten    Report = 11 // that checkpoint is on the disk
	ReportNotWritten Report = 12 // that checkpoint could not be written
)
