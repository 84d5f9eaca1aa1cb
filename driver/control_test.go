package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/job"
)

// TestControlledJob: a job that waits for slots reports its status, is scaled down, and is stopped,
// all through its socket.
func TestControlledJob(t *testing.T) {
	dir := t.TempDir()
	log := logrus.New()
	log.SetOutput(io.Discard)
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	started := make(chan struct{}, 1)
	var audited []string // until Run returns, only its goroutine uses it
	cfg := Config{
		RunID: "controlled", Command: []string{"sleep", "600"}, Log: log,
		Source:  discovery.Fixed{{Name: "localhost", Slots: 1}},
		Size:    job.Size{NP: 2, Min: 1, Elastic: true},
		Journal: filepath.Join(dir, "journal"),
		Control: filepath.Join(dir, control.SocketName),
		Stop:    func(bool) { cancel(enough) },
		Events: func(e job.Event) {
			switch e.Name {
			case job.HostsFound, job.WorkerStarted:
				started <- struct{}{}
			case job.Audit:
				text, _ := json.Marshal(e)
				audited = append(audited, string(text))
			}
		},
	}
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, cfg) }()
	<-started // the hosts are known, and the socket exists
	c, err := control.Dial(cfg.Control)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Job != "controlled" || s.State != job.Waiting || s.Driver != os.Getpid() || len(s.Events) != 1 || len(s.Waits) != 1 ||
		s.Waits[0].For != "2 slots, 1 there" || s.Hosts[0].Slots[0].State != job.SlotFree || s.Begun.IsZero() {
		t.Errorf("%+v", s)
	}
	ask := func(what job.Command, says string) {
		t.Helper()
		done, err := c.Command(t.Context(), what)
		if err != nil {
			done = err.Error()
		}
		if !strings.Contains(done, says) {
			t.Errorf("%+v: %q, want %q", what, done, says)
		}
	}
	ask(job.Command{Verb: job.Drain, Host: "elsewhere"}, "host elsewhere is unknown; the hosts are localhost")
	ask(job.Command{Verb: job.Scale, MaxNP: new(1)}, "1 worker, before 1 or more")
	<-started
	if s, err = c.Status(t.Context()); err != nil || s.State != job.Starting || s.Hosts[0].Slots[0].PID == 0 || s.MaxNP != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	ask(job.Command{Verb: job.Stop}, "being stopped")
	if err := <-ended; !errors.Is(err, enough) {
		t.Errorf("Run returned %v", err)
	}
	if _, err := os.Lstat(cfg.Control); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if err := syscall.Kill(s.Hosts[0].Slots[0].PID, 0); err == nil {
		t.Error("the worker is left")
	}
	checkAudited(t, audited, s.Hosts[0].Slots[0].PID)
	if s, err = InspectStatus(cfg.Journal); err != nil || s.State != job.Failed || s.Message != "enough" || s.Driver != 0 || s.MaxNP != 1 {
		t.Errorf("from the journal: %+v, %v", s, err)
	}
	last := string(s.Events[len(s.Events)-1])
	if !strings.Contains(last, `"event":"job_done"`) {
		t.Errorf("the last event is %s", last)
	}
}

// checkAudited compares the audit events of TestControlledJob. Each names this process as the
// caller.
func checkAudited(t *testing.T, audited []string, pid int) {
	t.Helper()
	by := fmt.Sprintf(`"event":"audit","who":{"uid":"%d","pid":%d}`, os.Getuid(), os.Getpid())
	want := []string{
		by + `,"what":"drain","host":"elsewhere","outcome":"refused: host elsewhere is unknown; the hosts are localhost"}`,
		by + `,"what":"scale","how":"at most 1","outcome":"done"}`,
		fmt.Sprintf(`"event":"audit","who":{"role":"driver","run":"controlled","uid":"%d","pid":%d},`+
			`"what":"start","host":"localhost","slot":0,"program":"sleep","pid":%d,"outcome":"done"}`, os.Getuid(), os.Getpid(), pid),
		by + `,"what":"stop","outcome":"done"}`,
	}
	if len(audited) != len(want) {
		t.Fatalf("audited: %q", audited)
	}
	for i := range want {
		if !strings.HasSuffix(audited[i], want[i]) {
			t.Errorf("%s\ndoes not end with\n%s", audited[i], want[i])
		}
	}
}

// TestNoSocket: a job whose socket cannot be created runs without one.
func TestNoSocket(t *testing.T) {
	log := logrus.New()
	var said strings.Builder
	log.SetOutput(&said)
	err := Run(t.Context(), Config{
		Command: []string{"true"}, Log: log, Source: discovery.Fixed{{Name: "localhost", Slots: 1}}, Size: job.Size{NP: 1},
		Control: filepath.Join(t.TempDir(), "nowhere", control.SocketName),
	})
	if err != nil || !strings.Contains(said.String(), "takes no commands") {
		t.Errorf("%v, and the log says %q", err, said.String())
	}
}
