package client

import (
	"encoding/json"
	"errors"

	"github.com/hvdrun/hvdrun/internal/journal"
)

// KnownFile is the file in which a driver records the job agents that it has started, for the next
// driver. It must be in a folder that only the job's user may enter.
type KnownFile struct{ *journal.Journal }

// CreateKnown creates the file of a new job. It fails if the file exists.
func CreateKnown(path, runID string) (KnownFile, error) {
	j, err := journal.Create(path, runID)
	return KnownFile{j}, err
}

// OpenKnown returns the file of a job that a driver takes over, and the agents in it.
func OpenKnown(path string) (f KnownFile, known []KnownAgent, err error) {
	f.Journal, _, err = journal.Open(path, func(b []byte) error {
		var k KnownAgent
		err := json.Unmarshal(b, &k)
		known = append(known, k)
		return err
	})
	return f, known, err
}

// Begun records an agent, which is on disk when Begun returns. It serves as Config.Begun.
func (f KnownFile) Begun(k KnownAgent) error {
	b, err := json.Marshal(k)
	if err == nil {
		err = errors.Join(f.Append(b), f.Sync())
	}
	if err != nil {
		return errors.Join(err, f.Mend()) // the next record may fit
	}
	return nil
}
