// Command trainer is a training program for tests and measurements: an elastic program like a
// user's, whose steps reveal any lost or repeated step. Its flags make it die, wait and record what
// it does.
//
//	trainer -log FILE -dir DIR -steps 20 -exit localhost:1@step=5:kill -hold 5,10
//
// Package steplog describes what it computes and records, and faults.go where it can die.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/test/steplog"
)

func main() {
	var s settings
	s.define(flag.CommandLine)
	flag.Parse()
	if err := s.run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "trainer:", err)
		os.Exit(1)
	}
}

// settings are the flags.
type settings struct {
	steps, size  int
	ballast      int
	change       string
	microbatches int
	balance      bool
	commitEvery  int
	stepTime     time.Duration
	log          string
	logAll       bool
	dir          string
	holds        steps
	gates        gates
	faults       faults
	orphan       bool
	local        bool
	chatter      bool
	signals      bool
	stubborn     bool
	async        bool
	struck       bool
	checkpoints  string
	pause        time.Duration // between checkpoints
	print        int
	orphanMark   string
	child        string
	tasks        bool
}

func (s *settings) define(f *flag.FlagSet) {
	f.IntVar(&s.steps, "steps", 20, "steps to take")
	f.IntVar(&s.commitEvery, "commit-every", 1, "steps from one commit to the next")
	f.IntVar(&s.size, "size", steplog.Size, "weights, of 4 bytes each")
	f.IntVar(&s.ballast, "ballast", 0, "MB of other state")
	f.StringVar(&s.change, "ballast-change", "few", "what a step changes of it: none, few (numbers) or all")
	f.IntVar(&s.microbatches, "microbatches", 0, "train by elastic.Steps of so many microbatches, a power of two; most other flags have no effect then")
	f.BoolVar(&s.balance, "balance", false, "with -microbatches, give slower workers fewer")
	f.DurationVar(&s.stepTime, "step-time", 0, "time that a step takes besides communication; negative: that it computes")
	f.StringVar(&s.log, "log", "", "file to which rank 0 appends what it does")
	f.BoolVar(&s.logAll, "log-all", false, "let all ranks append")
	f.StringVar(&s.dir, "dir", "", "folder for marks, by which workers that share a schedule know what has happened")
	f.Var(&s.holds, "hold", "`STEPS` (5,10) after which to wait for a change of hosts")
	f.Var(&s.gates, "gate", "`STEP=FILE`: after that step, wait until FILE exists in the folder -dir (repeatable)")
	f.Var(&s.faults, "exit", "`HOST:SLOT@POINT=N:HOW`: leave there, once in the life of the job (repeatable)")
	f.BoolVar(&s.local, "local", false, "have a state that differs by rank too, and print whose it was first at the end")
	f.BoolVar(&s.chatter, "chatter", false, "print a numbered line at every step, in two pieces")
	f.BoolVar(&s.signals, "signals", false, "print each SIGTERM")
	f.BoolVar(&s.stubborn, "stubborn", false, "ignore SIGTERM, SIGINT and SIGHUP")
	f.BoolVar(&s.async, "async", false, "commit with CommitAsync, and settle before the next step's weights")
	f.BoolVar(&s.struck, "struck", false, "be killed at moments of a commit, as files in the folder -dir say")
	f.StringVar(&s.checkpoints, "checkpoints", "", "folder to which commits are written; -exit and -struck hit no sync then")
	f.IntVar(&s.print, "print", 0, "MB of numbered lines that this worker prints in all, in equal parts at each step")
	f.StringVar(&s.orphanMark, "orphan-number", "", "start a process without an environment that leaves the session and its parent; its last argument is this `NUMBER`")
	f.StringVar(&s.faults.cgroup, "oom-cgroup", "", "`FOLDER` of a memory cgroup with a limit, in which a fault oom happens")
	f.DurationVar(&s.pause, "checkpoint-interval", 0, "least time between two checkpoints; 0: the library's")
	f.StringVar(&s.child, "child", "", "`COMMAND` that a shell runs once this worker has joined")
	f.BoolVar(&s.tasks, "tasks", false, "run tasks while this worker is a spare")
	f.BoolVar(&s.orphan, "orphan", false, "start a process that leaves the session, and never wait for it")
}

