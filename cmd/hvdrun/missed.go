package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver"
)

// missedEvents finds out which events the driver of a job has not written to the events file before it died: it knows all
// that it had to, and compares.
type missedEvents struct {
	path string
	from int64 // where the job's first begins
	all  bytes.Buffer
}

// replay returns what takes the events of the drivers before this one. Those that the file lacks are written with the
// next.
func (f *eventFile) replay(from int64) func(driver.Event) {
	if f == nil {
		return nil
	}
	m := &missedEvents{from: from}
	if file, ok := f.file.(*os.File); ok {
		m.path = file.Name()
	}
	f.missed.Store(m)
	return func(e driver.Event) {
		if line, err := json.Marshal(e); err == nil {
			m.all.Write(append(line, '\n'))
		}
	}
}

// take returns what the file lacks, from within a line where that was torn. Where the file holds something else, as after
// another job that wrote to it too, it is nothing.
func (m *missedEvents) take(log logrus.FieldLogger) []byte {
	if m == nil {
		return nil
	}
	var held []byte
	f, err := os.Open(m.path)
	if err == nil {
		defer f.Close()
		held, err = io.ReadAll(io.NewSectionReader(f, m.from, int64(m.all.Len())+1))
	}
	missed, ok := bytes.CutPrefix(m.all.Bytes(), held)
	if err != nil || !ok {
		log.Warnf("the events file is not as it was left, and may miss events (%v)", err)
		return nil
	}
	return missed
}
