package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// ending is a worker's final state.
type ending struct{ chain, digest string }

func (c *chaos) trainer(more ...string) []string {
	if c.microbatches > 0 {
		more = append(more, "-microbatches", fmt.Sprint(c.microbatches))
	}
	return append(more, "-steps", fmt.Sprint(c.steps), "-step-time", c.stepTime.String(), "-size", fmt.Sprint(c.size))
}

// undisturbed trains in a single process without hvdrun and returns its final state.
func (c *chaos) undisturbed() (ending, error) {
	path := filepath.Join(c.dir, "undisturbed")
	args := append(c.trainer("-log", path), "-step-time", "0")
	if out, err := exec.Command(c.programs.Trainer, args...).CombinedOutput(); err != nil {
		return ending{}, fmt.Errorf("the undisturbed run: %w\n%s", err, out)
	}
	lines, err := steplog.Follow[steplog.Line](path).Next()
	if err == nil {
		err = c.checkLines(lines)
	}
	if err == nil && (len(lines) == 0 || lines[len(lines)-1].Event != steplog.End) {
		err = errors.New("it did not finish")
	}
	if err != nil {
		return ending{}, fmt.Errorf("the undisturbed run: %w", err)
	}
	last := lines[len(lines)-1]
	return ending{last.Chain, last.Digest}, os.Remove(path)
}

// checkLines checks the record of training. Workers that train by steps check their steps
// themselves, and enter worlds in the middle of one.
func (c *chaos) checkLines(lines []steplog.Line) error {
	if c.microbatches > 0 {
		return nil
	}
	return steplog.Check(lines, c.steps, c.size)
}

// check returns the errors of a run.
func (c *chaos) check(res follow.Result) error {
	var errs []error
	if res.Hung {
		errs = append(errs, fmt.Errorf("it hung: no progress for %v; it was killed", c.still))
	}
	if res.Status != 0 {
		errs = append(errs, fmt.Errorf("exit status %d", res.Status))
	}
	if len(res.Left) > 0 {
		errs = append(errs, fmt.Errorf("remaining processes: %q", res.Left))
	}
	if err := c.checkLines(res.Lines); err != nil {
		errs = append(errs, err)
	}
	if err := checkResets(res.Events); err != nil {
		errs = append(errs, err)
	}
	ends, size := 0, 0
	for _, l := range res.Lines {
		if l.Event != steplog.End {
			continue
		}
		ends, size = ends+1, l.Size
		if got := (ending{l.Chain, l.Digest}); got != c.calm {
			errs = append(errs, fmt.Errorf("rank %d ended with %v, the undisturbed run with %v", l.Rank, got, c.calm))
		}
	}
	if ends == 0 || ends != size {
		errs = append(errs, fmt.Errorf("%d of the last world's %d workers finished", ends, size))
	}
	return errors.Join(errs...)
}

// checkResets checks that every reset leads to one world and has a cause: the end of a worker or a
// change of hosts.
func checkResets(events []follow.Event) error {
	resets, worlds, cause := 0, 0, false
	for _, e := range events {
		switch e.Name {
		case "reset":
			resets++
		case "worker_exited", "worker_dying", "hosts_updated":
			cause = true
		case "world_published":
			if worlds++; worlds != resets+1 {
				return fmt.Errorf("generation %d comes after %d resets", e.Generation, resets)
			}
			if worlds > 1 && !cause {
				return fmt.Errorf("generation %d comes without a cause", e.Generation)
			}
			cause = false
		}
	}
	return nil
}
