package jobdir

import (
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// State is the state of a job in the list of jobs.
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
	Job   string    `json:"job"`
	Name  string    `json:"name,omitempty"`
	State State     `json:"state"`
	Begun time.Time `json:"begun"`
	// Ended is when the job ended, and Status its exit status; nil: it has not ended.
	Ended      *time.Time `json:"ended,omitempty"`
	Status     *int       `json:"status,omitempty"`
	Workers    int        `json:"workers"`
	Generation uint64     `json:"generation"`
	Dir        string     `json:"dir"`
	Command    []string   `json:"command"`
	Message    string     `json:"message,omitempty"`
}

// Took returns how long the job took, or has taken so far.
func (l *Line) Took(now time.Time) time.Duration {
	if l.Ended != nil {
		now = *l.Ended
	}
	return max(0, now.Sub(l.Begun))
}

// Line returns the line of the job in the list of jobs.
func (d *Dir) Line() Line {
	l := Line{Job: d.About.RunID, Name: d.About.Name, Begun: d.About.Begun, Dir: d.Path, Command: d.About.Command}
	found, err := d.Inspect()
	if d.About.Ended != nil {
		l.Ended, l.Status = d.About.Ended, &d.About.Status
	} else if err == nil && found.Finished && !found.Running { // its driver was killed at the very end
		status := 0
		if found.Result != nil {
			status = job.ExitStatus(found.Result)
		}
		l.Ended, l.Status = &found.Last, &status
	}
	l.Workers, l.Generation = found.Workers, found.Generation
	switch {
	case found.Running:
		l.State = Running
	case d.About.Ended != nil && (err != nil || !found.Finished):
		l.State, l.Message, l.Workers = stopped, withoutDriver, 0
	case err != nil:
		l.State, l.Message = Broken, err.Error()
	case found.Finished && found.Result == nil:
		l.State = done
	case found.Finished && job.Stopped(job.ExitStatus(found.Result)):
		l.State, l.Message = stopped, strings.TrimPrefix(found.Result.Error(), "driver: ")
	case found.Finished:
		l.State, l.Message = failed, strings.TrimPrefix(found.Result.Error(), "driver: ")
	default:
		l.State = Resumable
		if err := d.KeyLost(); err != nil {
			l.State, l.Message, l.Workers = failed, "its hvdrun has died: "+err.Error(), 0
		}
	}
	return l
}
