package operate

import (
	"bytes"
	"encoding/json"
	"io"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/clitest"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/job"
)

// TestForeignJobs: the names of jobs and of their hosts are printed escaped.
func TestForeignJobs(t *testing.T) {
	for what, c := range map[string]struct {
		lines int
		print func(p *cli.Program) error
	}{
		"jobs": {2, func(p *cli.Program) error {
			return printJobs(p, []jobdir.Line{{Job: clitest.Foreign, Command: []string{clitest.Foreign}}}, time.Now())
		}},
		"status": {0, func(p *cli.Program) error {
			_, err := io.WriteString(p.Stdout, picture((&jobdir.Dir{}), foreignStatus(t)))
			return err
		}},
		"status --watch": {0, func(p *cli.Program) error { return (&statusLines{out: p.Stdout}).show(foreignStatus(t)) }},
	} {
		var out bytes.Buffer
		if err := c.print(&cli.Program{Stdout: &out, Stderr: &out}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		clitest.Tame(t, what, out.String(), c.lines)
	}
}

func foreignStatus(t *testing.T) job.Status {
	t.Helper()
	event, err := json.Marshal(map[string]string{"event": "host_excluded", "host": clitest.Foreign, "time": clitest.Foreign})
	if err != nil {
		t.Fatal(err)
	}
	return job.Status{
		Job: clitest.Foreign, State: job.Running, Driver: 1, Message: clitest.Foreign, Events: []json.RawMessage{event},
		Waits: []job.Wait{{For: clitest.Foreign}},
		Hosts: []job.Host{{Host: clitest.Foreign, Slots: []job.Slot{{What: clitest.Foreign}}}, {Host: clitest.Foreign}},
	}
}
