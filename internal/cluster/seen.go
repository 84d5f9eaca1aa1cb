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

// seenFile records when the agents of hosts last reported. It is separate from stateFile because it
// changes all the time, and nothing depends on it.
const seenFile = "seen.json"

// Seen is the last report of the agent of a host.
type Seen struct {
	// At is the time of the report.
	At time.Time
	// Used is the number of slots that have workers, by run.
	Used map[string]uint32 `json:",omitempty"`
	// Ahead is how far the host's clock was ahead of the registrar's. Nil: unknown.
	Ahead *time.Duration `json:",omitempty"`
}

// ClocksApart is how far clocks may differ without a warning. Certificates are backdated by an
// hour, but people compare the times in logs.
const ClocksApart = time.Minute

// ClockWords describes a clock that is ahead of another by a time, or behind it if that is
// negative, in words that precede the name of the other clock: "3s ahead of", or "1h2m0s behind".
func ClockWords(ahead time.Duration) string {
	if ahead = ahead.Round(time.Second); ahead < 0 {
		return (-ahead).String() + " behind"
	}
	return ahead.String() + " ahead of"
}

// Seen returns the last reports of the agents of hosts, by host.
func (d *Dir) Seen() (map[string]Seen, error) {
	text, err := safefile.SecretText(d.file(seenFile), maxStateFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	seen := map[string]Seen{}
	if err == nil {
		err = json.Unmarshal(text, &seen)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: %s: %w", d.file(seenFile), err)
	}
	return seen, nil
}

// AddSeen adds reports to the file, and removes those of hosts that the cluster does not know. It
// replaces a file that cannot be read.
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
