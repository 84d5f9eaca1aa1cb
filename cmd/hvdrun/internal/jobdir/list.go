package jobdir

import (
	"errors"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// State is the state of a job, as the list shows it.
type State string

// The states of a job.
const (
	JobRunning   State = "running"
	JobResumable State = "resumable" // its driver is gone
	jobDone      State = "done"
	jobFailed    State = "failed"
	jobStopped   State = "stopped" // by a person or a signal
	JobBroken    State = "broken"  // its journal cannot be read
)

// Line is one job of the list.
type Line struct {
	Job        string    `json:"job"`
	State      State     `json:"state"`
	Begun      time.Time `json:"begun"`
	Workers    int       `json:"workers"`
	Generation uint64    `json:"generation"`
	Dir        string    `json:"dir"`
	Command    []string  `json:"command"`
	Message    string    `json:"message,omitempty"`
}

// Line returns the state of the job.
func (d *Dir) Line() Line {
	l := Line{Job: d.About.RunID, Begun: d.About.Begun, Dir: d.Path, Command: d.About.Command}
	job, err := d.Inspect()
	l.Workers, l.Generation = job.Workers, job.Generation
	switch {
	case job.Running:
		l.State = JobRunning
	case d.About.Ended != nil && (err != nil || !job.Finished):
		l.State, l.Message, l.Workers = jobStopped, "stopped without its driver", 0
	case err != nil:
		l.State, l.Message = JobBroken, err.Error()
	case job.Finished && job.Result == nil:
		l.State = jobDone
	case job.Finished && errors.As(job.Result, new(cli.StopSignal)):
		l.State, l.Message = jobStopped, strings.TrimPrefix(job.Result.Error(), "driver: ")
	case job.Finished:
		l.State, l.Message = jobFailed, strings.TrimPrefix(job.Result.Error(), "driver: ")
	default:
		l.State = JobResumable
		if err := d.KeyLost(); err != nil {
			l.State, l.Message, l.Workers = jobFailed, "its hvdrun has died: "+err.Error(), 0
		}
	}
	return l
}
