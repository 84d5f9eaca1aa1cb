package decide

import (
	"encoding/json"
	"fmt"
)

// Recent holds the last events, each a job.Event or the text of one.
type Recent []json.Marshaler

// keptEvents is how many events a status tells.
const keptEvents = 20

// Add adds an event, and drops the oldest where there are more than a status tells.
func (r *Recent) Add(e json.Marshaler) {
	if len(*r) == keptEvents {
		*r = append((*r)[:0], (*r)[1:]...)
	}
	*r = append(*r, e)
}

// Texts returns them as they stand in an events file.
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
