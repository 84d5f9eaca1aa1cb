package torchrun

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
)

// TestStdin: workers read what the agent was given to read.
func TestStdin(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString("hello\n"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	var out bytes.Buffer
	a := shell(t, 1, `read line; echo got "$line"`, func(c *Config) {
		c.Stdin = r
		c.Logs.Stdout = &out
	})
	if err := a.Run(t.Context()); err != nil || out.String() != "got hello\n" {
		t.Errorf("%q, %v", &out, err)
	}
}

// TestSlowFailure: a worker that has written its error file, and is slow to exit, is in the report
// with the one whose end was noticed; one that was well is not.
func TestSlowFailure(t *testing.T) {
	a := shell(t, 3, `
case $RANK in
0)
	printf '{"message": "the cause", "timestamp": 100}' >$TORCHELASTIC_ERROR_FILE
	touch $PIPE
	sleep 100 ;;
1)
	while [ ! -e $PIPE ]; do sleep 0.01; done
	exit 3 ;;
esac
sleep 100`, func(c *Config) { c.Env = append(c.Env, "PIPE="+t.TempDir()+"/written") })
	var failed *FailedError
	if err := a.Run(t.Context()); !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if len(failed.Failures) != 2 || failed.Root().Rank != 0 || failed.Root().Message != "the cause" {
		t.Errorf("%+v", failed.Failures)
	}
	if report := failed.Report(); !strings.Contains(report, "rank      : 1") || strings.Contains(report, "NO_OTHER_FAILURES") {
		t.Error(report)
	}
}
