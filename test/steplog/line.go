package steplog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
)

// Line is a record of a worker's action.
type Line struct {
	Time       int64   `json:"time"` // nanoseconds since 1970
	Event      Event   `json:"event"`
	Step       int     `json:"step"` // last completed step
	Outcome    Outcome `json:"outcome,omitempty"`
	Settling   bool    `json:"settling,omitempty"` // the line was written before the world's sync has ended
	Chain      string  `json:"chain"`
	Digest     string  `json:"digest,omitempty"` // of the weights, at the end
	Rank       int     `json:"rank"`
	First      int     `json:"first"` // the worker's rank in its first world
	Size       int     `json:"size"`
	Generation uint64  `json:"generation"`
	Host       string  `json:"host"`
	Slot       int     `json:"slot"`
	PID        int     `json:"pid"`
	Worker     string  `json:"worker"` // its incarnation
	Run        string  `json:"run"`    // the job's id
}

// Where returns the worker's slot, "host:slot".
func (l Line) Where() string { return fmt.Sprintf("%s:%d", l.Host, l.Slot) }

// Event is the kind of a line.
type Event string

// The events of a steplog.
const (
	Enter Event = "enter" // training begins or continues in a world, or the world settles a step before its sync
	Step  Event = "step"  // a step was completed, and its Commit has returned, if it has one
	End   Event = "end"   // all steps are done on all ranks
)

// Outcome is what Commit returned after a step.
type Outcome string

// The outcomes: not called; nil; a *HostsUpdatedError; an error that wraps collective.ErrAborted.
const (
	None    Outcome = "none"
	OK      Outcome = "ok"
	Updated Outcome = "updated"
	Aborted Outcome = "aborted"
)

// Append writes the line to f in one write; f must have been opened with O_APPEND. A newline
// precedes the line because a process killed during its write can have left an incomplete line.
func (l Line) Append(f io.Writer) error {
	b, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("steplog: %w", err)
	}
	_, err = f.Write(slices.Concat([]byte("\n"), b, []byte("\n")))
	return err
}

// FormatChain formats a chain for Line.
func FormatChain(chain uint64) string { return fmt.Sprintf("%016x", chain) }

// Follower reads a growing file of JSON lines.
type Follower[T any] struct {
	path   string
	offset int64
}

// Follow returns a follower of the file, which may not exist yet.
func Follow[T any](path string) *Follower[T] { return &Follower[T]{path: path} }

// Next returns the complete lines added since the last call, without waiting. Incomplete JSON
// objects are skipped.
func (f *Follower[T]) Next() ([]T, error) {
	file, err := os.Open(f.path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("steplog: %w", err)
	}
	defer file.Close()
	b, err := io.ReadAll(io.NewSectionReader(file, f.offset, 1<<40))
	if err != nil {
		return nil, fmt.Errorf("steplog: %w", err)
	}
	var lines []T
	for {
		line, _, whole := bytes.Cut(b, []byte("\n"))
		if !whole {
			return lines, nil
		}
		f.offset += int64(len(line)) + 1
		b = b[len(line)+1:]
		if !bytes.HasSuffix(line, []byte("}")) {
			continue
		}
		var l T
		if err := json.Unmarshal(line, &l); err != nil {
			return lines, fmt.Errorf("steplog: %s: %q: %w", f.path, line, err)
		}
		lines = append(lines, l)
	}
}
