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
	SourceFailed struct{ Cause }
	// SourceStale: a later discovery failed.
	SourceStale struct{ Cause }
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
	// concerns, if any.
	WorkerReported struct {
		ID                  string
		Report              Report
		Generation, Commits uint64
	}
	// BackendTold: a worker reported the collective backend that its world uses for GPUs.
	BackendTold struct {
		ID         string
		Generation uint64
		Backend    string
	}
	// WorkerFailing: the program of a worker reports the error that ends it, before its process
	// ends.
	WorkerFailing struct{ ID, Said string }
	// WorkerWrites: the last checkpoint of a worker has grown on disk.
	WorkerWrites struct{ ID string }
	// WorkerEnded: the process of a worker has ended or could not be started. Ran lists the
	// functions whose tasks it was running then.
	WorkerEnded struct {
		ID   string
		Exit job.Exit
		Ran  []string `json:",omitempty"`
	}
)

// Findings about workers that hold up others.
type (
	// WorkerStalled: the other members of a world wait for a worker. What describes for how long,
	// and what the worker does meanwhile.
	WorkerStalled struct {
		ID         string
		Generation uint64
		What       string
		Long       time.Duration // how long the others have waited
	}
	// WorkerLocated: the driver has located a worker that holds up others. What describes its
	// effect on them; Where holds the frames of the user's code, or the kernel's account of it.
	WorkerLocated struct {
		ID          string
		Generation  uint64
		What, Where string
	}
	// WorkerStirred: the others no longer wait for the worker.
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
	// Signal, if not 0, is the signal that is terminating it; then What says nothing else.
	WorkerDying struct {
		ID, What string
		Signal   syscall.Signal
	}
	// WorkerTrains: after another member of the generation has reported done, heartbeats of this
	// worker show that it still trains.
	WorkerTrains struct {
		ID         string
		Generation uint64
	}
	// WorldJammed: all members of a world wait in an operation, and none is missing.
	WorldJammed struct {
		Generation uint64
		What       string
		Long       time.Duration // how long the members have waited
	}
	// WorldStirred: after a WorldJammed, a member no longer waits.
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
	Interrupted struct{ Cause }
	// DeadlinePassed: the time of Machine.Deadline has come.
	DeadlinePassed struct{}
	// Resumed: another driver has taken over the job.
	Resumed struct{}
	// Commanded is an operator's command. A stop is an Interrupted instead.
	Commanded struct{ job.Command }
	// Audited is the audit record of something that the driver has done or refused.
	Audited struct{ audit.Record }
	// TasksTold is an event of the task scheduler for operators.
	TasksTold struct{ job.TaskEvent }
)

// Cause is an error. A journal has its text, and the data from which the exit status follows.
type Cause struct{ Err error }

// Check returns an error if the hosts cannot be those of a list.
func (e HostsFound) Check() error { return plan.CheckHosts(e.Hosts) }

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
	// Trained says whether the training function has returned in the worker's last generation; nil:
	// unknown.
	Trained *bool `json:",omitempty"`
	// Lost are the ranks of that generation without which the worker could not continue, as far as
	// it knows.
	Lost []int `json:",omitempty"`
	// Undone is the time of training in that generation that an abort has undone.
	Undone time.Duration `json:",omitempty"`
	// Handle is what other members need to reach the worker's program. The machine only passes it
	// on.
	Handle []byte `json:",omitempty"`
	// Program is how the program of a worker that speaks by its socket describes itself; empty for
	// other workers.
	Program string `json:",omitempty"`
}

// Report is a worker's report about itself.
type Report uint8

// The reports. Journals contain these numbers.
const (
	ReportDone       Report = 1  // its training function has returned, as on all ranks of its world
	ReportLeaving    Report = 2  // it is about to exit without being done
	ReportCommitted  Report = 3  // it has made its first commit in the generation
	ReportDraining   Report = 4  // it was asked to leave
	ReportFetching   Report = 5  // it receives the state from others before it joins
	ReportWriting    Report = 10 // it has left its world and writes a last checkpoint
	ReportWritten    Report = 11 // that checkpoint is on the disk
	ReportNotWritten Report = 12 // that checkpoint could not be written
)
