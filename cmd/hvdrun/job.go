package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/audit"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/driver/launch"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
)

// runJob runs the command as the settings say, until it is done, has failed or is stopped. c, if
// not nil, is the claim to the job.
func (p *program) runJob(ctx context.Context, s *settings, command []string, c *claimed) error {
	log := p.logger(s)
	fixed, err := s.fixedHosts()
	if err != nil {
		return err
	}
	if s.hosts != "" && plan.HasSlots(command[0]) {
		return fmt.Errorf("%s: %q, which follows the hosts, would be the command: hosts are separated by commas, without blanks: -H %s,%[2]s",
			s.origin("hosts"), command[0], s.hosts)
	}
	size, err := s.size(fixed)
	if err != nil {
		return err
	}
	if err := errors.Join(s.checkRestart(command, size.Elastic), s.checkJournal(), s.checkSlurmTools(p.env)); err != nil {
		return err
	}
	if allLocal(ctx, fixed) {
		if err := s.checkCommand(command[0]); err != nil {
			return err
		}
	}
	if s.outputDir != "" {
		if err := safefile.MakeDir(s.outputDir, safefile.Mode(s.tuning.ShareOutput)); err != nil {
			return fmt.Errorf("%s: %w", s.origin("output-filename"), err)
		}
		if dir := s.unshared(); dir != "" {
			log.Warnf("%s shares nothing in %s, which its owner alone can enter: chmod 755 it", s.origin("share-output"), dir)
		}
	}
	if names := s.exposedSecrets(); len(names) > 0 {
		log.Warnf("everybody may read the config file, which holds secrets (%s): chmod 600 it", strings.Join(names, ", "))
	}
	s.runID = driver.NewRunID()
	j := jobRun{command: command, fixed: fixed, size: size}
	if j.authority, err = identity.NewAuthority(s.runID); err != nil {
		return workFailed(err)
	}
	if j.dir, err = p.newJobDir(s, command, j.authority, log); err != nil {
		return err
	}
	switch {
	case c != nil && (j.dir == nil || j.dir.secrets.dir == ""):
		return workFailed(errors.New("no other node could go on with the job: it has no folder, or no place for its key"))
	case c != nil:
		j.copy = c
		err = c.keep(j.dir, nil)
	case s.journal.url != "":
		j.copy, err = p.beginCopy(ctx, s, j.dir, log)
	}
	if err != nil {
		if j.dir != nil {
			j.dir.end(err, log)
		}
		return err
	}
	return p.drive(ctx, s, j)
}

// unshared returns a folder of the output that others cannot enter, although it is to be shared;
// empty: there is none.
func (s *settings) unshared() string {
	if !s.tuning.ShareOutput {
		return ""
	}
	ranks, _ := filepath.Glob(filepath.Join(s.outputDir, "rank.*")) // the pattern is right
	for _, dir := range append([]string{s.outputDir}, ranks...) {
		if fi, err := os.Stat(dir); err == nil && fi.IsDir() && fi.Mode().Perm()&0o055 != 0o055 {
			return dir
		}
	}
	return ""
}

// checkCommand returns whether workers on this machine can run the program.
func (s *settings) checkCommand(program string) error {
	if s.dir != "" {
		if fi, err := os.Stat(s.dir); err != nil {
			return fmt.Errorf("%s: %w", s.origin("dir"), err)
		} else if !fi.IsDir() {
			return fmt.Errorf("%s: %s is not a folder", s.origin("dir"), s.dir)
		}
	}
	here := "./" + strings.TrimPrefix(program, "./")
	if s.dir != "" {
		here = filepath.Join(s.dir, program)
	}
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = here
	}
	_, err := exec.LookPath(program)
	if errors.Is(err, exec.ErrNotFound) && !strings.Contains(program, "/") { // launch.Local looks there too
		_, hereErr := exec.LookPath(here)
		if hereErr == nil {
			return nil
		} else if errors.Is(hereErr, fs.ErrPermission) {
			program, err = here, hereErr
		}
	}
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return fmt.Errorf("the command cannot be run: %w", proc.ExplainStart(err, program))
	}
	return nil
}

// workerEnv is what workers inherit: the variables of the person, and before these those of the
// file.
func (s *settings) workerEnv(env []string) []string {
	env = slices.Clone(env)
	for _, e := range s.env {
		name, _, _ := strings.Cut(e, "=")
		env = slices.DeleteFunc(env, func(old string) bool { return strings.HasPrefix(old, name+"=") })
		env = append(env, e)
	}
	return env
}

// jobRun is a job that begins, or goes on.
type jobRun struct {
	command   []string
	fixed     []plan.Host // nil: sources are asked
	size      job.Size
	authority *identity.Authority
	dir       *jobDir             // nil: it has none
	known     []client.KnownAgent // of the driver before
	resumed   bool
	copy      *claimed // nil: there is none
}

