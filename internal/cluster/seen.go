package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"time"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// seenFile says when hosts have last been heard of. It is apart from stateFile because it changes
// all the time, and nothing depends on it.
const seenFile = "seen.json"

// Seen is what the agent of a host has last said.
type Seen struct {
	// At is when it has.
	At time.Time
	// Used is the number of slots that have workers, by run.
	Used map[string]uint32 `json:",omitempty"`
	// Ahead is how far its clock was ahead of the registrar's. Nil: unknown.
	Ahead *time.Duration `json:",omitempty"`
}

// ClocksApart is how far clocks may be apart without a warning: certificates are dated back by an
// hour, and logs are read side by side.
const ClocksApart = time.Minute

// ClockWords describes a clock that is so far ahead, or if less than 0 behind, before the words for
// another one: "1h2m0s behind", "3s ahead of".
func ClockWords(ahead time.Duration) string {
	if ahead = ahead.Round(time.Second); ahead < 0 {
		return (-ahead).String() + " behind"
	}
	return ahead.String() + " ahead of"
}

// Seen returns what the agents of hosts have last said, by host.
func (d *Dir) Seen() (map[string]Seen, error) {
	text, err := safefile.SecretText(d.file(seenFile), maxStateFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	seen := map[string]Seen{}
	if err == nil {
		err = json.Unmarshal([]byte(text), &seen)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: %s: %w", d.file(seenFile), err)
	}
	return seen, nil
}

// AddSeen adds what agents have said to the file, which forgets hosts that the cluster does not
// know. A file that cannot be read is made anew.
func (d *Dir) AddSeen(news map[string]Seen) error {
	state, err := d.View()
	if err != nil {
		return err
	}
	seen, err := d.Seen()
	if err != nil || seen == nil {
		seen = map[string]Seen{}
	}
	maps.Copy(seen, news)
	maps.DeleteFunc(seen, func(host string, _ Seen) bool {
		_, known := state.Hosts[host]
		return !known
	})
	text, err := json.Marshal(seen)
	if err == nil {
		err = safefile.Replace(d.file(seenFile), text, safefile.Private)
	}
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	return nil
}
