package settings

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// TestJobInJSON: each line of a job's log names the job, in JSON.
func TestJobInJSON(t *testing.T) {
	var out bytes.Buffer
	p := &cli.Program{Stderr: &out}
	log := Logger(p, &Settings{RunID: "4be1c0ffee5151ab", OutputSettings: OutputSettings{logJSON: true, LogLevel: logrus.InfoLevel}})
	log.WithField("host", "a").Info("one")
	log.Warn("two")
	for line := range strings.Lines(out.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil || m["job"] != "4be1c0ffee5151ab" || m["msg"] == nil {
			t.Errorf("%q: %v", line, err)
		}
	}
}
