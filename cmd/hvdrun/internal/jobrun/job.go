// Package jobrun runs a job: it begins one or resumes one, and drives it with all that a job has
// beside its driver.
package jobrun

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
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/measure"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/page"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
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

// Run runs the command as the settings say, until it is done, has failed or is stopped. c, if
// not nil, is the claim to the job.
func Run(ctx context.Context, p *cli.Program, s *settings.Settings, command []string, c *Claimed) error {
	log := settings.Logger(p, s)
	fixed, err := hostsource.Fixed(s)
	if err != nil {
		return err
	}
	if s.Hosts != "" && plan.HasSlots(command[0]) {
		return fmt.Errorf("%s: %q, which follows the hosts, would be the command: hosts are separated by commas, without blanks: -H %s,%[2]s",
			s.Origin("hosts"), command[0], s.Hosts)
	}
	size, err := hostsource.Size(s, fixed)
	if err != nil {
		return err
	}
	if err := errors.Join(checkRestart(s, command, size.Elastic), checkJournal(s), hostsource.CheckSlurmTools(s, p.Env)); err != nil {
		return err
	}
	if hostsource.AllLocal(ctx, fixed) {
		if err := checkCommand(s, command[0]); err != nil {
			return err
		}
	}
	if s.OutputDir != "" {
		if err := safefile.MakeDir(s.OutputDir, safefile.Mode(s.Tuning.ShareOutput)); err != nil {
			return fmt.Errorf("%s: %w", s.Origin("output-filename"), err)
		}
		if dir := unshared(s); dir != "" {
			log.Warnf("%s shares nothing in %s, which its owner alone can enter: chmod 755 it", s.Origin("share-output"), dir)
		}
	}
	if names := s.ExposedSecrets(); len(names) > 0 {
		log.Warnf("everybody may read the config file, which holds secrets (%s): chmod 600 it", strings.Join(names, ", "))
	}
	s.RunID = driver.NewRunID()
	j := Spec{Command: command, Fixed: fixed, Size: size}
	if j.Authority, err = identity.NewAuthority(s.RunID); err != nil {
		return cli.Failed(err)
	}
	if j.dir, err = jobdir.New(p, s, command, j.Authority, log); err != nil {
		return err
	}
	switch {
	case c != nil && (j.dir == nil || j.dir.Secrets.Dir == ""):
		return cli.Failed(errors.New("no other node could go on with the job: it has no folder, or no place for its key"))
	case c != nil:
		j.copy = c
		err = c.keep(j.dir, nil)
	case s.Journal.Url != "":
		j.copy, err = beginCopy(ctx, p, s, j.dir, log)
	}
	if err != nil {
		if j.dir != nil {
			j.dir.End(err, log)
		}
		return err
	}
	return Drive(ctx, p, s, j)
}

// unshared returns a folder of the output that others cannot enter, although it is to be shared;
// empty: there is none.
func unshared(s *settings.Settings) string {
	if !s.Tuning.ShareOutput {
		return ""
	}
	ranks, _ := filepath.Glob(filepath.Join(s.OutputDir, "rank.*")) // the pattern is right
	for _, dir := range append([]string{s.OutputDir}, ranks...) {
		if fi, err := os.Stat(dir); err == nil && fi.IsDir() && fi.Mode().Perm()&0o055 != 0o055 {
			return dir
		}
	}
	return ""
}

