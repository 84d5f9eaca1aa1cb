// Package follow runs whole jobs for tests and measurements, and follows them: the real hvdrun, a
// discovery script whose output depends on training progress, and workers
// (test/trainer) that record their steps.
package follow

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// Programs are the programs of a job.
type Programs struct{ Hvdrun, Trainer, Tasker string }

// Build builds the programs into a directory and blocks until they are complete. Without
// buildFlags, the flags of go build, it uses the builds that other tests and proving grounds share
// (sandbox.Build).
func Build(ctx context.Context, dir string, buildFlags ...string) (Programs, error) {
	packages := []string{"github.com/hvdrun/hvdrun/cmd/hvdrun", "github.com/hvdrun/hvdrun/test/trainer",
		"github.com/hvdrun/hvdrun/test/tasker"}
	programs := Programs{filepath.Join(dir, "hvdrun"), filepath.Join(dir, "trainer"), filepath.Join(dir, "tasker")}
	if len(buildFlags) == 0 {
		return programs, sandbox.Build(dir, packages...)
	}
	args := slices.Concat([]string{"build"}, buildFlags, []string{"-o", dir + string(filepath.Separator)}, packages)
	if out, err := exec.CommandContext(ctx, "go", args...).CombinedOutput(); err != nil {
		return programs, fmt.Errorf("follow: go build: %w\n%s", err, out)
	}
	return programs, nil
}

// Job is a job to run.
type Job struct {
	// Dir is the directory of the job's files, which is empty at first. Name, which may be empty,
	// ends their names, so that several jobs can share a directory.
	Dir, Name string
	// Verb is the subcommand that starts the job. Empty: none.
	Verb []string
	// Flags are hvdrun's flags; the discovery script and the events file are added.
	Flags []string
	// Stages are the outputs of the discovery script. None: no script. When the script first prints
	// stage N (from 0), it creates a file shown.N with the time in nanoseconds since 1970. When it
	// runs again after that, which shows that hvdrun has processed the stage, it creates a file
	// polled.N.
	Stages []Stage
	// Trainer are the flags of the workers; the steplog and the job's directory are added.
	Trainer []string
	// Command, if not empty, is run instead of the trainer.
	Command []string
	// Wrap is a command that runs hvdrun, which is appended. Empty: none.
	Wrap []string
	// Env is added to the environment, from which Unset is removed first.
	Env, Unset []string
	// State is XDG_STATE_HOME. Empty: a directory in Dir.
	State string
	// EventsFile is the path of the events file. Empty: a file in Dir.
	EventsFile string
	// Output is hvdrun's stdout and stderr. Nil: a file in Dir.
	Output *os.File
	// Marks are entries of the environment or arguments of further processes of the job.
	Marks []string
	// Still is the time without progress after which all processes dump their stacks and are
	// killed. 0: [Patience]; a job of a test has no such limit. Progress is a step or an event,
	// output of a Command, and a change of what Progress returns, if it is set. The whole job has
	// no time limit.
	Still    time.Duration
	Progress func() int64
}

// StepLogPath returns the path of the workers' steplog.
func (j *Job) StepLogPath() string { return j.path("steplog") }

// OutputPath returns the path of hvdrun's stdout and stderr.
func (j *Job) OutputPath() string { return j.path("output") }

// EventsPath returns the path of hvdrun's events file.
func (j *Job) EventsPath() string { return cmp.Or(j.EventsFile, j.path("events")) }

// StateDir returns the directory in which hvdrun keeps its jobs' directories.
func (j *Job) StateDir() string { return cmp.Or(j.State, j.path("state")) }

// RuntimeDir returns XDG_RUNTIME_DIR, in which hvdrun keeps its jobs' keys.
func (j *Job) RuntimeDir() string { return j.path("run") }

func (j *Job) path(name string) string { return filepath.Join(j.Dir, name+j.Name) }

// environment returns the environment of hvdrun and of its subcommands.
func (j *Job) environment() []string {
	env := append(os.Environ(), "XDG_STATE_HOME="+j.StateDir(), "XDG_RUNTIME_DIR="+j.RuntimeDir())
	env = slices.DeleteFunc(env, func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		return slices.Contains(j.Unset, name)
	})
	return append(env, j.Env...)
}

// args returns hvdrun's arguments.
func (j *Job) args(p Programs) ([]string, error) {
	args := slices.Concat(j.Verb, []string{"--events-file", j.EventsPath()}, j.Flags)
	if len(j.Stages) > 0 {
		path := filepath.Join(j.Dir, "discover.sh")
		if err := sandbox.WriteProgram(path, []byte(j.script())); err != nil {
			return nil, fmt.Errorf("follow: %w", err)
		}
		args = append(args, "--host-discovery-script", "exec '"+path+"'")
	}
	if len(j.Command) > 0 {
		return append(append(args, "--"), j.Command...), nil
	}
	args = append(args, "--", p.Trainer, "-log", j.StepLogPath(), "-dir", j.Dir)
	return append(args, j.Trainer...), nil
}
