package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
)

// littering is a worker command that leaves short-lived processes behind.
const littering = `for t in 0.1 0.3 0.6; do (sleep $t &); done; exec "$0" "$@"`

// playInit runs hvdrun as PID 1 of a PID namespace, where all orphans become its children.
func playInit(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.job()
	if err != nil {
		return err
	}
	j.plan.Wrap = []string{"unshare", "--fork", "--pid", "--mount-proc", "--kill-child"}
	j.plan.Command = slices.Concat([]string{"sh", "-c", littering, t.programs.Trainer, "-log", j.plan.StepLogPath(), "-dir", t.dir}, j.plan.Trainer)
	if err := j.train(ctx, 3); err != nil {
		return err
	}
	if err := t.kills(ctx, j, 2); err != nil {
		return err
	}
	dead := zombies(j.PID)
	if !follow.Poll(func() bool {
		now := zombies(j.PID)
		dead = slices.DeleteFunc(dead, func(pid int) bool { return !slices.Contains(now, pid) })
		return len(dead) == 0 || ctx.Err() != nil
	}) {
		return fmt.Errorf("%d processes have ended and have not been reaped", len(dead))
	}
	if _, err := j.must(ctx, "status"); err != nil {
		return err
	}
	j.signal(syscall.SIGINT)
	return j.end(ctx, interrupted)
}

// zombies returns the descendants of a process that have ended without being reaped.
func zombies(root int) []int {
	parents, dead := make(map[int]int), []int(nil)
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if err != nil || len(fields) < 2 {
			continue
		}
		parents[pid], _ = strconv.Atoi(fields[1])
		if fields[0] == "Z" {
			dead = append(dead, pid)
		}
	}
	return slices.DeleteFunc(dead, func(pid int) bool {
		for pid != 0 && pid != root {
			pid = parents[pid]
		}
		return pid != root
	})
}

// playHome runs a job and commands of a user without a home directory.
func playHome(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.job()
	if err != nil {
		return err
	}
	j.plan.Unset = []string{"HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"}
	if t.How == "unwritable" {
		j.plan.Env = append(j.plan.Env, "HOME=/proc/nobody")
	}
	if t.Seed%2 == 0 {
		run := filepath.Join(t.dir, "run")
		if err := os.Mkdir(run, 0o700); err != nil {
			return err
		}
		j.plan.Env = append(j.plan.Env, "XDG_RUNTIME_DIR="+run)
	}
	if err := j.train(ctx, 3); err != nil {
		return err
	}
	id := j.RunID()
	t.undo = append(t.undo, func() error { return removeFolders(id) })
	out, err := j.must(ctx, "jobs")
	if err != nil {
		return err
	}
	if !strings.Contains(out, id[:8]) {
		return fmt.Errorf("hvdrun jobs does not tell of job %s:\n%s", id, out)
	}
	for _, word := range []string{"status", "stop"} {
		if _, err := j.must(ctx, word); err != nil {
			return err
		}
	}
	return j.end(ctx, terminated)
}

// removeFolders removes the job's directories among the temporary files and in /tmp, where hvdrun
// keeps a job that has no other place.
func removeFolders(id string) error {
	var errs []error
	for _, temp := range []string{"/tmp", os.TempDir()} {
		for _, below := range []string{"", "*", "*/*", "*/*/*"} {
			found, err := filepath.Glob(filepath.Join(temp, "hvdrun*", below, id))
			errs = append(errs, err)
			for _, path := range found {
				errs = append(errs, os.RemoveAll(path))
			}
		}
	}
	return errors.Join(errs...)
}

// playSix runs a job on a machine without 127.0.0.1.
func playSix(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	j.plan.Wrap = []string{"unshare", "--net", "sh", "-c", `ip link set lo up && ip -4 addr flush dev lo && exec "$0" "$@"`}
	j.source() // localhost
	if err := j.start(); err != nil {
		return err
	}
	return j.end(ctx)
}

// playOrphans runs workers that leave processes behind. Only an argument shows that these belong to
// the job.
func playOrphans(ctx context.Context, t *trial) error {
	if t.How != "done" {
		t.Steps = 0
	}
	j, err := t.job()
	if err != nil {
		return err
	}
	j.worker("-orphan-number", j.plan.Marks[0])
	if err := j.start(); err != nil {
		return err
	}
	if t.How == "done" {
		return j.end(ctx)
	}
	if err := j.trained(ctx, 3); err != nil {
		return err
	}
	if t.How == "killed" {
		if err := t.kills(ctx, j, 1); err != nil {
			return err
		}
	}
	return j.stop(ctx)
}

// playDone makes a worker hang after it has reported done.
func playDone(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	if flag := "--exit-timeout"; t.has(flag) {
		j.flag(flag, "10s")
	}
	j.flag("--finish-timeout", "10s", "--drain-timeout", "2s")
	j.worker("-exit", t.slot(t.dice.IntN(t.Workers))+"@end=0:hang")
	if err := j.start(); err != nil {
		return err
	}
	return j.end(ctx)
}

