package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
)

// Exec starts job agents on this machine. They outlive this process.
type Exec struct {
	// Path is hvdrun. Empty: this process's own executable.
	Path string
}

var _ Starter = Exec{}

// agentArgs make hvdrun a job agent.
var agentArgs = []string{"agent", "--job"}

// Start implements Starter.
func (e Exec) Start(ctx context.Context, host string, hello AgentHello) (AgentReady, error) {
	fail := func(err error) (AgentReady, error) {
		return AgentReady{}, &HostError{Host: host, Stage: StageCommand, Err: err}
	}
	line, err := hello.line()
	if err != nil {
		return fail(err)
	}
	path := e.Path
	if path == "" {
		if path, err = os.Executable(); err != nil {
			return fail(err)
		}
	}
	cmd := exec.Command(path, agentArgs...)
	cmd.Stdin = bytes.NewReader(line)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stderr := &tail{}
	cmd.Stderr = stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return fail(err)
	}
	if err := startChild(cmd); err != nil {
		return fail(err)
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	var ready AgentReady
	answer, _, err := readAnswer(stdout)
	if text, ok := strings.CutPrefix(answer, readyMark); ok {
		ready, err = decodeReady([]byte(text))
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		waitErr := cmd.Wait()
		relatives.reaped(cmd.Process.Pid)
		switch {
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case stderr.last() != "":
			err = errors.New(stderr.last())
		case errors.Is(err, io.EOF) && waitErr != nil:
			err = fmt.Errorf("%s: %w", path, waitErr)
		}
		return fail(err)
	}
	gone := make(chan struct{})
	go func() { // Agents.Close waits for it
		defer close(gone)
		_ = cmd.Wait()
		relatives.reaped(cmd.Process.Pid)
	}()
	ready.gone = gone
	ready.kill = func() { _ = cmd.Process.Kill() }
	return ready, nil
}

// startChild starts a command whose end the caller tells relatives.
func startChild(cmd *exec.Cmd) error {
	return relatives.fork(false, func() (int, error) {
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		return cmd.Process.Pid, nil
	})
}

// tail keeps the end of what is written.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const tailSize = 8 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if n := len(t.text) - tailSize; n > 0 {
		t.text = t.text[n:]
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// last returns the last line that is not empty.
func (t *tail) last() string {
	lines := strings.FieldsFunc(t.String(), func(r rune) bool { return r == '\n' || r == '\r' })
	for i := len(lines) - 1; i >= 0; i-- {
		if line := strings.TrimSpace(lines[i]); line != "" {
			return line
		}
	}
	return ""
}
