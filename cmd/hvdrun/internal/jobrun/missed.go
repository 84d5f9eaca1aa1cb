package jobrun

import (
	"bytes"
	"encoding/json"
	"io"
	"os"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// missedEvents finds out which events the driver of a job has not written to the events file before
// it died: what the file should hold from some place on is known, and compared.
type missedEvents struct {
	path string
	from int64 // in the file
	all  []byte
}

// eventMark tells another driver, in the journal, of the events until some moment: all but the last
// bytes of them, which are the text, were in the file then.
type eventMark struct {
	Told int64  `json:"told"`
	Text string `json:"text,omitempty"`
	// Lost: there would have been too much text.
	Lost bool `json:"lost,omitempty"`
}

// maxMark is the most bytes of events that wait in the journal: the file takes nothing, and may
// never.
const maxMark = 1 << 20

// mark reports how far the file has got.
func (f *eventFile) mark() json.RawMessage {
	if f == nil {
		return nil
	}
	mark := eventMark{Told: f.told}
	waiting := f.lines.Waiting() // before what is written first: some of that may be done meanwhile
	f.mu.Lock()
	text := f.behind
	if f.missed != nil {
		text = f.missed.all
	}
	mark.Text = string(text) + string(waiting)
	f.mu.Unlock()
	if len(mark.Text) > maxMark {
		mark.Text, mark.Lost = "", true
	}
	b, err := json.Marshal(mark)
	if err != nil {
		return nil // there is nothing in it that could not be written
	}
	return b
}

// replay returns what takes the mark of the drivers before this one, and their events since then.
// Those that the file lacks are written with the next.
func (f *eventFile) replay(from int64) (marked func(json.RawMessage), replayed func(job.Event)) {
	if f == nil {
		return nil, nil
	}
	m := &missedEvents{from: from}
	if file, ok := f.file.(*os.File); ok {
		m.path = file.Name()
	}
	f.missed = m
	marked = func(b json.RawMessage) {
		var mark eventMark
		if err := json.Unmarshal(b, &mark); err != nil || mark.Lost {
			f.log.Warn("the events file may miss events")
		}
		f.told = mark.Told
		m.from, m.all = from+mark.Told-int64(len(mark.Text)), []byte(mark.Text)
	}
	replayed = func(e job.Event) {
		if line, err := json.Marshal(e); err == nil {
			m.all = append(append(m.all, line...), '\n')
			f.told += int64(len(line) + 1)
		}
	}
	return marked, replayed
}

// take returns what the file lacks, from within a line where that was torn. Where the file holds
// something else, as after another job that wrote to it too, it is nothing.
func (m *missedEvents) take(log logrus.FieldLogger) []byte {
	var held []byte
	f, err := safefile.Read(m.path)
	if err == nil {
		defer f.Close()
		held, err = io.ReadAll(io.NewSectionReader(f, m.from, int64(len(m.all))+1))
	}
	missed, ok := bytes.CutPrefix(m.all, held)
	if err != nil || !ok {
		log.Warnf("the events file is not as it was left, and may miss events (%v)", err)
		return nil
	}
	return missed
}
