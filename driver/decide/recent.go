package decide

import (
	"encoding/json"
	"fmt"

	"github.com/hvdrun/hvdrun/job"
)

// Recent is the list of the last events, each a job.Event or the JSON of one.
type Recent []json.Marshaler

// keptEvents is the number of events in a status.
const keptEvents = 20

// Add appends an event and drops the oldest if there are more than keptEvents. It ignores audit
// records, which only the events file holds.
func (r *Recent) Add(e json.Marshaler) {
	if e, ok := e.(job.Event); ok && e.Name == job.Audit {
		return
	}
	if len(*r) == keptEvents {
		*r = append((*r)[:0], (*r)[1:]...)
	}
	*r = append(*r, e)
}

// Texts returns the events as JSON, as in an events file.
func (r Recent) Texts() ([]json.RawMessage, error) {
	all := make([]json.RawMessage, len(r))
	for i, e := range r {
		text, err := json.Marshal(e)
		if err != nil {
			return nil, fmt.Errorf("driver: %w", err)
		}
		all[i] = text
	}
	return all, nil
}
