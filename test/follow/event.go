package follow

import (
	"fmt"
	"time"
)

// Event is a line of the events file, with the fields of all events.
type Event struct {
	Time       time.Time `json:"time"`
	Name       string    `json:"event"`
	Generation uint64    `json:"generation"`
	Size       int       `json:"size"`
	Host       string    `json:"host"`
	Slot       *int      `json:"slot"`
	PID        int       `json:"pid"`
	Rank       int       `json:"rank"`
	Code       int       `json:"code"`
	Signal     *int      `json:"signal"`
	Cause      string    `json:"cause"`
	Count      int       `json:"count"`
	Seq        uint64    `json:"seq"`
	Change     string    `json:"change"`
	Status     int       `json:"status"`
	Message    string    `json:"message"`
	What       string    `json:"what"`
	Until      time.Time `json:"until"` // of an exclusion; zero: it has no end
	Frames     string    `json:"where"` // of a located event
	Backend    string    `json:"backend"`
	Slots      []Slot    `json:"slots"`
	Hosts      []struct {
		Host     string `json:"host"`
		Slots    int    `json:"slots"`
		Draining bool   `json:"draining"`
	} `json:"hosts"`
}

// Slot is a member of a published world.
type Slot struct {
	Rank int    `json:"rank"`
	Host string `json:"host"`
	Slot int    `json:"slot"`
	PID  int    `json:"pid"`
}

// Where returns the slot or host of the event.
func (e Event) Where() string {
	if e.Slot == nil {
		return e.Host
	}
	return fmt.Sprintf("%s:%d", e.Host, *e.Slot)
}

// String summarises the event in a line.
func (e Event) String() string {
	where := e.Where()
	switch e.Name {
	case "hosts_found":
		return fmt.Sprint(e.Name, " ", e.Hosts)
	case "world_published", "first_commit":
		return fmt.Sprintf("%s generation %d size %d %v", e.Name, e.Generation, e.Size, e.Slots)
	case "hosts_updated":
		return fmt.Sprintf("%s seq %d %s", e.Name, e.Seq, e.Change)
	case "worker_exited":
		return fmt.Sprintf("%s %s rank %d pid %d code %d: %s", e.Name, where, e.Rank, e.PID, e.Code, e.Cause)
	case "reset":
		return fmt.Sprintf("%s %d", e.Name, e.Count)
	case "job_done":
		return fmt.Sprintf("%s status %d %s", e.Name, e.Status, e.Message)
	}
	return fmt.Sprintf("%s %s pid %d", e.Name, where, e.PID)
}

// Count returns the number of events with the name.
func Count(events []Event, name string) int {
	n := 0
	for _, e := range events {
		if e.Name == name {
			n++
		}
	}
	return n
}
