package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	driverjob "github.com/hvdrun/hvdrun/job"
)

type (
	event  = driverjob.Entry
	host   = driverjob.FoundHost
	placed = driverjob.PublishedSlot
)

// parseEvents returns the events of the complete lines in text, and the rest of text.
func parseEvents(text []byte) (events []event, rest []byte, err error) {
	for {
		line, after, whole := bytes.Cut(text, []byte("\n"))
		if !whole {
			return events, text, nil
		}
		e, err := driverjob.ParseEvent(line)
		if err != nil {
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
