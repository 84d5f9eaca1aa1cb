// Package report defines the reports of a scheduler of tasks as plain values: its status, and why a
// task does not run.
package report

import (
	"fmt"
	"time"
)

// Status is the status of a scheduler: tasks by function, with the reasons why they wait, and
// workers.
type Status struct {
	Waiting   int            `json:"waiting"` // for results that are their arguments
	Ready     int            `json:"ready"`
	Running   int            `json:"running"` // includes tasks sent ahead
	Retried   int            `json:"retried"`
	Functions []GroupStatus  `json:"functions,omitempty"`
	Workers   []WorkerStatus `json:"workers,omitempty"`
	// Suspended is the number of waiting tasks, restored from a journal, for whose workers the
	// scheduler still waits.
	Suspended int `json:"suspended,omitempty"`
	// Journal is the error of the journal; empty: no error.
	Journal string `json:"journal,omitempty"`
	// Memory is the memory of tasks, in bytes; nil: it has no limit.
	Memory *Memory `json:"memory,omitempty"`
	// Offered are the functions that workers offer, sorted by name.
	Offered []Offered `json:"offered,omitempty"`
}

// Memory reports how many bytes tasks and their results take in the scheduler, and the limit.
type Memory struct {
	Used int64 `json:"used"`
	Most int64 `json:"most"`
	// Clients are the clients that take the most memory, in descending order.
	Clients []ClientStatus `json:"clients,omitempty"`
}

// ClientStatus describes a client.
type ClientStatus struct {
	Name  string `json:"name"`
	Tasks int    `json:"tasks"`
	Bytes int64  `json:"bytes"`
	// Unread is the size, in bytes, of results that the client has not taken. Paused means that it
	// has so many that its tasks wait.
	Unread int64 `json:"unread,omitempty"`
	Paused bool  `json:"paused,omitempty"`
	// Gone means that the client has no connection.
	Gone bool `json:"gone,omitempty"`
}

// Offered is a function that workers offer.
type Offered struct {
	Function string `json:"function"`
	Workers  int    `json:"workers"`
	// CPU is the number of processors that workers with the function offer, without workers that
	// are leaving or that train.
	CPU float64 `json:"cpu"`
}

// GroupStatus describes the tasks of one function with the same demand.
type GroupStatus struct {
	Function string `json:"function"`
	Demand   string `json:"demand"`
	Ready    int    `json:"ready"`
	Running  int    `json:"running"`
	// PaceUS is the moving average of the run time of a task, in microseconds. 0: none has ended
	// yet.
	PaceUS int64 `json:"pace_us"`
	// Why is the reason why the ready tasks do not run.
	Why string `json:"why,omitempty"`
}

// WorkerStatus describes a worker.
type WorkerStatus struct {
	ID      uint64 `json:"id"`
	Rank    int    `json:"rank"`
	Name    string `json:"name"`
	Host    string `json:"host"`
	Offers  string `json:"offers"`
	Running int    `json:"running"`
	Ahead   int    `json:"ahead"`
	Done    int    `json:"done"`
	Leaving bool   `json:"leaving,omitempty"`
	// Waits is the number of running tasks that wait for other tasks and have lent their
	// processors.
	Waits int `json:"waits,omitempty"`
	// Trains means that the worker is a member of a world and runs no tasks.
	Trains bool `json:"trains,omitempty"`
	// Stopped are attempts of tasks that were cancelled or reached their time limit, but whose
	// functions have not returned. Until then they keep their resources on the worker.
	Stopped []StoppedStatus `json:"stopped,omitempty"`
}

// StoppedStatus describes an attempt that was asked to stop and has not ended.
type StoppedStatus struct {
	Function string `json:"function"`
	N        uint64 `json:"n"`
	// Why is the reason: the task was cancelled, its time limit has passed, or it runs again
	// elsewhere.
	Why string `json:"why,omitempty"`
	// ForMS is how long ago the attempt was asked to stop, in milliseconds.
	ForMS int64 `json:"for_ms"`
}

// String describes why the attempt was asked to stop, and how long ago.
func (s StoppedStatus) String() string {
	return fmt.Sprintf("%s, has not ended for %v", s.Why, (time.Duration(s.ForMS) * time.Millisecond).Round(time.Second))
}

// Lasting returns a line for each attempt that was asked to stop and has not ended.
func (s Status) Lasting() (all []string) {
	for _, w := range s.Workers {
		for _, t := range w.Stopped {
			all = append(all, fmt.Sprintf("worker %s: task %d of %s, %v", w.Name, t.N, t.Function, t))
		}
	}
	return all
}

// Explanation describes the state of a task and the reason for it.
type Explanation struct {
	// Client is the session of the task's client. N is the number of the task.
	Client   uint64 `json:"client"`
	N        uint64 `json:"n"`
	Function string `json:"function"`
	Demand   string `json:"demand"`
	Priority int32  `json:"priority,omitempty"`
	State    string `json:"state"`
	// Tries is the number of attempts beyond the first, Deaths the number of workers that were lost
	// while they ran it.
	Tries  int    `json:"tries,omitempty"`
	Deaths int    `json:"deaths,omitempty"`
	Why    string `json:"why"`
	// By is the name of the client, in answers that concern several clients.
	By string `json:"by,omitempty"`
}
