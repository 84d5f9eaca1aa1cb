package elastic

import (
	"bytes"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
)

// TestOwnLog: log lines have hvdrun's format unless the program has set one, and are written to the
// program's output.
func TestOwnLog(t *testing.T) {
	standard := logrus.StandardLogger()
	out, format := standard.Out, standard.Formatter
	t.Cleanup(func() {
		standard.SetOutput(out)
		standard.SetFormatter(format)
	})
	var b bytes.Buffer
	standard.SetOutput(&b)
	standard.SetFormatter(new(logrus.TextFormatter))
	log := ownLog()
	log.WithField("rank", 3).Warn("a line")
	if !regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{3} WARN  a line rank=3\n$`).Match(b.Bytes()) {
		t.Errorf("%q", b.String())
	}
	b.Reset()
	logrus.Warn("the program's")
	if !strings.HasPrefix(b.String(), "time=") {
		t.Errorf("%q", b.String())
	}
	b.Reset()
	standard.SetFormatter(&logrus.TextFormatter{DisableTimestamp: true})
	log.Warn("a line")
	if got := strings.TrimSpace(b.String()); got != `level=warning msg="a line"` {
		t.Errorf("%q", got)
	}
}

// TestOwnLogs: several workers of one process create their logs at the same time, and the standard
// format is wrapped once.
func TestOwnLogs(t *testing.T) {
	standard := logrus.StandardLogger()
	before := standard.Formatter
	standard.SetFormatter(new(logrus.TextFormatter))
	defer func() { standard.SetFormatter(before) }()
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() { ownLog() })
	}
	workers.Wait()
	if f, is := standard.Formatter.(besides); !is {
		t.Errorf("the format is %T", f)
	} else if _, twice := f.Formatter.(besides); twice {
		t.Error("the format is wrapped twice")
	}
}
