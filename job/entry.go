package job

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Entry is an event that was read: a line of an events file, with the fields of all events. A field
// that the event does not have, or that is null, is zero; Rank is -1.
type Entry struct {
	Time       time.Time       `json:"time"`
	Name       EventName       `json:"event"`
	Generation uint64          `json:"generation"`
	Size       int             `json:"size"`
	Commits    uint64          `json:"commits"`
	Checkpoint uint64          `json:"checkpoint"`
	Host       string          `json:"host"` // "": no host
	Slot       *int            `json:"slot"` // nil: the whole host
	PID        int             `json:"pid"`
	Rank       int             `json:"rank"`
	Code       int             `json:"code"`
	Signal     int             `json:"signal"` // 0: none
	Cause      string          `json:"cause"`
	Seq        uint64          `json:"seq"`
	Change     string          `json:"change"`
	Until      *time.Time      `json:"until"` // nil: for ever
	Count      int             `json:"count"`
	Status     int             `json:"status"`
	Message    string          `json:"message"`
	What       string          `json:"what"`
	How        string          `json:"how"`
	Outcome    string          `json:"outcome"`
	Error      string          `json:"error"`
	Backend    string          `json:"backend"`
	Where      string          `json:"where"`
	Worker     string          `json:"worker"`
	Lost       bool            `json:"lost"`
	Function   string          `json:"function"`
	Reason     string          `json:"reason"`
	Text       string          `json:"text"`
	Seconds    float64         `json:"seconds"`
	MinNP      *int            `json:"min_np"`
	MaxNP      *int            `json:"max_np"`
	Hosts      []FoundHost     `json:"hosts"`
	Slots      []PublishedSlot `json:"slots"`
}

// ParseEvent reads a line of an events file. Fields that it does not know are left out, so that it
// reads files of later versions.
func ParseEvent(line []byte) (Entry, error) {
	var e Entry
	if err := json.Unmarshal(line, &e); err != nil {
		return Entry{}, fmt.Errorf("event: %w", err)
	}
	return e, nil
}

// UnmarshalJSON decodes one object of an events file.
func (e *Entry) UnmarshalJSON(b []byte) error {
	type fields Entry
	f := fields{Rank: -1}
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	if f.Name == "" || f.Time.IsZero() {
		return errors.New("it has no name or no time")
	}
	*e = Entry(f)
	return nil
}

// Entry returns the event as it is read from an events file.
func (e Event) Entry() (Entry, error) {
	line, err := json.Marshal(e)
	if err != nil {
		return Entry{}, err
	}
	return ParseEvent(line)
}

// String returns the event's name and a text of what happened.
func (e Entry) String() string {
	_, text := e.Words()
	return fmt.Sprintf("%s: %s", e.Name, text)
}

// Place returns the host, or the host and its slot, such as "a:1"; "nobody" if the event has no
// host.
func (e Entry) Place() string {
	switch {
	case e.Host == "":
		return "nobody"
	case e.Slot == nil:
		return e.Host
	}
	return fmt.Sprintf("%s:%d", e.Host, *e.Slot)
}

// Member returns the worker: its rank, if it has one, and its place.
func (e Entry) Member() string {
	if e.Rank >= 0 {
		return fmt.Sprintf("rank %d on %s", e.Rank, e.Place())
	}
	return "the worker on " + e.Place()
}

// Exit describes how the process of a worker ended.
func (e Entry) Exit() string {
	if e.Signal != 0 {
		return fmt.Sprintf("killed by signal %d", e.Signal)
	}
	text := fmt.Sprintf("exit status %d", e.Code)
	if e.Code == 0 && e.Cause == "failed" {
		text += " before training was done"
	}
	if e.Error != "" {
		text += ": " + e.Error
	}
	return text
}