// begun writes down that a job agent has been started.
func (j jobRun) begun(k client.KnownAgent) error {
	if err := j.dir.agents.Begun(k); err != nil || j.copy == nil {
		return err
	}
	return j.copy.begun(k)
}

// ended returns whether the job has ended, and not only its driver.
func (j jobRun) ended() bool { return j.dir.about.Ended != nil }

// over returns whether no other driver can go on with the job.
func (j jobRun) over() bool {
	if j.dir == nil {
		return true
	}
	job, err := j.dir.inspect()
	return err == nil && job.Finished
}

// record returns the record of a person's wish to run the job, or to resume it.
func (j jobRun) record() audit.Record {
	r := audit.Record{What: "run", Program: j.command[0], Outcome: audit.Done}
	if j.resumed {
		r.What = "resume"
	}
	if dir, err := os.Getwd(); err == nil {
		r.Dir = dir
	}
	return r
}

// record keeps a record of what this process does for its job, if it has one.
func (s *settings) record(r audit.Record) {
	if s.trail == nil {
		return
	}
	if r.Who == (audit.Who{}) {
		r.Who = audit.Self("", s.runID)
	}
	s.trail.Add(r)
}

// drive is the job's driver, until the job is done, has failed or is stopped.
func (p *program) drive(ctx context.Context, s *settings, j jobRun) (err error) {
	log := p.logger(s)
	s.trail = audit.NewTrail()
	s.record(j.record())
	defer inherit(log, driverReaps)()
	if j.copy != nil {
		defer func() { j.copy.release(j.ended()) }()
	}
	if j.dir != nil {
		defer func() {
			if !errors.Is(err, job.ErrDriven) && !errors.Is(err, journal.ErrBehind) {
				j.dir.end(err, log)
			}
		}()
		defer j.dir.guard(secretPlaces(p.env), log)()
	}
	source, closeSource, err := s.openJobSource(p.env, j, log)
	if err != nil {
		return err
	}
	defer closeSource()
	told, err := openOutlets(s, p.env, log)
	if err != nil {
		return err
	}
	agents, err := s.agents(ctx, j.authority, j.fixed, log)
	if err != nil {
		return err
	}
	if j.dir == nil || j.dir.secrets.dir == "" {
		agents.Orphan = 0 // there is nothing to wait for
	}
	if j.dir != nil {
		agents.Keep, agents.Begun, agents.Known = true, j.begun, j.known
	}
	launcher := client.New(agents)
	defer launcher.Close()
	output := &launch.Output{Stdout: p.stdout, Stderr: p.stderr, Dir: s.outputDir, Timestamps: s.timestamps, Log: log}
	output.Shared = s.tuning.ShareOutput
	kill := func() {
		launcher.Kill()
		output.Hurry()
	}
	stopped := p.watchStop(ctx, log, kill, s.timeouts.Drain)
	cfg := p.driverConfig(s, j, log)
	cfg.Source, cfg.Launcher, cfg.Output = source, launcher, output
	told.attach(&cfg)
	closeSides, err := s.serveSides(&cfg, j, told.tracks, log)
	if err != nil {
		return err
	}
	defer closeSides()
	run := driver.Run
	if j.dir != nil {
		cfg.Journal, cfg.Control, cfg.Stop = j.dir.journal(), j.dir.controlPath(), p.stop
		cfg.Mark = told.events.mark
	}
	if j.copy != nil {
		cfg.Mirror = j.copy
	}
	if j.resumed {
		run = driver.Resume
		cfg.Marked, cfg.Replayed = told.events.replay(j.dir.about.EventsFrom)
	} else if !agents.LocalOnly { // agents of this machine are ready when they are needed
		err = prepare(ctx, launcher, j.fixed, j.size, log)
	}
	if err == nil {
		size, _ := s.size(j.fixed) // it was right when the job began
		brought := bring(ctx, source, size, &cfg, log)
		err = run(ctx, cfg)
		brought.end(j.over())
	}
	stopped()
	_ = output.Close() // a failure was logged when it happened
	told.close(p.flushPatience(), log)
	if err != nil {
		return workFailed(err)
	}
	return nil
}

// openJobSource returns the source of a job's hosts, and what closes it.
func (s *settings) openJobSource(env []string, j jobRun, log *logrus.Logger) (discovery.Discoverer, func(), error) {
	if err := s.takeSlurm(env, j.dir); err != nil {
		return nil, nil, err
	}
	return s.openSource(j.fixed, log)
}

// serveSides serves the job's metrics, tasks and page, and writes down the members of its cluster,
// until the returned function is called.
func (s *settings) serveSides(cfg *driver.Config, j jobRun, to *tracks, log *logrus.Logger) (stop func(), err error) {
	closeMetrics, err := s.measureJob(cfg, j.resumed, log)
	if err != nil {
		return nil, err
	}
	taskEvents := make(chan job.TaskEvent, 256)
	side, closeTasks, err := s.serveTasks(j.dir, j.authority, j.copy != nil, taskEvents, to, log)
	if err != nil {
		closeMetrics()
		return nil, workFailed(err)
	}
	closePage, err := s.servePage(j.dir, j.resumed, log)
	if err != nil {
		closeTasks()
		closeMetrics()
		return nil, err
	}
	cfg.Tasks, cfg.TaskEvents, cfg.TasksStatus = side, taskEvents, side.Summary
	endMembers := s.rememberMembers(j.dir, cfg, log)
	return func() {
		endMembers()
		closePage()
		closeTasks()
		closeMetrics()
	}, nil
}

