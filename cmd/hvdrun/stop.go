package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// stopJob has the job's driver stop it, or ends the workers of a job whose driver is gone.
func (p *program) stopJob(ctx context.Context, name string, now bool) error {
	d, err := theJob(p.env, name)
	if err != nil {
		if d = damagedJob(p.env, name); d == nil {
			return err
		}
	}
	for try := 1; ; try++ {
		err = p.orderOf(ctx, d, job.Command{Verb: job.Stop, Now: now})
		var gone *errNoDriver
		if !errors.As(err, &gone) || gone.ended || d.about.Ended != nil {
			return err
		}
		if err = p.endWorkers(ctx, d, now); !errors.Is(err, journal.ErrLocked) {
			return err
		} else if try == lockTries { // otherwise a driver is about to go on with the job
			return workFailed(fmt.Errorf("job %s has a driver that does not answer: end that process first", d.about.RunID))
		}
		select {
		case <-time.After(lockPause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// damagedJob returns the folder of a job whose job.json is not there or makes no sense, as far as
// it can be told from what else is there; nil where that is nothing.
func damagedJob(env []string, name string) *jobDir {
	path := name
	if !strings.ContainsRune(name, filepath.Separator) {
		paths, _, _ := jobEntries(env) // none: there is nothing
		i := slices.IndexFunc(paths, func(path string) bool { return filepath.Base(path) == name })
		if name == "" || i < 0 {
			return nil
		}
		path = paths[i]
	}
	d := &jobDir{path: path}
	f, err := safefile.Read(d.agentsPath())
	if err != nil {
		return nil
	}
	defer f.Close()
	d.about.RunID, _, err = journal.Read(f, func([]byte) error { return nil })
	if err != nil && d.about.RunID == "" {
		d.about.RunID = filepath.Base(path)
	}
	return d
}

// endWorkers has the agents that the job's drivers have started end the workers and themselves. It
// looks at neither the journal nor job.json, which may be damaged. It returns journal.ErrLocked
// where the job has a driver.
func (p *program) endWorkers(ctx context.Context, d *jobDir, now bool) error {
	authority, known, err := d.open(p.env)
	switch {
	case errors.Is(err, journal.ErrLocked):
		return err
	case err != nil && authority == nil || len(known) == 0 && err != nil:
		return workFailed(fmt.Errorf("job %s: what its agents are reached with cannot be read, they end its workers after --orphan-timeout: %w",
			d.about.RunID, err))

	case err != nil:
		p.logger(&settings{outputSettings: outputSettings{logLevel: logrus.WarnLevel}}).WithError(err).Warn("some agents may be unknown")
	}
	latest := make(map[string]client.KnownAgent) // of two on one host the later counts
	for _, k := range known {
		latest[k.Host] = k
	}
	var mu sync.Mutex
	var failed []error
	workers := 0
	var ending sync.WaitGroup
	for _, k := range latest {
		ending.Go(func() {
			n, err := client.EndRun(ctx, authority, k, now)
			mu.Lock()
			defer mu.Unlock()
			workers += n
			if err != nil {
				failed = append(failed, err)
			}
		})
	}
	ending.Wait()
	if len(failed) > 0 {
		return workFailed(fmt.Errorf("job %s: workers may be left, which their agents end after --orphan-timeout: %w",
			d.about.RunID, errors.Join(failed...)))

	}
	fmt.Fprintf(p.stdout, "job %s had no driver: %d workers on %d hosts have ended\n", d.about.RunID, workers, len(latest))
	return d.close()
}

// close forgets the secrets of a job that was stopped without its driver.
func (d *jobDir) close() error {
	err := errors.Join(d.agents.Close(), d.secrets.forget(), gone(os.Remove(d.agentsPath())), gone(os.Remove(d.membersPath())))
	if d.about.Version != 0 { // else there is no job.json that could be written anew
		stopped := time.Now()
		d.about.Keys, d.about.Ended = "", &stopped
		d.about.Status = status(workFailed(job.StopSignal{Signal: syscall.SIGTERM}))
		err = errors.Join(err, d.write())
	}
	if err != nil {
		return workFailed(err)
	}
	return nil
}

// gone drops an error that says that there is no such file.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
