package client

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// Exec starts job agents on this machine. They outlive this process.
type Exec struct {
	// Hvdrun is the path of the program. Empty: this process's own.
	Hvdrun string

	patience time.Duration // how long to wait for the agent's answer; 0: answerTimeout
}

var _ Starter = Exec{}

// agentArgs are the arguments with which hvdrun runs as a job agent.
var agentArgs = []string{"agent", "--job"}

// Start implements Starter.
func (e Exec) Start(ctx context.Context, host string, hello Hello) (Ready, error) {
	fail := func(err error) (Ready, error) {
		return Ready{}, &HostError{Host: host, Stage: stageCommand, Err: err}
	}
	line, err := hello.line()
	if err != nil {
		return fail(err)
	}
	path := e.Hvdrun
	if path == "" {
		if path, err = os.Executable(); err != nil {
			return fail(err)
		}
	}
	cmd := exec.Command(path, agentArgs...)
	cmd.Stdin = bytes.NewReader(line)
	stderr := &tail{}
	cmd.Stderr = stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return fail(err)
	}
	if err := proc.StartSession(cmd); err != nil {
		return fail(err)
	}
	limit := cmp.Or(e.patience, answerTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s gave no answer for %v", path, limit))
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	var ready Ready
	answer, _, err := readAnswer(stdout)
	if err == nil {
		ready, err = decodeReady(answer)
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		waitErr := proc.WaitSession(cmd)
		switch {
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case stderr.why() != "":
			err = errors.New(stderr.why())
		case errors.Is(err, io.EOF) && waitErr != nil:
			err = fmt.Errorf("%s: %w", path, waitErr)
		}
		return fail(err)
	}
	gone := make(chan struct{})
	go func() { // Agents.Close waits for it
		defer close(gone)
		_ = proc.WaitSession(cmd)
	}()
	ready.gone = gone
	ready.kill = func() { _ = cmd.Process.Kill() }
	return ready, nil
}
