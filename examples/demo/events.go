package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// event is an object of the events file, with the fields that the demo uses.
type event struct {
	Time       time.Time `json:"time"`
	Name       string    `json:"event"`
	Hosts      []host    `json:"hosts"`
	Host       string    `json:"host"`
	Slot       *int      `json:"slot"` // nil: the whole host
	PID        int       `json:"pid"`
	Rank       int       `json:"rank"`
	Code       int       `json:"code"`
	Signal     int       `json:"signal"` // 0: none
	Cause      string    `json:"cause"`
	Change     string    `json:"change"`
	Generation uint64    `json:"generation"`
	Size       int       `json:"size"`
	Slots      []placed  `json:"slots"`
	Count      int       `json:"count"`
	Status     int       `json:"status"`
	Message    string    `json:"message"`
	Error      string    `json:"error"`
}

type host struct {
	Name  string `json:"host"`
	Slots int    `json:"slots"`
}

// placed is a worker in a published world.
type placed struct {
	Rank int    `json:"rank"`
	Host string `json:"host"`
	Slot int    `json:"slot"`
	PID  int    `json:"pid"`
}

// who returns the slot or host of the event.
func (e event) who() string {
	if e.Slot == nil {
		return "host " + e.Host
	}
	return fmt.Sprintf("%s slot %d", e.Host, *e.Slot)
}

// String describes the event briefly.
func (e event) String() string {
	switch e.Name {
	case "hosts_found":
		if len(e.Hosts) == 0 {
			return "no hosts found"
		}
		text := "hosts found:"
		for _, h := range e.Hosts {
			text += fmt.Sprintf(" %s:%d", h.Name, h.Slots)
		}
		return text
	case "discovery_failed":
		return "discovery failed: " + e.Error
	case "worker_started":
		return fmt.Sprintf("worker started on %s, pid %d", e.who(), e.PID)
	case "worker_ready":
		return fmt.Sprintf("worker on %s is ready", e.who())
	case "hosts_updated":
		return fmt.Sprintf("workers told of a change of hosts: %s", e.Change)
	case "world_published":
		text := fmt.Sprintf("generation %d, size %d:", e.Generation, e.Size)
		for _, s := range e.Slots {
			text += fmt.Sprintf(" %d=%s:%d", s.Rank, s.Host, s.Slot)
		}
		return text
	case "first_commit":
		return fmt.Sprintf("generation %d has completed its first step", e.Generation)
	case "worker_dying":
		return fmt.Sprintf("worker on %s (rank %d) is lost, and its process is ending", e.who(), e.Rank)
	case "worker_exited":
		if e.Signal != 0 {
			return fmt.Sprintf("worker on %s (rank %d) ended by signal %d: %s", e.who(), e.Rank, e.Signal, e.Cause)
		}
		return fmt.Sprintf("worker on %s (rank %d) exited with %d: %s", e.who(), e.Rank, e.Code, e.Cause)
	case "excluded":
		return e.who() + " is excluded for a while"
	case "returned":
		return e.who() + " may be used again"
	case "reset":
		return fmt.Sprintf("reset %d: the workers leave their world for the next", e.Count)
	case "job_done":
		return fmt.Sprintf("job done, status %d", e.Status)
	}
	return e.Name
}

// parseEvents returns the events of the complete lines in text, and the rest of text.
func parseEvents(text []byte) (events []event, rest []byte, err error) {
	for {
		line, after, whole := bytes.Cut(text, []byte("\n"))
		if !whole {
			return events, text, nil
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return events, text, fmt.Errorf("demo: events file: %q: %w", line, err)
		}
		events, text = append(events, e), after
	}
}

// tail reads an events file that is being written.
type tail struct {
	path string
	file *os.File // nil until the file exists
	rest []byte   // an incomplete line
}

// read returns the events written since the last call; none if the file does not exist yet.
func (t *tail) read() ([]event, error) {
	if t.file == nil {
		f, err := os.Open(t.path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("demo: events file: %w", err)
		}
		t.file = f
	}
	text, err := io.ReadAll(t.file)
	if err != nil {
		return nil, fmt.Errorf("demo: events file: %w", err)
	}
	var events []event
	events, t.rest, err = parseEvents(append(t.rest, text...))
	return events, err
}

func (t *tail) close() {
	if t.file != nil {
		t.file.Close() // errors of a file that was only read do not matter
	}
}
