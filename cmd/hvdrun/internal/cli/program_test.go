package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/job"
)

func TestStatus(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{Failed(&job.WorkerError{}), 1},
		{errors.New("bad flag"), 2},
		{Failed(fmt.Errorf("%w: 2 of 4", job.ErrNotEnoughSlots)), 3},
		{Failed(job.ErrResetLimit), 4},
		{Failed(job.ErrStateLost), 5},
		{Failed(job.ErrDiscovery), 6},
		{Failed(StopSignal{Signal: syscall.SIGINT}), 130},
		{Failed(errors.Join(StopSignal{Signal: syscall.SIGTERM}, errors.New("and more"))), 143},
	} {
		if got := Status(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

func TestTextFormat(t *testing.T) {
	var b strings.Builder
	log := logrus.New()
	log.SetOutput(&b)
	log.SetFormatter(TextFormat(nil, nil))
	log.WithFields(logrus.Fields{"slot": 1, "host": "a b", "empty": ""}).Warn("worker failed\n")
	if _, rest, _ := strings.Cut(b.String(), " "); rest != "WARN  worker failed empty=\"\" host=\"a b\" slot=1\n" {
		t.Errorf("%q", b.String())
	}
}

// TestEscape: other machines and workers cannot control the terminal in which the log is read.
func TestEscape(t *testing.T) {
	for text, want := range map[string]string{
		"":                            "",
		"plain, é, 世界\tand\nmore":     "plain, é, 世界\tand\nmore",
		"\x1b]0;title\x07\x1b[31mred": `\x1b]0;title\a\x1b[31mred`,
		"a\rb\x00\x7f\u009b1m":        `a\rb\x00\x7f\u009b1m`,
		"cut \xe4\xb8":                `cut \xe4\xb8`,
		"\u202etxt.exe":               `\u202etxt.exe`,
	} {
		if got := Escape(text); got != want {
			t.Errorf("%q is escaped as %q, want %q", text, got, want)
		}
	}
	line, err := TextFormat(nil, nil).Format(&logrus.Entry{Message: "ssh: \x1b[2J", Data: logrus.Fields{"host": "a\x1b"}})
	if err != nil || strings.Contains(string(line), "\x1b") {
		t.Errorf("%q, %v", line, err)
	}
}

// TestStream: if nobody reads stdout any more, the job stops; after other failed writes it
// continues.
func TestStream(t *testing.T) {
	for _, c := range []struct {
		err    error
		passed bool
		cause  error
	}{{syscall.EPIPE, false, StopSignal{Signal: syscall.SIGPIPE}}, {syscall.ENOSPC, true, nil}} {
		ctx, cancel := context.WithCancelCause(context.Background())
		_, err := (&Stream{W: failing{c.err}, Cancel: cancel}).Write([]byte("x"))
		if (err != nil) != c.passed || !errors.Is(context.Cause(ctx), c.cause) {
			t.Errorf("%v: %v, %v", c.err, err, context.Cause(ctx))
		}
		cancel(nil)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// frozen blocks writers until it is thawed.
type frozen struct {
	thawed chan struct{}
	strings.Builder
}

func (f *frozen) Write(b []byte) (int, error) {
	<-f.thawed
	return f.Builder.Write(b)
}

// TestQueue: if nobody reads the log, writers do not wait, and the number of dropped lines is
// reported; closing waits for a bounded time.
func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &frozen{thawed: make(chan struct{})}
		q := &Queue{To: f, Most: 10}
		q.OnDropped(func(n int) []byte { return fmt.Appendf(nil, "%d dropped\n", n) })
		fmt.Fprint(q, "first\n")
		synctest.Wait()
		for range 4 {
			fmt.Fprint(q, "more\n")
		}
		begin := time.Now()
		if err := q.Flush(FlushPatience); !errors.Is(err, errNotTaken) || time.Since(begin) != FlushPatience {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		close(f.thawed)
		synctest.Wait()
		if got, want := f.String(), "first\nmore\nmore\n2 dropped\n"; got != want {
			t.Errorf("%q was written, want %q", got, want)
		}
	})
}
