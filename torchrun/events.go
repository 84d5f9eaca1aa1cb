package torchrun

import (
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// Event is an event of the agent or of a worker.
type Event struct {
	Name   string `json:"name"`
	Source string `json:"source"` // AGENT or WORKER
	// Time is in seconds since 1970.
	Time     float64  `json:"timestamp"`
	Metadata Metadata `json:"metadata"`
}

// Metadata contains the details of an event.
type Metadata struct {
	RunID      string  `json:"run_id"`
	GlobalRank *int    `json:"global_rank"`
	GroupRank  int     `json:"group_rank"`
	GroupWorld int     `json:"group_world_size"`
	WorkerID   string  `json:"worker_id,omitempty"`
	Role       string  `json:"role"`
	Hostname   string  `json:"hostname"`
	State      State   `json:"state"`
	TotalTime  float64 `json:"total_run_time"`
	Backend    string  `json:"rdzv_backend"`
	Error      string  `json:"raw_error,omitempty"`
	Restarts   int     `json:"agent_restarts"`
	// DurationMS is the duration of a rendezvous, or of the assignment of ranks.
	DurationMS int64 `json:"duration_ms,omitempty"`
	ExitCode   *int  `json:"exit_code,omitempty"`
	WorkerPID  int   `json:"worker_pid,omitempty"`
}

// stateTerminated is the state, in events, of a worker that its agent has stopped.
const stateTerminated State = "TERMINATED"

// Console returns a function that writes events to w, one JSON object per line.
func Console(w io.Writer) func(Event) {
	var mu sync.Mutex
	return func(e Event) {
		text, err := json.Marshal(e)
		if err != nil {
			return // cannot happen: an event has only texts and numbers
		}
		mu.Lock()
		defer mu.Unlock()
		_, _ = w.Write(append(text, '\n'))
	}
}

// event emits an event of the agent. If fill is not nil, it can change the event first, for example
// to that of a worker.
func (a *Agent) event(name string, fill func(*Event)) {
	if a.cfg.Events == nil {
		return
	}
	now := a.now()
	e := Event{Name: name, Source: "AGENT", Time: float64(now.UnixMicro()) / 1e6, Metadata: Metadata{
		RunID: a.cfg.RunID, GroupRank: a.place.round.Rank, GroupWorld: a.place.round.World, Role: a.cfg.Role, Hostname: a.cfg.Host,
		State: a.machine.state, TotalTime: now.Sub(a.begun).Seconds(), Backend: a.cfg.Backend, Restarts: a.place.round.Restarts,
	}}
	if fill != nil {
		fill(&e)
	}
	a.cfg.Events(e)
}

// workerEvent emits an event of a worker.
func (a *Agent) workerEvent(name string, state State, w *worker) {
	a.event(name, func(e *Event) {
		rank := a.place.ranks.Base + w.local
		e.Source, e.Metadata.State, e.Metadata.GlobalRank = "WORKER", state, &rank
		e.Metadata.WorkerID, e.Metadata.WorkerPID = fmt.Sprintf("%d_%d", a.place.round.Number, w.local), w.pid
		if w.ended {
			code := exitCode(w.end)
			e.Metadata.ExitCode = &code
		}
	})
}

// lasted emits the duration since a time, as a metric.
func (a *Agent) lasted(name string, since time.Time) {
	a.event(name, func(e *Event) { e.Metadata.DurationMS = a.now().Sub(since).Milliseconds() })
}
