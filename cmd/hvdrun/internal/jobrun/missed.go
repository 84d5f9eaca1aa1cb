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

// missedEvents finds the events that a driver did not write to the events file before it died. It
// knows what the file should hold from an offset on, and compares the file with it.
type missedEvents struct {
	path string
	from int64 // offset in the file at which all should begin
	all  []byte
}

// eventMark is a record in the journal of how far the events file was written. Told is the number
// of bytes of events since the job began. Text is the last of these bytes: those before it were in
// the file.
type eventMark struct {
	Told int64  `json:"told"`
	Text string `json:"text,omitempty"`
	// Lost: Text was longer than maxMark and was left out.
	Lost bool `json:"lost,omitempty"`
}

// maxMark bounds the events that the journal keeps for the file, in bytes: a blocked file may never
// accept them.
const maxMark = 1 << 20

// mark returns the eventMark of the present moment.
func (f *eventFile) mark() json.RawMessage {
	mark := eventMark{Told: f.told}
	waiting := f.lines.Waiting() // read before behind, which is written first: some of it may be written meanwhile
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
		return nil // cannot happen: every field can be encoded
	}
	return b
}

// replay returns two functions: marked takes the last mark of the earlier drivers, and replayed
// each event after that mark. The events that the file lacks are written before the next event.
// from is the length of the file when the job began.
func (f *eventFile) replay(from int64) (marked func(json.RawMessage), replayed func(job.Event)) {
	m := &missedEvents{from: from}
	if file, ok := f.file.(*os.File); ok {
		m.path = file.Name()
	}
	f.missed = m
	marked = func(b json.RawMessage) {
		var mark eventMark
		if err := json.Unmarshal(b, &mark); err != nil || mark.Lost {
			f.log.Warn("the events file may lack events")
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

// take returns the bytes that the file lacks, which begin within a line if that line is incomplete.
// If the file holds something else, because another job wrote to it too, take logs a warning and
// returns nil.
func (m *missedEvents) take(log logrus.FieldLogger) []byte {
	var held []byte
	f, err := safefile.Read(m.path)
	if err == nil {
		defer f.Close()
		held, err = io.ReadAll(io.NewSectionReader(f, m.from, int64(len(m.all))+1))
	}
	missed, ok := bytes.CutPrefix(m.all, held)
	if err != nil || !ok {
		log.Warnf("the events file was changed, and may lack events (%v)", err)
		return nil
	}
	return missed
}
