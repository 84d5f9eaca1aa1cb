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
	Waiting   int            `json:"waiting"` // for results that are arguments
	Ready     int            `json:"ready"`
	Running   int            `json:"running"` // or sent ahead
	Retried   int            `json:"retried"`
	Functions []GroupStatus  `json:"functions,omitempty"`
	Workers   []WorkerStatus `json:"workers,omitempty"`
	// Suspended is the number of waiting tasks of a journal that wait for workers that may have
	// them.
	Suspended int `json:"suspended,omitempty"`
	// Journal is the error of the journal; empty: none.
	Journal string `json:"journal,omitempty"`
	// Memory is the memory of tasks, in bytes, if it is bounded.
	Memory *Memory `json:"memory,omitempty"`
	// Offered are the functions that workers have, by name.
	Offered []Offered `json:"offered,omitempty"`
}

// Memory reports how many bytes tasks and their results take in the scheduler, and the limit.
type Memory struct {
	Used int64 `json:"used"`
	Most int64 `json:"most"`
	// Clients are the clients that take most, in that order.
	Clients []ClientStatus `json:"clients,omitempty"`
}

// ClientStatus describes a client.
type ClientStatus struct {
	Name  string `json:"name"`
	Tasks int    `json:"tasks"`
	Bytes int64  `json:"bytes"`
	// Unread is the size, in bytes, of results that it has not taken. Paused: there are so many
	// that its tasks wait.
	Unread int64 `json:"unread,omitempty"`
	Paused bool  `json:"paused,omitempty"`
	// Gone: it has no connection.
	Gone bool `json:"gone,omitempty"`
}

// Offered is a function that workers have.
type Offered struct {
	Function string `json:"function"`
	Workers  int    `json:"workers"`
	// CPU is how many processors those of them offer that neither leave nor train.
	CPU float64 `json:"cpu"`
}

// GroupStatus describes the tasks of one function with the same demand.
type GroupStatus struct {
	Function string `json:"function"`
	Demand   string `json:"demand"`
	Ready    int    `json:"ready"`
	Running  int    `json:"running"`
	// PaceUS is how long a task takes, in microseconds: a moving average. 0: none has ended.
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
	// Waits is the number of running tasks that wait for other tasks, and have lent their
	// processors.
	Waits int `json:"waits,omitempty"`
	// Trains: it has a place in a world, and runs no tasks.
	Trains bool `json:"trains,omitempty"`
	// Stopped are attempts of tasks that were cancelled or reached their time limit, and whose
	// functions have not ended. They keep their resources of the worker until then.
	Stopped []StoppedStatus `json:"stopped,omitempty"`
}

// StoppedStatus describes an attempt that was told to stop and has not ended.
type StoppedStatus struct {
	Function string `json:"function"`
	N        uint64 `json:"n"`
	// Why is the reason: it was cancelled, its time is up, or it runs again elsewhere.
	Why string `json:"why,omitempty"`
	// ForMS is how long ago it was told, in milliseconds.
	ForMS int64 `json:"for_ms"`
}

// String returns why the attempt was told to stop, and how long ago.
func (s StoppedStatus) String() string {
	return fmt.Sprintf("%s, has not ended for %v", s.Why, (time.Duration(s.ForMS) * time.Millisecond).Round(time.Second))
}

// Lasting returns a line for each attempt that was told to stop and has not ended.
func (s Status) Lasting() (all []string) {
	for _, w := range s.Workers {
		for _, t := range w.Stopped {
			all = append(all, fmt.Sprintf("worker %s: task %d of %s, %v", w.Name, t.N, t.Function, t))
		}
	}
	return all
}

// Explanation gives the state of a task, and the reason.
type Explanation struct {
	// Client is the session of the client whose task it is; N its number.
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
	// By is the name of the client, for those who have it.
	By string `json:"by,omitempty"`
}
