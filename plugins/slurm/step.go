package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// step is a step that was started here on a node of a job that job_id names.
type step struct {
	since time.Time
	ended <-chan struct{} // closed when its srun has ended
}

// over reports whether the step's srun has ended.
func (s step) over() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// steps returns the ids, by node, of this user's steps that run an agent. An earlier driver that
// has died may have started them.
func (s *source) steps(ctx context.Context) (map[string]string, error) {
	out, err := s.run(ctx, "squeue", "--noheader", "--me", "--steps", "--format=%i|%j|%N")
	if err != nil {
		return nil, err
	}
	ids := map[string]string{}
	for line := range strings.Lines(out) {
		words := strings.Split(strings.TrimRight(line, " \r\n"), "|")
		if len(words) != 3 || words[1] != s.cfg.jobName {
			continue // names of other steps may contain anything
		}
		nodes, err := expandHostlist(words[2])
		if err != nil {
			return nil, fmt.Errorf("slurm: squeue printed no step: %q: %w", shorten(line), err)
		}
		for _, name := range nodes {
			ids[name] = words[0]
		}
	}
	return ids, nil
}

// startSteps starts an agent on each usable node of the job without one. Each runs in a step of its
// own, so that the loss of a node does not end the others.
func (s *source) startSteps(ctx context.Context, j poolJob, nodes map[string]node) error {
	there, err := s.steps(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for _, name := range j.nodes {
		old, was := s.pool.steps[name]
		switch {
		case nodes[name].health != useful || was && !old.over():
			continue
		case there[name] != "":
			continue // started by an earlier driver
		case was:
			delete(s.pool.steps, name)
			if now.Sub(old.since) < settled {
				s.log.WithField("node", name).Warnf("slurm: the agent has ended soon after its start: see %s; the next is started in %v",
					s.stepLog(name), s.pool.fault())
			} else {
				s.pool.faults = 0
			}
		}
		if now.Before(s.pool.until) {
			continue
		}
		ended, err := s.launch(s.stepLog(name), "srun", "--jobid="+j.id, "--job-name="+s.cfg.jobName, "--nodelist="+name,
			"--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--mpi=none", "--cpu-bind=none", "--input=none", "sh", s.cfg.step)
		if err != nil {
			return err
		}
		s.pool.steps[name] = step{since: now, ended: ended}
		s.log.WithField("node", name).Infof("slurm: an agent is started on a node of job %s", j.id)
	}
	return nil
}

// stepLog returns the path of the output of a node's agent.
func (s *source) stepLog(node string) string { return s.cfg.step + "-" + node + ".out" }

// endSteps asks all agents in steps to end.
func (s *source) endSteps(ctx context.Context) error {
	if s.cfg.step == "" {
		return nil
	}
	there, err := s.steps(ctx)
	if err != nil || len(there) == 0 {
		return err
	}
	ids := slices.Compact(slices.Sorted(maps.Values(there)))
	_, err = s.run(ctx, "scancel", append([]string{"--signal=TERM"}, ids...)...)
	return err
}
