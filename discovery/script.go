package discovery

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	defaultScriptTimeout = 30 * time.Second
	maxScriptOutput      = 1 << 20
	maxStderrLine        = 4 << 10

	// drainGrace is how long the pipes of a script that has ended may stay open. Its process group
	// is gone by then; only a process that left the group can hold them.
	drainGrace = time.Second
)

// Script is a Discoverer that runs a command and parses its output, one host a line, in the format
// of plan.ParseHosts.
//
// The shell runs the command in a separate process group, with the environment and directory of
// this process and an empty stdin. If the shell exits with 0, the output until then is the list;
// the rest of the group is then killed. The group is also killed when the command takes longer than
// Timeout or prints more than 1 MiB, and when ctx ends. When this process dies, the shell dies with
// it. Lines on stderr go to the log.
type Script struct {
	// Command is passed to sh -c.
	Command string
	// Env is added to this process's environment. If a driver sets its plan.EnvRunID there, no
	// process of the command remains, however the driver ends.
	Env []string
	// DefaultSlots is the number of slots of a host whose line has none. 0: one.
	DefaultSlots int
	// Timeout bounds one run. 0: 30 s.
	Timeout time.Duration
	// Log takes the command's stderr, one message a line; long lines are cut. Nil:
	// logrus.StandardLogger().
	Log logrus.FieldLogger
	// Told, if not nil, remembers what has been logged: a line of stderr that equals one from an
	// earlier run with the same Told, apart from digits, is not logged again.
	Told *Told
}

// Told remembers lines. The zero value is empty. It is safe for concurrent use.
type Told struct {
	mu    sync.Mutex
	lines map[string]bool
}

// mostTold is the largest number of lines in a Told. When it is full, it starts over.
const mostTold = 1000

// news reports whether a line is new, and remembers it.
func (t *Told) news(line []byte) bool {
	if t == nil {
		return true
	}
	key := strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return '0'
		}
		return r
	}, string(line))
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lines[key] {
		return false
	}
	if t.lines == nil || len(t.lines) >= mostTold {
		t.lines = make(map[string]bool)
	}
	t.lines[key] = true
	return true
}

// Discover runs the command once and blocks until it and its process group have ended. An error
// names the exit status and the last line of stderr, or the line that could not be parsed
// (*plan.ParseError).
func (s Script) Discover(ctx context.Context) ([]plan.Host, error) {
	if s.Command == "" {
		return nil, errors.New("discovery: there is no script to run")
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("discovery: script not run: %w", context.Cause(ctx))
	}
	if s.DefaultSlots == 0 {
		s.DefaultSlots = 1
	}
	if s.Timeout == 0 {
		s.Timeout = defaultScriptTimeout
	}
	if s.Log == nil {
		s.Log = logrus.StandardLogger()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.Timeout, fmt.Errorf("it took longer than %v", s.Timeout))
	defer cancel()
	out, err := s.output(ctx)
	if err != nil {
		return nil, err
	}
	hosts, err := plan.ParseHosts(string(out), s.DefaultSlots)
	if err != nil {
		return nil, fmt.Errorf("discovery: the output of the script: %w", err)
	}
	return hosts, nil
}

var errTooMuchOutput = fmt.Errorf("it printed more than %d bytes", maxScriptOutput)

