package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// maxOutput bounds the output of a command, in bytes: a hundred thousand nodes fit.
	maxOutput = 64 << 20
	// pipeGrace is how long the pipes of an ended command may stay open.
	pipeGrace = time.Second
)

var errNotFound = errors.New("not found in $PATH: install Slurm's client programs, or name their folder by the setting bin")

var errTooMuchOutput = fmt.Errorf("printed more than %d bytes", maxOutput)

// commands runs Slurm's programs, from dir, or from $PATH if dir is "".
type commands struct {
	dir string
}

// run returns the output of a command that ends with status 0. When ctx ends, run kills the command
// and everything that it has started. Errors contain the last line of its stderr.
func (c commands) run(ctx context.Context, name string, args ...string) (string, error) {
	if ctx.Err() != nil {
		return "", fmt.Errorf("slurm: %s: %w", name, context.Cause(ctx))
	}
	cmd := exec.CommandContext(ctx, c.path(name), args...)
	cmd.Env = environ(name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = pipeGrace
	stdout, stderr := bounded{end: cmd.Cancel}, bounded{}
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	switch {
	case stdout.full:
		err = errTooMuchOutput
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case errors.Is(err, exec.ErrNotFound):
		err = errNotFound
	case err != nil && stderr.last() != "":
		err = errors.New(stderr.last())
	}
	if err != nil {
		return "", fmt.Errorf("slurm: %s %s: %w", name, args[0], err)
	}
	return stdout.kept.String(), nil
}

func (c commands) path(name string) string {
	if c.dir == "" {
		return name
	}
	return filepath.Join(c.dir, name)
}

// launch starts a program that outlives this process, as workers outlive their driver, and appends
// its output to the file log. ended is closed when the program has ended.
func (c commands) launch(log, name string, args ...string) (ended <-chan struct{}, err error) {
	to, err := safefile.AppendPlain(log, os.O_WRONLY, safefile.Private)
	if err != nil {
		return nil, fmt.Errorf("slurm: %s: %w", name, err)
	}
	defer to.Close()
	cmd := exec.Command(c.path(name), args...)
	cmd.Env = environ(name)
	cmd.Stdout, cmd.Stderr = to, to
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err = cmd.Start(); errors.Is(err, exec.ErrNotFound) {
		err = errNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("slurm: %s: %w", name, err)
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // its output is in the log
		close(done)
	}()
	return done, nil
}

// strayed matches variables that a started job or step must not inherit: those of the job that this
// process runs in, those by which this plugin was started, and the mark by which its descendants
// are killed with it.
var strayed = regexp.MustCompile(`^(SLURM_|SLURMD_|PLUGIN_|` + plan.EnvRunID + `=)`)

// environ returns this process's environment without variables that change the output of the
// commands (SQUEUE_PARTITION, for example, hides jobs), and for sbatch and srun without those that
// a job must not inherit.
func environ(program string) []string {
	starts := program == "sbatch" || program == "srun"
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "SQUEUE_") || strings.HasPrefix(v, "SCONTROL_") || strings.HasPrefix(v, "SCANCEL_") ||
			starts && strayed.MatchString(v) && !strings.HasPrefix(v, "SLURM_CONF=")
	})
	if starts {
		return env
	}
	return append(env, "SLURM_TIME_FORMAT=standard", "SLURM_BITSTR_LEN=0", "LC_ALL=C")
}

// bounded keeps up to maxOutput bytes of what is written to it, and calls end if there is more.
type bounded struct {
	kept bytes.Buffer // not embedded, since its ReadFrom has no bound
	full bool
	end  func() error
}

// Write never fails: end stops the command, not a broken pipe.
func (b *bounded) Write(p []byte) (int, error) {
	if b.full || b.kept.Len()+len(p) > maxOutput {
		if !b.full && b.end != nil {
			_ = b.end() // fails if it has ended by itself
		}
		b.full = true
		return len(p), nil
	}
	return b.kept.Write(p)
}

// last returns the last line.
func (b *bounded) last() string {
	lines := strings.Split(strings.TrimSpace(b.kept.String()), "\n")
	return shorten(strings.TrimSpace(lines[len(lines)-1]))
}