// run trains. It returns nil if the process must exit with status 0.
func (s *settings) run(ctx context.Context) error {
	if s.stubborn {
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	}
	if s.orphanMark != "" {
		if err := orphan(s.orphanMark); err != nil {
			return err
		}
	}
	if s.orphan {
		child := exec.Command("sleep", "600")
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := child.Start(); err != nil {
			return err
		}
	}
	if s.signals {
		caught := make(chan os.Signal, 1)
		signal.Notify(caught, syscall.SIGTERM)
		defer signal.Stop(caught)
		go func() {
			for got := range caught {
				fmt.Println("signal:", got)
			}
		}()
	}
	host, slot := os.Getenv("HOROVOD_HOSTNAME"), os.Getenv("HVD_SLOT")
	s.faults.arm(s.dir, host+":"+slot)
	s.faults.liar.prepare()
	if err := s.faults.at("start", 0); err != nil {
		return err
	}
	if s.tasks { // a spare that starts with the job is in Init
		defer serveTasks(ctx)()
	}
	w, err := elastic.Init(ctx)
	if err != nil {
		return expectedEnd(err)
	}
	defer w.Close()
	if s.child != "" {
		child := exec.CommandContext(ctx, "sh", "-c", s.child)
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		if err := child.Run(); err != nil {
			return err
		}
	}
	if err := s.faults.at("init", 0); err != nil {
		return err
	}
	t, err := newTraining(s, w)
	if err != nil {
		return err
	}
	defer t.log.Close()
	train := t.train
	if t.micro != nil {
		train = t.micro.train
	}
	if err := elastic.Run(ctx, t.state, train); err != nil {
		return expectedEnd(err)
	}
	if err := s.faults.at("end", 0); err != nil {
		return err
	}
	return t.finish()
}

// expectedEnd returns nil if the error means an end that was requested.
func expectedEnd(err error) error {
	for _, fine := range []error{elastic.ErrRemoved, elastic.ErrFinished, errLeave} {
		if errors.Is(err, fine) {
			fmt.Println("leaving:", err)
			return nil
		}
	}
	return err
}

// steps is a list of steps.
type steps map[int]bool

func (s *steps) String() string { return "" }

// Set parses a list such as 5,10.
func (s *steps) Set(text string) error {
	*s = make(steps)
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(word)
		if err != nil {
			return err
		}
		(*s)[n] = true
	}
	return nil
}

// gates maps a step to the file for which training waits there.
type gates map[int]string

func (g *gates) String() string { return "" }

// Set parses an entry such as 5=FILE.
func (g *gates) Set(text string) error {
	step, file, ok := strings.Cut(text, "=")
	n, err := strconv.Atoi(step)
	if !ok || err != nil {
		return fmt.Errorf("%q is not STEP=FILE", text)
	}
	if *g == nil {
		*g = make(gates)
	}
	(*g)[n] = file
	return nil
}

// openLog opens the steplog, or returns a writer that discards everything if no file is named.
func (s *settings) openLog() (*os.File, error) {
	path := s.log
	if path == "" {
		path = os.DevNull
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("the log: %w", err)
	}
	return f, nil
}

// line returns a line of the steplog with its common fields. The worker is in a world.
func (t *training) line(event steplog.Event) steplog.Line {
	if t.first < 0 {
		t.first = t.worker.Rank()
	}
	return steplog.Line{
		Time: time.Now().UnixNano(), Event: event, Step: t.at.Step, Chain: steplog.FormatChain(t.at.Chain),
		Rank: t.worker.Rank(), First: t.first, Size: t.worker.Size(), Generation: t.worker.Generation(),
		Host: t.worker.Host(), Slot: t.worker.Slot(), PID: os.Getpid(), Worker: os.Getenv("HVD_INCARNATION"), Run: os.Getenv("HVD_RUN_ID"),
	}
}

// write writes the line if this rank writes a steplog.
func (t *training) write(l steplog.Line) error {
	if l.Rank != 0 && !t.set.logAll {
		return nil
	}
	return l.Append(t.log)
}
