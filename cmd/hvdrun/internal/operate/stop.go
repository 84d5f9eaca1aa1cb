package operate

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// stopJob asks the job's driver to stop the job. If the driver is gone, stopJob ends the workers
// itself.
func stopJob(ctx context.Context, p *cli.Program, name string, now bool) error {
	d, err := jobdir.TheJob(p.Env, name)
	if err != nil {
		if d = damagedJob(p.Env, name); d == nil {
			return err
		}
	}
	for try := 1; ; try++ {
		err = orderOf(ctx, p, d, job.Command{Verb: job.Stop, Now: now})
		var gone *jobdir.NoDriverError
		if !errors.As(err, &gone) || gone.Ended || d.About.Ended != nil {
			return err
		}
		if err = endWorkers(ctx, p, d, now); !errors.Is(err, journal.ErrLocked) {
			return err
		} else if try == jobdir.LockTries { // otherwise a driver is about to take over the job
			return cli.Failed(fmt.Errorf("job %s has a driver that does not answer: end that process first", d.About.RunID))
		}
		select {
		case <-time.After(jobdir.LockPause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// damagedJob returns the folder of a job whose job.json is missing or cannot be parsed, with what
// the other files of the folder tell about the job; nil if they tell nothing.
func damagedJob(env []string, name string) *jobdir.Dir {
	path := name
	if !strings.ContainsRune(name, filepath.Separator) {
		paths, _, _ := jobdir.JobEntries(env) // on an error there are no paths
		i := slices.IndexFunc(paths, func(path string) bool { return filepath.Base(path) == name })
		if name == "" || i < 0 {
			return nil
		}
		path = paths[i]
	}
	d := &jobdir.Dir{Path: path}
	f, err := safefile.Read(d.AgentsPath())
	if err != nil {
		return nil
	}
	defer f.Close()
	d.About.RunID, _, err = journal.Read(f, func([]byte) error { return nil })
	if err != nil && d.About.RunID == "" {
		d.About.RunID = filepath.Base(path)
	}
	return d
}

// endWorkers makes the agents that the job's drivers started end the job's workers and themselves.
// It reads neither the journal nor job.json, which may be damaged. It returns journal.ErrLocked if
// the job has a driver.
func endWorkers(ctx context.Context, p *cli.Program, d *jobdir.Dir, now bool) error {
	authority, known, err := d.Open(p.Env)
	switch {
	case errors.Is(err, journal.ErrLocked):
		return err
	case err != nil && authority == nil || len(known) == 0 && err != nil:
		return cli.Failed(fmt.Errorf("job %s: the credentials for its agents cannot be read; the agents end its workers after --orphan-timeout: %w",
			d.About.RunID, err))

	case err != nil:
		settings.LoggerAt(p, logrus.WarnLevel).WithError(err).Warn("some agents may be unknown")
	}
	latest := make(map[string]client.KnownAgent) // if a host has two, the later one counts
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
		return cli.Failed(fmt.Errorf("job %s: some workers may remain, which their agents end after --orphan-timeout: %w",
			d.About.RunID, errors.Join(failed...)))

	}
	fmt.Fprintf(p.Stdout, "job %s had no driver: %s on %s ended\n", d.About.RunID, show.Plural(workers, "worker"), show.Plural(len(latest), "host"))
	return d.Close()
}