// playLinks runs a job on a cluster of three agents, each in a network namespace, and disconnects
// one of them, or the driver's host, for a time.
func playLinks(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.job()
	if err != nil {
		return err
	}
	n, err := j.cluster(ctx)
	if err != nil {
		return err
	}
	n.have(j)
	if err := j.start(); err != nil {
		return err
	}
	if err := j.full(ctx, 0); err != nil {
		return err
	}
	if err := j.cut(ctx, n, t.dice.IntN(t.setup.Hosts)); err != nil {
		return err
	}
	if err := n.cable("driver", "down"); err != nil {
		return err
	}
	if err := follow.Sleep(ctx, time.Duration(500+t.dice.IntN(3000))*time.Millisecond); err != nil {
		return err
	}
	if err := n.cable("driver", "up"); err != nil {
		return err
	}
	generation := j.Generation
	if err := j.trained(ctx, 5); err != nil {
		return err
	}
	if err := j.full(ctx, generation-1); err != nil {
		return err
	}
	j.signal(syscall.SIGINT)
	return j.endAmong(ctx, interrupted)
}

// cluster is a network of agents, which find each other by gossip, and a host for hvdrun. It runs
// one job at a time.
type cluster struct {
	*network
	flags []string // of hvdrun
	marks []string // of agents and jobs
}

// cluster starts agents with slots for the job's workers and spares, the same number on each host.
func (j *job) cluster(ctx context.Context) (*cluster, error) {
	t := j.trial
	key, err := t.key(ctx)
	if err != nil {
		return nil, err
	}
	n, err := t.network()
	if err != nil {
		return nil, err
	}
	var seeds []string
	for i := range j.setup.Hosts {
		addr, err := n.add(fmt.Sprintf("h%d", i))
		if err != nil {
			return nil, err
		}
		seeds = append(seeds, addr)
	}
	join := strings.Join(seeds, ",")
	for i, h := range n.hosts {
		words := append(n.on(h), t.programs.Hvdrun, "agent", "--key-file", key, "--label", "prove", "--name", h,
			"--slots", strconv.Itoa((j.Workers+j.Spares)/j.setup.Hosts), "--join", join, "--bind", seeds[i])
		if _, err := t.background(j, h, words); err != nil {
			return nil, err
		}
		if err := t.said(ctx, h, "gossip at"); err != nil {
			return nil, err
		}
	}
	addr, err := n.add("driver")
	return &cluster{n, []string{"--gossip-join", join, "--gossip-key-file", key, "--gossip-label", "prove",
		"--gossip-bind", addr + ":0", "--drain-timeout", "5s"}, j.plan.Marks}, err
}

// have prepares a job to run on the cluster.
func (c *cluster) have(j *job) {
	j.source(c.flags...)
	j.plan.Wrap, j.plan.Marks = c.on("driver"), c.marks
}

// cut disconnects a host until the others train without it, and waits until it is back.
func (j *job) cut(ctx context.Context, n *cluster, i int) error {
	generation := j.Generation
	if err := n.cable(n.hosts[i], "down"); err != nil {
		return err
	}
	left := j.Workers - j.Workers/j.setup.Hosts
	err := j.Until(ctx, "steps of the hosts that are not cut off", func() bool { return j.Generation > generation && j.World.Size == left })
	if err := errors.Join(err, j.trained(ctx, 10), n.cable(n.hosts[i], "up")); err != nil {
		return err
	}
	return j.full(ctx, j.Generation)
}

// endAmong is like end, for a job on a cluster whose agents continue: only workers must have ended.
func (j *job) endAmong(ctx context.Context, status int) error {
	if err := j.Until(ctx, "the end", j.Over); err != nil {
		return err
	}
	if !follow.Poll(func() bool { return len(j.processes(j.trial.programs.Trainer)) == 0 || ctx.Err() != nil }) {
		return fmt.Errorf("workers are left: %v", j.processes(j.trial.programs.Trainer))
	}
	if j.Status() != status {
		return fmt.Errorf("exit status %d, want %d", j.Status(), status)
	}
	return errors.Join(j.Look(), j.checkStepLog())
}

// key writes the key of a new cluster into a file and returns its path.
func (t *trial) key(ctx context.Context) (string, error) {
	path := filepath.Join(t.dir, "key")
	if out, err := exec.CommandContext(ctx, t.programs.Hvdrun, "agent", "--generate-key", path).CombinedOutput(); err != nil {
		return "", fmt.Errorf("hvdrun agent --generate-key: %w: %s", err, out)
	}
	return path, nil
}

// background starts a process of the job beside hvdrun. Its output is written to a file with its
// name. stop ends it with SIGTERM and waits for it; the end of the case kills it.
func (t *trial) background(j *job, name string, words []string) (stop func() error, err error) {
	out, err := os.Create(filepath.Join(t.dir, name+".output"))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Env = append(append(os.Environ(), "XDG_STATE_HOME="+j.plan.StateDir()), append(j.plan.Env, j.plan.Marks...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = t.dir, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	wait := sync.OnceValue(cmd.Wait)
	t.undo = append(t.undo, func() error {
		_ = cmd.Process.Kill() // it may have ended
		_ = wait()             // after the kill
		return nil
	})
	return func() error {
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), wait()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}, nil
}

// said waits until a background process has printed the text.
func (t *trial) said(ctx context.Context, name, text string) error {
	for {
		out, err := os.ReadFile(filepath.Join(t.dir, name+".output"))
		if err != nil || bytes.Contains(out, []byte(text)) {
			return err
		}
		if err := follow.Sleep(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("%s does not print %q: %w", name, text, err)
		}
	}
}
