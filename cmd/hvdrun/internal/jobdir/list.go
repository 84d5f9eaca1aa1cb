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
	Running   State = "running"
	Resumable State = "resumable" // its driver is gone
	done      State = "done"
	failed    State = "failed"
	stopped   State = "stopped" // by a person or a signal
	Broken    State = "broken"  // its journal cannot be read
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
		l.State = Running
	case d.About.Ended != nil && (err != nil || !job.Finished):
		l.State, l.Message, l.Workers = stopped, "stopped without its driver", 0
	case err != nil:
		l.State, l.Message = Broken, err.Error()
	case job.Finished && job.Result == nil:
		l.State = done
	case job.Finished && errors.As(job.Result, new(cli.StopSignal)):
		l.State, l.Message = stopped, strings.TrimPrefix(job.Result.Error(), "driver: ")
	case job.Finished:
		l.State, l.Message = failed, strings.TrimPrefix(job.Result.Error(), "driver: ")
	default:
		l.State = Resumable
		if err := d.KeyLost(); err != nil {
			l.State, l.Message, l.Workers = failed, "its hvdrun has died: "+err.Error(), 0
		}
	}
	return l
}
