package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/test/follow"
)

// check is one check of the suite.
type check struct {
	name  string
	limit time.Duration
	do    func(ctx context.Context, o *options) ([]figure, error)
}

var checks []check

func init() {
	checks = []check{
		{"driver", 30 * time.Second, checkDriver},
		{"kernels", 90 * time.Second, checkKernels},
		{"copy", 30 * time.Second, checkCopy},
		{"ipc 2", 60 * time.Second, ranks(2, cuda.BackendIPC)},
		{"ipc 4", 60 * time.Second, ranks(4, cuda.BackendIPC)},
		{"staging 2", 60 * time.Second, ranks(2, cuda.BackendStaging)},
		{"staging 4", 60 * time.Second, ranks(4, cuda.BackendStaging)},
		{"nccl 2", 60 * time.Second, ranks(2, cuda.BackendNCCL)},
		{"nccl 4", 60 * time.Second, ranks(4, cuda.BackendNCCL)},
		{"torch", 90 * time.Second, checkTorch},
		{"sigkill", 120 * time.Second, kills("")},
		{"sigkill nccl", 120 * time.Second, kills(cuda.BackendNCCL)},
		{"generations", 90 * time.Second, checkGenerations},
		{"example", 90 * time.Second, checkExample},
	}
}

// figure is a measured value.
type figure struct {
	Name   string  `json:"name"`
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Target string  `json:"target,omitempty"`
	Met    *bool   `json:"met,omitempty"` // nil: no target, or not judged
}

// judged sets a figure's target.
func (f figure) judged(o *options, target string, met bool) figure {
	f.Target = target
	if !o.Quick {
		f.Met = &met
	}
	return f
}

// result is the result of a check.
type result struct {
	Check   string   `json:"check"`
	Status  string   `json:"status"` // pass, fail, skip
	Reason  string   `json:"reason,omitempty"`
	Seconds float64  `json:"seconds"`
	Figures []figure `json:"figures,omitempty"`
}

// skipped is the reason why a check cannot run here.
type skipped struct{ reason string }

func (s skipped) Error() string { return s.reason }

func resultOf(figures []figure, err error) result {
	r := result{Status: "pass", Figures: figures}
	var skip skipped
	switch {
	case errors.As(err, &skip):
		r.Status, r.Reason = "skip", skip.reason
	case err != nil:
		r.Status, r.Reason = "fail", err.Error()
	}
	return r
}

// runAll runs the checks one after the other and prints the result of each.
func runAll(ctx context.Context, o options, device string, chosen *regexp.Regexp) (*summary, error) {
	temp, err := os.MkdirTemp("", "gpucheck-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	o.Temp = temp
	mark := "GPUCHECK_RUN=" + rand.Text()
	r := newSummary(o, device)
	for _, c := range checks {
		if !chosen.MatchString(c.name) {
			continue
		}
		done := one(ctx, c, o, mark)
		if ctx.Err() != nil {
			return nil, fmt.Errorf("interrupted in check %q: %w", c.name, ctx.Err())
		}
		for _, f := range done.Figures {
			if c.name == "copy" && f.Name == copyFigure {
				o.Copy = f.Value * 1e9
			}
		}
		r.add(os.Stdout, done)
	}
	return r, nil
}

// one runs a check in a process and leaves none of its processes behind.
func one(ctx context.Context, c check, o options, mark string) result {
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, c.limit)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return result{Check: c.name, Status: "fail", Reason: err.Error()}
	}
	input, err := json.Marshal(o)
	if err != nil {
		return result{Check: c.name, Status: "fail", Reason: err.Error()}
	}
	var out, said bytes.Buffer
	cmd := exec.CommandContext(limited, self, "check", c.name)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &said
	cmd.Env = append(os.Environ(), mark)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	sweep(mark)
	r := result{}
	if decoded := json.Unmarshal(out.Bytes(), &r); decoded != nil {
		r = result{Status: "fail", Reason: fmt.Sprintf("the check has ended without a result (%v): %s", err, tail(said.String()))}
	}
	if limited.Err() != nil {
		r.Status, r.Reason = "fail", fmt.Sprintf("not done after %v; %s", c.limit, tail(said.String()))
	}
	r.Check, r.Seconds = c.name, time.Since(began).Seconds()
	return r
}

// sweep kills all processes with the mark and waits until they have ended, for a limited time.
func sweep(mark string) {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		left := follow.Processes(mark)
		if len(left) == 0 {
			return
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL) // fails if it has ended
		}
	}
}

// tail returns the end of a process's output in one line.
func tail(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], " | ")
}
