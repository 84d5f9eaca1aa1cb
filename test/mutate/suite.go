package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"time"
)

// pkg is a package of the module in the working directory.
type pkg struct {
	ImportPath, Dir string
	GoFiles         []string
}

func load(ctx context.Context, name string) (*pkg, error) {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "list", "-json=ImportPath,Dir,GoFiles", name)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w: %s", err, &said)
	}
	p := new(pkg)
	return p, json.Unmarshal(out, p)
}

// suite is the tests of a package.
type suite struct {
	pkg
	used time.Duration // of the processor, without a mutant
}

// processor returns the processor time after which the tests count as failed: much more than they
// need.
func (s *suite) processor() time.Duration { return 3*s.used + 5*time.Second }

// calibrate runs the tests without a mutant: they must pass.
func (r *run) calibrate(ctx context.Context, s *suite) error {
	s.used = 5 * time.Minute
	program, _, err := r.build(ctx, s, "")
	if err != nil {
		return err
	}
	failed, used, err := r.test(ctx, s, program)
	if err == nil && failed != "" {
		err = fmt.Errorf("the tests of %s fail without a mutant: %s", s.ImportPath, failed)
	}
	s.used = used
	return err
}

// outcome is what became of a mutant.
type outcome struct {
	compiles bool
	killer   string // the test that failed, or what else showed it; empty: none
	used     time.Duration
}

// try compiles a mutant and runs the tests.
func (r *run) try(ctx context.Context, m *mutant, suites []*suite) (o outcome, err error) {
	changed := filepath.Join(r.dir, filepath.Base(m.file))
	overlay := filepath.Join(r.dir, "overlay.json")
	text, err := json.Marshal(map[string]any{"Replace": map[string]string{m.file: changed}})
	if err := errors.Join(err, os.WriteFile(changed, m.text(), 0o600), os.WriteFile(overlay, text, 0o600)); err != nil {
		return o, err
	}
	for _, s := range suites {
		program, used, err := r.build(ctx, s, overlay)
		o.used += used
		var exit *exec.ExitError
		if errors.As(err, &exit) && ctx.Err() == nil {
			return o, nil
		}
		if err != nil {
			return o, err
		}
		o.compiles = true
		failed, used, err := r.test(ctx, s, program)
		o.used += used
		if err != nil || failed != "" {
			o.killer = failed
			return o, err
		}
	}
	return o, nil
}

// build compiles the tests and returns their program.
func (r *run) build(ctx context.Context, s *suite, overlay string) (program string, used time.Duration, err error) {
	program = filepath.Join(r.dir, "tests")
	args := []string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", program}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, s.ImportPath)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("go test -c %s: %w: %s", s.ImportPath, err, out)
	}
	return program, taken(cmd), err
}

// failure finds the first test that has failed.
var failure = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// test runs the tests of a package and returns the name of the first that fails, or what else has
// ended them. Their processes do not outlive them.
func (r *run) test(ctx context.Context, s *suite, program string) (failed string, used time.Duration, err error) {
	// A limit of the shell is one of the process that it becomes.
	limit := strconv.Itoa(int(s.processor().Seconds()))
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", `ulimit -t `+limit+` && exec "$@"`, "sh", program,
		"-test.short", "-test.failfast", "-test.timeout="+r.limit.String())
	var out bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.Dir, &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second // of processes that have left the group and hold the output
	err = cmd.Run()
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // they may all have ended
	}
	used = taken(cmd)
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", used, context.Cause(ctx)
	case err == nil:
		return "", used, nil
	case !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay):
		return "", used, err
	}
	if m := failure.FindSubmatch(out.Bytes()); m != nil {
		return string(m[1]), used, nil
	}
	if bytes.Contains(out.Bytes(), []byte("panic: test timed out")) {
		return "a test that hangs", used, nil
	}
	if state, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && state.Signaled() {
		return fmt.Sprintf("signal %v after %v of processor time", state.Signal(), used.Round(time.Second)), used, nil
	}
	return "the end of the process: " + string(out.Bytes()[:min(200, out.Len())]), used, nil
}

// taken returns the processor time of a command that has ended, with that of its children.
func taken(cmd *exec.Cmd) time.Duration {
	if cmd.ProcessState == nil {
		return 0
	}
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
}
