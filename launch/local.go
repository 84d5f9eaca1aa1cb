package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

// Local runs workers on this machine. The zero value is ready.
//
// A worker leads its own process group, and the kernel kills it when the driver dies. Its children
// are not killed by the kernel; proc.Guard ends them. If cgroups of version 2 can be made, a worker
// has its own cgroup, and all processes in it end with the worker. Otherwise, after an exit that
// was not requested, Local looks for children that left the process group only if they keep the
// output open: that search reads all of /proc and would delay the report of the exit.
type Local struct{}

// starting is held from the opening of a process's files until the child has its own copies. A
// start needs twice the descriptors that it keeps, so only one process at a time does.
var starting sync.Mutex

var _ Launcher = Local{}

// Run implements Launcher.
func (Local) Run(ctx context.Context, s *Spec, started func(pid int)) error {
	if err := context.Cause(ctx); err != nil {
		return NewStartError(s, err)
	}
	path, err := lookUp(s)
	if err != nil {
		return NewStartError(s, err)
	}
	var words proc.LastWords
	out, talk, tree, err := start(path, s, &words)
	defer talk.close()
	if err != nil {
		return NewStartError(s, err)
	}
	defer tree.Release()
	if started != nil {
		started(tree.PID) // before its output comes
	}
	talk.start(ctx, tree.PID)
	out.start()
	status, ended := tree.Wait(ctx, proc.Stop{
		Grace: s.Grace, Signal: s.Signal, Hurry: s.Hurry, More: s.More, Dying: s.Dying, Look: s.Look,
		Closed: talk.closed(),
	})
	talk.end()
	if left := tree.Left(); len(left) > 0 && ended && status.Exited() && status.ExitStatus() == 0 && s.Left != nil {
		s.Left(left)
	}
	end := exitError(status, tree.Why())
	if !ended {
		end = newUnkillable(tree.PID)
	}
	if s.Ended != nil {
		s.Ended(end)
	}
	if ended {
		out.drain(tree.Sweep)
	} else {
		out.abandon()
	}
	return explain(end, &words)
}

// start starts the process and copies its standard error to words too. The caller closes the talk,
// also after an error.
func start(path string, s *Spec, words *proc.LastWords) (out *pipes, t *talk, tree *proc.Tree, err error) {
	starting.Lock()
	defer starting.Unlock()
	stderr := io.Writer(words)
	if s.Stderr != nil {
		stderr = io.MultiWriter(words, s.Stderr)
	}
	if out, err = newPipes(s.Stdin, s.Stdout, stderr, s.As); err != nil {
		return nil, nil, nil, err
	}
	t, env, err := newTalk(s, &out.child)
	if err == nil {
		tree, err = fork(path, s, env, out.child)
	}
	out.closeChild()
	if err != nil {
		out.closeOurs()
	}
	return out, t, tree, err
}

func fork(path string, s *Spec, env []string, files []uintptr) (*proc.Tree, error) {
	c := proc.Command{
		Path: path, Args: s.Command, Env: env, Dir: s.Dir, Files: files, CoreLimit: s.CoreLimit,
		User: (*proc.User)(s.As), Cgroup: s.Cgroup,
	}
	if s.Incarnation != "" {
		c.Mark = plan.EnvIncarnation + "=" + s.Incarnation
	}
	tree, err := proc.Fork(c)
	return tree, (*proc.User)(s.As).Explain(proc.ExplainStart(err, inDir(s.Dir, path)), s.Dir, path)
}

// lookUp finds the program as a shell with the worker's environment would. If PATH does not have
// it, lookUp tries the working directory, as mpirun does.
func lookUp(s *Spec) (string, error) {
	if len(s.Command) == 0 || s.Command[0] == "" {
		return "", errors.New("the command is empty")
	}
	if s.Dir != "" {
		if fi, err := os.Stat(s.Dir); err != nil {
			return "", fmt.Errorf("the working directory must exist on every host (it is the one in which hvdrun was started, or dir of the job's file): %w", err)
		} else if !fi.IsDir() {
			return "", fmt.Errorf("the working directory %s is not a directory", s.Dir)
		}
	}
	name := s.Command[0]
	if strings.Contains(name, "/") {
		return name, nil
	}
	search := "/usr/local/bin:/usr/bin:/bin"
	for _, entry := range s.Env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			search = value
		}
	}
	cause := errors.New("found neither in PATH nor in its working directory")
	for _, dir := range append(filepath.SplitList(search), "") {
		path := filepath.Join(dir, name)
		if !filepath.IsAbs(path) {
			path = "./" + path // relative to Dir, where the child looks
		}
		at := inDir(s.Dir, path)
		fi, err := os.Stat(at)
		if err != nil || fi.IsDir() {
			continue
		}
		if unix.Access(at, unix.X_OK) == nil {
			return path, nil
		}
		cause = fmt.Errorf("%s: %w", path, os.ErrPermission)
	}
	return "", cause
}

// inDir returns the file that path names for a process whose working directory is dir.
func inDir(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

// lastOfEach keeps the last entry of each name: programs differ in which of several entries they
// use.
func lastOfEach(env []string) []string {
	last := make(map[string]int, len(env))
	for i, entry := range env {
		name, _, _ := strings.Cut(entry, "=")
		last[name] = i
	}
	kept := make([]string, 0, len(last))
	for i, entry := range env {
		if name, _, _ := strings.Cut(entry, "="); last[name] == i {
			kept = append(kept, entry)
		}
	}
	return kept
}