// checkCommand returns whether workers on this machine can run the program.
func checkCommand(s *settings.Settings, program string) error {
	if s.Dir != "" {
		if fi, err := os.Stat(s.Dir); err != nil {
			return fmt.Errorf("%s: %w", s.Origin("dir"), err)
		} else if !fi.IsDir() {
			return fmt.Errorf("%s: %s is not a folder", s.Origin("dir"), s.Dir)
		}
	}
	here := "./" + strings.TrimPrefix(program, "./")
	if s.Dir != "" {
		here = filepath.Join(s.Dir, program)
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

// Spec is a job that begins, or goes on.
type Spec struct {
	Command   []string
	Fixed     []plan.Host // nil: sources are asked
	Size      job.Size
	Authority *identity.Authority
	dir       *jobdir.Dir         // nil: it has none
	known     []client.KnownAgent // of the driver before
	resumed   bool
	copy      *Claimed // nil: there is none
}

// begun writes down that a job agent has been started.
func (j Spec) begun(k client.KnownAgent) error {
	if err := j.dir.Agents.Begun(k); err != nil || j.copy == nil {
		return err
	}
	return j.copy.begun(k)
}

// ended returns whether the job has ended, and not only its driver.
func (j Spec) ended() bool { return j.dir.About.Ended != nil }

// over returns whether no other driver can go on with the job.
func (j Spec) over() bool {
	if j.dir == nil {
		return true
	}
	job, err := j.dir.Inspect()
	return err == nil && job.Finished
}

// record returns the record of a person's wish to run the job, or to resume it.
func (j Spec) record() audit.Record {
	r := audit.Record{What: "run", Program: j.Command[0], Outcome: audit.Done}
	if j.resumed {
		r.What = "resume"
	}
	if dir, err := os.Getwd(); err == nil {
		r.Dir = dir
	}
	return r
}

// Drive is the job's driver, until the job is done, has failed or is stopped.
func Drive(ctx context.Context, p *cli.Program, s *settings.Settings, j Spec) (err error) {
	log := settings.Logger(p, s)
	s.Trail = audit.NewTrail()
	s.Record(j.record())
	defer cli.Inherit(log, cli.DriverReaps)()
	if j.copy != nil {
		defer func() { j.copy.Release(j.ended()) }()
	}
	if j.dir != nil {
		defer func() {
			if !errors.Is(err, job.ErrDriven) && !errors.Is(err, journal.ErrBehind) {
				j.dir.End(err, log)
			}
		}()
		defer j.dir.Guard(jobdir.SecretPlaces(p.Env), log)()
	}
	source, closeSource, err := openJobSource(s, p.Env, j, log)
	if err != nil {
		return err
	}
	defer closeSource()
	told, err := openOutlets(s, p.Env, log)
	if err != nil {
		return err
	}
	agents, err := hostsource.Agents(s, ctx, j.Authority, j.Fixed, log)
	if err != nil {
		return err
	}
	if j.dir == nil || j.dir.Secrets.Dir == "" {
		agents.Orphan = 0 // there is nothing to wait for
	}
	if j.dir != nil {
		agents.Keep, agents.Begun, agents.Known = true, j.begun, j.known
	}
	launcher := client.New(agents)
	defer launcher.Close()
	output := &launch.Output{Stdout: p.Stdout, Stderr: p.Stderr, Dir: s.OutputDir, Timestamps: s.Timestamps, Log: log}
	output.Shared = s.Tuning.ShareOutput
	kill := func() {
		launcher.Kill()
		output.Hurry()
	}
	stopped := WatchStop(ctx, p, log, kill, s.Timeouts.Drain)
	cfg := driverConfig(p, s, j, log)
	cfg.Source, cfg.Launcher, cfg.Output = source, launcher, output
	told.attach(&cfg)
	closeSides, err := serveSides(s, &cfg, j, told.tracks, log)
	if err != nil {
		return err
	}
	defer closeSides()
	run := driver.Run
	if j.dir != nil {
		cfg.Journal, cfg.Control, cfg.Stop = j.dir.Journal(), j.dir.ControlPath(), p.Stop
		cfg.Mark = told.events.mark
	}
	if j.copy != nil {
		cfg.Mirror = j.copy
	}
	if j.resumed {
		run = driver.Resume
		cfg.Marked, cfg.Replayed = told.events.replay(j.dir.About.EventsFrom)
	} else if !agents.LocalOnly { // agents of this machine are ready when they are needed
		err = hostsource.Prepare(ctx, launcher, j.Fixed, j.Size, log)
	}
	if err == nil {
		size, _ := hostsource.Size(s, j.Fixed) // it was right when the job began
		brought := bring(ctx, source, size, &cfg, log)
		err = run(ctx, cfg)
		brought.end(j.over())
	}
	stopped()
	_ = output.Close() // a failure was logged when it happened
	told.close(p.FlushPatience(), log)
	if err != nil {
		return cli.Failed(err)
	}
	return nil
}

// openJobSource returns the source of a job's hosts, and what closes it.
func openJobSource(s *settings.Settings, env []string, j Spec, log *logrus.Logger) (discovery.Discoverer, func(), error) {
	if err := hostsource.TakeSlurm(s, env, j.dir); err != nil {
		return nil, nil, err
	}
	return hostsource.Open(s, j.Fixed, log)
}

// serveSides serves the job's metrics, tasks and page, and writes down the members of its cluster,
// until the returned function is called.
func serveSides(s *settings.Settings, cfg *driver.Config, j Spec, to *tracks, log *logrus.Logger) (stop func(), err error) {
	closeMetrics, err := measure.Job(s, cfg, j.resumed, log)
	if err != nil {
		return nil, err
	}
	taskEvents := make(chan job.TaskEvent, 256)
	side, closeTasks, err := serveTasks(s, j.dir, j.Authority, j.copy != nil, taskEvents, to, log)
	if err != nil {
		closeMetrics()
		return nil, cli.Failed(err)
	}
	closePage, err := page.Serve(s, j.dir, j.resumed, log)
	if err != nil {
		closeTasks()
		closeMetrics()
		return nil, err
	}
	cfg.Tasks, cfg.TaskEvents, cfg.TasksStatus = side, taskEvents, side.Summary
	endMembers := rememberMembers(s, j.dir, cfg, log)
	return func() {
		endMembers()
		closePage()
		closeTasks()
		closeMetrics()
	}, nil
}

// driverConfig is what the driver needs to know of the job, apart from its source, launcher, output
// and events.
func driverConfig(p *cli.Program, s *settings.Settings, j Spec, log *logrus.Logger) driver.Config {
	return driver.Config{
		RunID:        s.RunID,
		Command:      workerCommand(s, j.Command),
		Env:          s.WorkerEnv(p.Env),
		Dir:          s.Dir,
		RemovalAfter: s.RemovalAfter,
		Authority:    j.Authority,
		Size:         j.Size,
		Blame:        s.Blame,
		Timeouts:     s.Timeouts,
		Tuning:       s.Tuning,
		CoreLimit:    s.CoreLimit,
		Audit:        s.Trail,
		Log:          log,
	}
}

// WatchStop logs what happens when the job is asked to stop, and kills the workers when it is asked
// again. The function it returns ends the watch.
func WatchStop(ctx context.Context, p *cli.Program, log *logrus.Logger, kill func(), grace time.Duration) func() {
	if grace == 0 {
		grace = 30 * time.Second
	}
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-ctx.Done():
			level := logrus.WarnLevel
			if errors.Is(context.Cause(ctx), cli.StopSignal{Signal: syscall.SIGPIPE}) {
				level = logrus.DebugLevel // as silent as others that the end of a pipe ends
			}
			log.Logf(level, "%v: stopping the workers, %v at most, or as long as a last checkpoint grows; again to kill them",
				context.Cause(ctx), grace)
		case <-done:
			return
		}
		for {
			select {
			case <-p.Hurry:
				p.Hurried.Store(true)
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
	lines  cli.Queue
	failed atomic.Bool
	told   int64 // bytes of events since the job began; the driver's

	mu     sync.Mutex
	missed *missedEvents // nil: none, or behind holds them
	behind []byte        // of what was missed
}

func openEvents(s *settings.Settings, log logrus.FieldLogger) (*eventFile, error) {
	if s.EventsFile == "" {
		return nil, nil
	}
	// It may be in a folder where others may make files, such as /tmp.
	f, err := safefile.Append(s.EventsFile, os.O_WRONLY, safefile.Mode(s.Tuning.ShareOutput))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Origin("events-file"), err)
	}
	return newEventFile(f, log), nil
}

func newEventFile(file io.WriteCloser, log logrus.FieldLogger) *eventFile {
	f := &eventFile{file: file, log: log}
	f.lines = cli.Queue{To: (*eventWriter)(f), Most: cli.MaxEvents, Failed: f.fail}
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
	if err := f.lines.Flush(patience); err != nil {
		return err // a writer may still be in the file; the system closes it
	}
	return f.file.Close()
}
