package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/logline"
)

// TestJournalLines: where systemd's journal reads the log, each line has its priority, and no time
// and level of its own.
func TestJournalLines(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	info, err := w.Stat()
	if err != nil {
		t.Fatal(err)
	}
	stat := info.Sys().(*syscall.Stat_t)
	ours := fmt.Sprintf("JOURNAL_STREAM=%d:%d", stat.Dev, stat.Ino)
	for env, want := range map[string]bool{ours: true, ours + "1": false, "OTHER=1": false} {
		if got := readByJournal([]string{env}, &stream{w: w}); got != want {
			t.Errorf("%s: %v", env, got)
		}
	}
	if readByJournal([]string{ours}, &bytes.Buffer{}) {
		t.Error("what is no file is read by the journal")
	}
	for level, want := range map[logrus.Level]string{
		logrus.ErrorLevel: "<3>one\n<3>    two host=a\n", logrus.WarnLevel: "<4>one\n<4>    two host=a\n",
		logrus.InfoLevel: "<6>one\n<6>    two host=a\n", logrus.DebugLevel: "<7>one\n<7>    two host=a\n",
	} {
		line, err := logline.Text{Journal: true}.Format(&logrus.Entry{Level: level, Message: "one\ntwo", Data: logrus.Fields{"host": "a"}})
		if err != nil || string(line) != want {
			t.Errorf("%v: %q, %v", level, line, err)
		}
	}
}

// TestJobInJSON: each line of a job's log names the job, in JSON.
func TestJobInJSON(t *testing.T) {
	var out bytes.Buffer
	p := &program{stderr: &out}
	log := p.logger(&settings{runID: "4be1c0ffee5151ab", outputSettings: outputSettings{logJSON: true, logLevel: logrus.InfoLevel}})
	log.WithField("host", "a").Info("one")
	log.Warn("two")
	for line := range strings.Lines(out.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil || m["job"] != "4be1c0ffee5151ab" || m["msg"] == nil {
			t.Errorf("%q: %v", line, err)
		}
	}
}