// output runs the command and returns its whole stdout.
func (s Script) output(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stdout, stdoutEnd, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("discovery: script: %w", err)
	}
	defer stdout.Close()
	stderr, stderrEnd, err := os.Pipe()
	if err != nil {
		stdoutEnd.Close()
		return nil, fmt.Errorf("discovery: script: %w", err)
	}
	defer stderr.Close()

	cmd := exec.Command("/bin/sh", "-c", s.Command)
	cmd.Env = append(os.Environ(), s.Env...)
	cmd.Stdout, cmd.Stderr = stdoutEnd, stderrEnd
	ended := make(chan error, 1)
	go func() {
		err := runGroup(ctx, cmd)
		// Start has given the script its copies of these ends. With ours closed, the readers reach
		// the end of the output.
		late := time.Now().Add(drainGrace)
		stdout.SetReadDeadline(late)
		stderr.SetReadDeadline(late)
		ended <- err
	}()
	why := make(chan string, 1)
	go func() { why <- s.logLines(stderr) }()

	out, readErr := io.ReadAll(io.LimitReader(stdout, maxScriptOutput+1))
	if errors.Is(readErr, os.ErrDeadlineExceeded) && len(out) <= maxScriptOutput {
		more, ended := rest(stdout, maxScriptOutput+1-len(out))
		if out = append(out, more...); ended {
			readErr = nil
		}
	}
	if len(out) > maxScriptOutput {
		cancel(errTooMuchOutput)
	}
	err = <-ended
	said := <-why
	switch {
	case len(out) > maxScriptOutput:
		return nil, fmt.Errorf("discovery: script killed: %w", errTooMuchOutput)
	case err != nil && proc.ExplainCommand(s.Command) != "":
		return nil, fmt.Errorf("discovery: script %w: %s: %s", err, strings.Fields(s.Command)[0], proc.ExplainCommand(s.Command))
	case err != nil && said != "":
		return nil, fmt.Errorf("discovery: script %w: %s", err, said)
	case err != nil:
		return nil, fmt.Errorf("discovery: script %w", err)
	case errors.Is(readErr, os.ErrDeadlineExceeded):
		// What that process prints later might belong to the list.
		return nil, errors.New("discovery: script left a process behind that holds its stdout")
	case readErr != nil:
		return nil, fmt.Errorf("discovery: script: %w", readErr)
	}
	return out, nil
}

// rest reads up to most bytes that are already in a pipe, without waiting, and reports whether the
// pipe has ended. It is needed because on a busy machine a read deadline can pass before available
// data is read.
func rest(pipe *os.File, most int) (out []byte, ended bool) {
	raw, err := pipe.SyscallConn()
	if err != nil || pipe.SetReadDeadline(time.Time{}) != nil {
		return nil, false
	}
	buf := make([]byte, most)
	for len(out) < most {
		n := 0
		rerr := raw.Read(func(fd uintptr) bool {
			n, err = unix.Read(int(fd), buf[len(out):])
			return true
		})
		switch {
		case rerr == nil && errors.Is(err, unix.EINTR):
		case rerr != nil || err != nil:
			return out, false
		case n == 0:
			return out, true
		default:
			out = buf[:len(out)+n]
		}
	}
	return out, false
}

// logLines logs the script's stderr until the pipe ends. It returns the line that says why the
// script failed, if there is one.
func (s Script) logLines(stderr io.Reader) (why string) {
	log := s.Log.WithField("script", s.Command)
	r := bufio.NewReaderSize(stderr, maxStderrLine)
	var words proc.LastWords
	for {
		line, more, err := r.ReadLine()
		if err != nil {
			return words.Why()
		}
		if len(line) > 0 {
			if s.Told.news(line) {
				log.Info("discovery: script says: " + string(line))
			}
			words.Write(line)
			words.Write([]byte("\n"))
		}
		for more && err == nil { // skip the rest of a line that is too long
			_, more, err = r.ReadLine()
		}
	}
}

// runGroup runs cmd in a process group. cmd's files are ends of pipes, which runGroup closes after
// the start. It returns when the group is gone; it kills the group when ctx ends, and kills what is
// left of it when its leader has ended. The text of an error continues a sentence after "script".
func runGroup(ctx context.Context, cmd *exec.Cmd) error {
	child, err := proc.Start(cmd)
	for _, end := range []any{cmd.Stdout, cmd.Stderr} {
		end.(*os.File).Close()
	}
	if err != nil {
		return fmt.Errorf("could not be started: %w", err)
	}
	select {
	case <-child.Ended():
	case <-ctx.Done():
	}
	stopped := ctx.Err() != nil
	status, err := child.Reap()
	switch {
	case stopped:
		return fmt.Errorf("killed: %w", context.Cause(ctx))
	case err != nil:
		return fmt.Errorf("could not be waited for: %w", err)
	case status.Exited() && status.ExitStatus() == 0:
		return nil
	}
	return errors.New(proc.EndText(status))
}
