package dashboard

import (
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// Event is an event as the page shows it.
type Event struct {
	// Seq increases by one with each event of a feed.
	Seq  int       `json:"seq"`
	Time time.Time `json:"time"`
	Name string    `json:"name"`
	Kind job.Kind  `json:"kind"`
	// Text describes the event.
	Text string `json:"text"`
	// Folded: another event says the same, and the page shows this one only on request.
	Folded bool `json:"folded,omitempty"`
}

// maxText bounds the text of an event, in bytes.
const maxText = 600

// told returns an event as the page shows it.
func told(e *job.Entry) Event {
	kind, text := e.Words()
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "…"
	}
	return Event{Time: e.Time, Name: string(e.Name), Kind: kind, Text: text, Folded: e.RecordsStart()}
}
