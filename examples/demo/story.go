package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// The two hosts: names of this machine that hvdrun treats as two hosts.
const (
	firstHost  = "localhost"
	secondHost = "127.0.0.2"
)

// view is the observed state of a job.
type view struct {
	events   []event
	world    event          // the last published world
	epochs   map[uint64]int // number of finished epochs, by generation
	accuracy float64        // 0: not printed yet
	digests  []string       // of the weights, one per worker at the end
}

var (
	epochLine    = regexp.MustCompile(`^\[\d+\]<stdout>:epoch \d+ .* generation (\d+)$`)
	accuracyLine = regexp.MustCompile(`^\[0\]<stdout>:held-out accuracy (\d\.\d+)$`)
	digestLine   = regexp.MustCompile(`^\[\d+\]<stdout>:digest ([0-9a-f]+)$`)
)

func (v *view) see(o observation) {
	if o.event != nil {
		v.events = append(v.events, *o.event)
		if o.event.Name == "world_published" {
			v.world = *o.event
		}
		return
	}
	if m := epochLine.FindStringSubmatch(o.line); m != nil {
		generation, _ := strconv.ParseUint(m[1], 10, 64) // the expression matches digits only
		if v.epochs == nil {
			v.epochs = make(map[uint64]int)
		}
		v.epochs[generation]++
	}
	if m := accuracyLine.FindStringSubmatch(o.line); m != nil {
		v.accuracy, _ = strconv.ParseFloat(m[1], 64)
	}
	if m := digestLine.FindStringSubmatch(o.line); m != nil {
		v.digests = append(v.digests, m[1])
	}
}

// trained reports whether the current world has the given size and has finished that many epochs.
func (v *view) trained(size, epochs int) bool {
	return v.world.Size == size && v.epochs[v.world.Generation] >= epochs
}

// shrank reports whether a world of the given size, newer than the generation since, has completed
// a step.
func (v *view) shrank(since uint64, size int) bool {
	return v.world.Generation > since && v.world.Size == size && slices.ContainsFunc(v.events, func(e event) bool {
		return e.Name == "first_commit" && e.Generation == v.world.Generation
	})
}

// teller prints events with the time since began.
type teller struct{ began time.Time }

func (t *teller) say(mark, format string, args ...any) {
	fmt.Printf("%6.2fs %s %s\n", time.Since(t.began).Seconds(), mark, fmt.Sprintf(format, args...))
}

func (t *teller) did(format string, args ...any) { t.say(">>", format, args...) }

// show prints an observation.
func (t *teller) show(o observation) {
	switch {
	case o.event == nil:
		t.say("  ", "%s", o.line)
	case o.event.Name != "audit": // audit records are not part of the story
		_, words := o.event.Words()
		t.say(" *", "%s", words)
	}
}

// stageTime is the timeout of a stage; the slowest takes about ten seconds.
const stageTime = 60 * time.Second

// story is a job with disturbances during training.
type story struct {
	*teller
	view
	job       *job
	hostsFile string
	quiet     bool // do not print epochs
}

// take records and shows an observation.
func (s *story) take(o observation) error {
	if o.err != nil {
		return o.err
	}
	if !s.quiet || !epochLine.MatchString(o.line) {
		s.show(o)
	}
	s.see(o)
	return nil
}

// errEnded is returned by until when the job has ended.
var errEnded = errors.New("demo: the job ended")

// until observes the job until holds returns true.
func (s *story) until(ctx context.Context, what string, holds func() bool) error {
	late := time.NewTimer(stageTime)
	defer late.Stop()
	for !holds() {
		select {
		case <-s.job.done:
			if ctx.Err() != nil {
				return fmt.Errorf("demo: %w", context.Cause(ctx))
			}
			return fmt.Errorf("%w before %s; hvdrun: %v", errEnded, what, s.job.err)
		case o := <-s.job.seen:
			if err := s.take(o); err != nil {
				return err
			}
		case <-late.C:
			return fmt.Errorf("demo: waited %v for %s", stageTime, what)
		case <-ctx.Done():
			return fmt.Errorf("demo: %w", context.Cause(ctx))
		}
	}
	return nil
}

// tell disturbs the job. Each disturbance waits until the job trains in the world that resulted
// from the previous one.
func (s *story) tell(ctx context.Context) error {
	if err := s.until(ctx, "two epochs with 2 workers", func() bool { return s.trained(2, 2) }); err != nil {
		return err
	}
	s.did("a second host: the discovery script prints %s:2 as well", secondHost)
	if err := writeHosts(s.hostsFile, firstHost, secondHost); err != nil {
		return err
	}
	if err := s.until(ctx, "two epochs with 4 workers", func() bool { return s.trained(4, 2) }); err != nil {
		return err
	}
	if err := s.kill(ctx); err != nil {
		return err
	}
	s.did("the first host is gone: the discovery script prints %s:2 alone", secondHost)
	if err := writeHosts(s.hostsFile, secondHost); err != nil {
		return err
	}
	if err := s.until(ctx, "an epoch with the second host alone", func() bool { return s.trained(2, 1) }); err != nil {
		return err
	}
	s.did("no more changes: the job trains to its end")
	return s.finish(ctx)
}

// kill kills the first worker of the second host and waits until the slot has a worker again.
func (s *story) kill(ctx context.Context) error {
	i := slices.IndexFunc(s.world.Slots, func(p placed) bool { return p.Host == secondHost && p.Slot == 0 })
	if i < 0 {
		return fmt.Errorf("demo: no worker in slot 0 of %s", secondHost)
	}
	before, victim := s.world.Generation, s.world.Slots[i]
	s.did("SIGKILL to rank %d, pid %d", victim.Rank, victim.PID)
	if err := syscall.Kill(victim.PID, syscall.SIGKILL); err != nil {
		return fmt.Errorf("demo: killing a worker: %w", err)
	}
	err := s.until(ctx, "a step with the 3 survivors", func() bool { return s.shrank(before, 3) })
	if err != nil {
		return err
	}
	s.did("the three survivors train; the slot rests for a second and gets a new worker")
	return s.until(ctx, "two epochs with 4 workers again", func() bool { return s.trained(4, 2) })
}

// finish observes the job until its end.
func (s *story) finish(ctx context.Context) error {
	err := s.until(ctx, "an end of the job", func() bool { return false })
	if errors.Is(err, errEnded) {
		err = nil
		if s.job.err != nil {
			err = fmt.Errorf("demo: hvdrun: %w", s.job.err)
		}
	}
	return err
}

// writeHosts atomically replaces the hosts file by one with two slots on each host.
func writeHosts(path string, hosts ...string) error {
	var text string
	for _, h := range hosts {
		text += h + ":2\n"
	}
	next := path + ".next"
	if err := os.WriteFile(next, []byte(text), 0o644); err != nil {
		return fmt.Errorf("demo: hosts file: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("demo: hosts file: %w", err)
	}
	return nil
}

// writeScript writes the discovery script and returns the command that runs it.
func writeScript(dir, hostsFile string) (string, error) {
	path := filepath.Join(dir, "discover.sh")
	script := "#!/bin/sh\nexec cat " + quote(hostsFile) + "\n"
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		return "", fmt.Errorf("demo: discovery script: %w", err)
	}
	return quote(path), nil
}