// driverConfig is what the driver needs to know of the job, apart from its source, launcher, output
// and events.
func (p *program) driverConfig(s *settings, j jobRun, log *logrus.Logger) driver.Config {
	return driver.Config{
		RunID:        s.runID,
		Command:      s.workerCommand(j.command),
		Env:          s.workerEnv(p.env),
		Dir:          s.dir,
		RemovalAfter: s.removalAfter,
		Authority:    j.authority,
		Size:         j.size,
		Blame:        s.blame,
		Timeouts:     s.timeouts,
		Tuning:       s.tuning,
		CoreLimit:    s.coreLimit,
		Audit:        s.trail,
		Log:          log,
	}
}

// watchStop logs what happens when the job is asked to stop, and kills the workers when it is asked
// again. The function it returns ends the watch.
func (p *program) watchStop(ctx context.Context, log *logrus.Logger, kill func(), grace time.Duration) func() {
	if grace == 0 {
		grace = 30 * time.Second
	}
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-ctx.Done():
			level := logrus.WarnLevel
			if errors.Is(context.Cause(ctx), stopSignal{Signal: syscall.SIGPIPE}) {
				level = logrus.DebugLevel // as silent as others that the end of a pipe ends
			}
			log.Logf(level, "%v: stopping the workers, %v at most, or as long as a last checkpoint grows; again to kill them",
				context.Cause(ctx), grace)
		case <-done:
			return
		}
		for {
			select {
			case <-p.hurry:
				p.hurried.Store(true)
				log.Warn("killing the workers")
				kill()
			case <-done:
				return
			}
		}
	})
	return func() {
		close(done)
		watching.Wait()
	}
}

// eventFile writes the events of a job, one JSON object a line. A nil file takes none.
type eventFile struct {
	file   io.WriteCloser
	log    logrus.FieldLogger
	lines  queue
	failed atomic.Bool
	told   int64 // bytes of events since the job began; the driver's

	mu     sync.Mutex
	missed *missedEvents // nil: none, or behind holds them
	behind []byte        // of what was missed
}

func openEvents(s *settings, log logrus.FieldLogger) (*eventFile, error) {
	if s.eventsFile == "" {
		return nil, nil
	}
	// It may be in a folder where others may make files, such as /tmp.
	f, err := safefile.Append(s.eventsFile, os.O_WRONLY, safefile.Mode(s.tuning.ShareOutput))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.origin("events-file"), err)
	}
	return newEventFile(f, log), nil
}

func newEventFile(file io.WriteCloser, log logrus.FieldLogger) *eventFile {
	f := &eventFile{file: file, log: log}
	f.lines = queue{to: (*eventWriter)(f), most: maxEvents, failed: f.fail}
	return f
}

// write appends the event soon, in the order of the calls; it does not wait for the file. What
// cannot be written is tried again.
func (f *eventFile) write(e job.Event) {
	if f == nil {
		return
	}
	line, err := json.Marshal(e)
	if err != nil {
		f.fail(err)
		return
	}
	f.told += int64(len(line) + 1)
	_, _ = f.lines.Write(append(line, '\n')) // never fails
}

// fail logs the first failure; the job goes on.
func (f *eventFile) fail(err error) {
	if !f.failed.Swap(true) {
		f.log.WithError(err).Error("the events file misses events; the job goes on")
	}
}

// eventWriter is an eventFile for its queue.
type eventWriter eventFile

// Write appends what a driver before has missed, and text.
func (f *eventWriter) Write(text []byte) (int, error) {
	f.mu.Lock()
	m := f.missed
	f.mu.Unlock()
	if m != nil {
		behind := m.take(f.log)
		f.mu.Lock()
		f.missed, f.behind = nil, behind
		f.mu.Unlock()
	}
	for len(f.behind) > 0 { // only this goroutine changes it
		n, err := f.file.Write(f.behind)
		f.mu.Lock()
		f.behind = f.behind[n:]
		f.mu.Unlock()
		if err != nil {
			return 0, err
		}
	}
	n, err := f.file.Write(text)
	if err == nil && f.failed.Swap(false) {
		f.log.Info("the events file is written again")
	}
	return n, err
}

// close waits until all events are written, or the file has taken nothing for the patience.
func (f *eventFile) close(patience time.Duration) error {
	if f == nil {
		return nil
	}
	if err := f.lines.flush(patience); err != nil {
		return err // a writer may still be in the file; the system closes it
	}
	return f.file.Close()
}
