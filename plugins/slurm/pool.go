package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// mark is the comment of jobs that were submitted here, and that may be cancelled here.
	mark = "hvdrun"
	// maxSubmits bounds the jobs that one call of Scale submits; the next call submits more.
	maxSubmits = 16
	// settled is how long a job must run before its end no longer counts as a fault of its script.
	settled = time.Minute
)

// submitBackoff is the pause after jobs whose script has failed.
var submitBackoff = retry.Backoff{First: 10 * time.Second, Most: 10 * time.Minute}

// takenAway matches output of scontrol which shows that Slurm or a person has ended a job.
var takenAway = regexp.MustCompile(`(?m)^ +JobState=(PREEMPTED|NODE_FAIL|TIMEOUT|DEADLINE|REVOKED|CANCELLED) | PreemptTime=2`)

// pool records the jobs of the script. The source's lock guards it.
type pool struct {
	asked  map[string]time.Time // jobs that were asked to end, and when
	seen   map[string]time.Time // jobs submitted here, and when each was first seen running
	doomed map[string]bool      // jobs that Slurm ends
	steps  map[string]step      // steps started here, by node
	faults int                  // consecutive jobs that ended soon after their start
	until  time.Time            // no job is submitted before
}

// poolJob is one job of the pool.
type poolJob struct {
	id        string
	phase     phase
	size      int       // number of nodes that it has or waits for
	end       time.Time // zero: unknown
	preempted bool      // another job takes its nodes
	nodes     []string
	ours      bool // submitted here
	given     bool // named by job_id: steps run on its nodes
}

// poolFormat is the format for squeue. The comment is last, since it may contain anything.
const poolFormat = "%A|%T|%D|%e|%N|%k"

// poolJobs returns this user's jobs that have not ended: first those that job_id names, then those
// with the job's name, oldest first.
func (s *source) poolJobs(ctx context.Context) (jobs []poolJob, err error) {
	if len(s.cfg.jobIDs) > 0 {
		jobs, err = s.queue(ctx, "--jobs="+strings.Join(s.cfg.jobIDs, ","))
		if err != nil && strings.Contains(err.Error(), "Invalid job id") {
			err = nil // the job has ended long ago
		}
		for i := range jobs {
			jobs[i].given, jobs[i].ours = true, false
		}
	}
	if err != nil {
		return nil, err
	}
	named, err := s.queue(ctx, "--name="+s.cfg.jobName)
	return append(jobs, named...), err
}

// queue returns this user's jobs that an option of squeue selects and that have not ended, oldest
// first.
func (s *source) queue(ctx context.Context, which string) ([]poolJob, error) {
	out, err := s.run(ctx, "squeue", "--noheader", "--me", "--array", which, "--format="+poolFormat)
	if err != nil {
		return nil, err
	}
	var jobs []poolJob
	for line := range strings.Lines(out) {
		if line = strings.TrimRight(line, " \r\n"); line == "" {
			continue
		}
		j, err := parsePoolJob(line)
		if err != nil {
			return nil, fmt.Errorf("slurm: squeue printed no job: %q: %w", shorten(line), err)
		}
		if j.phase != ended {
			jobs = append(jobs, j)
		}
	}
	slices.SortStableFunc(jobs, func(a, b poolJob) int { return cmp.Or(len(a.id)-len(b.id), cmp.Compare(a.id, b.id)) })
	return jobs, s.notePreempted(ctx, which, jobs)
}

// notePreempted records which of the jobs are preempted. Their end time does not show it: Slurm
// prints none for a job without a time limit, and otherwise the end of the grace period.
func (s *source) notePreempted(ctx context.Context, which string, jobs []poolJob) error {
	if !slices.ContainsFunc(jobs, func(j poolJob) bool { return j.phase == running }) {
		return nil
	}
	out, err := s.run(ctx, "squeue", "--noheader", "--me", "--array", which, "--Format=JobID:20,PreemptTime:30")
	if err != nil {
		return err
	}
	preempted := map[string]bool{}
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
			continue
		case len(words) != 2:
			return fmt.Errorf("slurm: squeue printed no job and its preemption: %q", shorten(strings.TrimSpace(line)))
		}
		preempted[words[0]] = strings.HasPrefix(words[1], "2") // a time; otherwise None or N/A
	}
	for i := range jobs {
		jobs[i].preempted = preempted[jobs[i].id]
	}
	return nil
}

func parsePoolJob(line string) (j poolJob, err error) {
	words := strings.SplitN(line, "|", 6)
	if len(words) != 6 {
		return j, fmt.Errorf("it has %d columns, not 6", len(words))
	}
	j.id, j.phase, j.ours = words[0], phases[words[1]], words[5] == mark
	if _, err := number(j.id); err != nil {
		return j, err
	}
	if j.phase == 0 {
		return j, fmt.Errorf("state %q is not known", words[1])
	}
	if j.size, err = number(words[2]); err != nil {
		return j, err
	}
	if t, err := time.ParseInLocation("2006-01-02T15:04:05", words[3], time.Local); err == nil {
		j.end = t // otherwise it has no time limit
	}
	if words[4] != "" {
		j.nodes, err = expandHostlist(words[4])
	}
	return j, err
}

// leaves reports whether Slurm is taking the job's nodes away, because the job is preempted or its
// time ends within the notice.
func (j *poolJob) leaves(now time.Time, notice time.Duration) bool {
	return j.phase == ending || j.preempted || j.phase == running && !j.end.IsZero() && !j.end.After(now.Add(notice))
}

// drained reports whether the job runs, and only on nodes that an administrator is draining.
func (j *poolJob) drained(nodes map[string]node) bool {
	return j.phase == running && !slices.ContainsFunc(j.nodes, func(name string) bool { return nodes[name].health != leaving })
}

// poolHosts returns, as draining, the hosts that are about to end: those of jobs that end, and
// those on nodes that are drained.
func (s *source) poolHosts(ctx context.Context) ([]plan.Host, error) {
	jobs, err := s.poolJobs(ctx)
	if err != nil {
		return nil, err
	}
	nodes, err := s.healthOf(ctx, jobs)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	hosts := []plan.Host{}
	now := time.Now()
	for _, j := range jobs {
		if j.phase != running && j.phase != ending {
			continue
		}
		_, asked := s.pool.asked[j.id]
		for _, name := range j.nodes {
			health := nodes[name].health
			if health != useless && (asked || health == leaving || j.leaves(now, s.cfg.notice)) {
				hosts = append(hosts, plan.Host{Name: name + "-" + j.id, Slots: s.cfg.nodeSlots, Draining: true})
			}
		}
	}
	return hosts, nil
}

// healthOf returns the states of all nodes of the jobs.
func (s *source) healthOf(ctx context.Context, jobs []poolJob) (map[string]node, error) {
	var names []string
	for _, j := range jobs {
		names = append(names, j.nodes...)
	}
	if len(names) == 0 {
		return nil, nil
	}
	slices.Sort(names)
	out, err := s.run(ctx, "scontrol", "show", "node", "-o", strings.Join(slices.Compact(names), ","))
	if err != nil {
		return nil, err
	}
	return parseNodes(out)
}

// Scale submits jobs of the script, with one node each, until most slots exist or are requested. It
// gives surplus jobs back: it cancels waiting jobs, then asks the agents of the youngest running
// jobs to end, which drain. It also gives back a job whose node is drained. Jobs of the name that a
// person has submitted count too, and are never cancelled. Nodes that Slurm is about to take away
// do not count, so that replacements are requested in time.
func (s *source) Scale(ctx context.Context, _, most int) error {
	switch {
	case s.run == nil:
		return errors.New("slurm: the source was asked before it got its settings")
	case s.cfg.script == "":
		return discovery.ErrNoScale
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.timeout, fmt.Errorf("no answer in %v", s.cfg.timeout))
	defer cancel()
	jobs, err := s.poolJobs(ctx)
	if err != nil {
		return err
	}
	if most == 0 {
		return s.giveBack(ctx, jobs)
	}
	nodes, err := s.healthOf(ctx, jobs)
	if err != nil {
		return err
	}
	stay, taken, overdue, vanished := s.judgeJobs(jobs, nodes)
	for _, id := range vanished {
		if err := s.blame(ctx, id); err != nil {
			return err
		}
	}
	for _, j := range taken {
		if err := s.end(ctx, &j); err != nil {
			return err
		}
	}
	for _, id := range overdue {
		if _, err := s.run(ctx, "scancel", id); err != nil {
			return err
		}
	}
	lack := (most + s.cfg.nodeSlots - 1) / s.cfg.nodeSlots
	for _, j := range stay {
		lack -= j.size
		if j.given && j.phase == running {
			if err := s.startSteps(ctx, j, nodes); err != nil {
				return err
			}
		}
	}
	if lack < 0 {
		return s.shrink(ctx, stay, -lack)
	}
	return s.submit(ctx, min(lack, maxSubmits))
}

// end cancels a waiting job, or asks the agent of a running one to end.
func (s *source) end(ctx context.Context, j *poolJob) error {
	args := []string{j.id}
	if j.phase == running {
		args = []string{"--signal=TERM", j.id} // for its steps, not for srun, which would kill them
	}
	s.mu.Lock()
	s.pool.asked[j.id] = time.Now()
	s.mu.Unlock()
	_, err := s.run(ctx, "scancel", args...)
	return err
}

// judgeJobs sorts the jobs. stay are those whose nodes remain or are requested. taken are those
// submitted here whose time ends or whose node is drained, and whose agents must be asked to end.
// overdue were asked to end and have not done so in time. vanished were submitted here, and ended
// soon after their start without being asked to.
func (s *source) judgeJobs(jobs []poolJob, nodes map[string]node) (stay, taken []poolJob, overdue, vanished []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	alive := map[string]bool{}
	for _, j := range jobs {
		alive[j.id] = true
		if asked, was := s.pool.asked[j.id]; was {
			if now.Sub(asked) > max(s.cfg.notice, settled) {
				overdue = append(overdue, j.id)
				s.pool.asked[j.id] = now
			}
			continue
		}
		if j.ours && j.phase == running && s.pool.seen[j.id].IsZero() {
			s.pool.seen[j.id] = now
		}
		if j.leaves(now, s.cfg.notice) {
			switch log := s.log.WithField("job", j.id); {
			case j.preempted && !s.pool.doomed[j.id]: // Slurm has sent SIGTERM to its steps, and a second one cuts a drain short
				log.Info("slurm: the job is preempted: its node is drained")
			case j.preempted:
			case j.ours && j.phase == running:
				taken = append(taken, j)
				log.Infof("slurm: the job ends at %s: its node is drained", j.end.Format(time.TimeOnly))
			}
			s.pool.doomed[j.id] = true
			continue
		}
		if j.ours && j.drained(nodes) {
			taken = append(taken, j)
			s.log.WithField("job", j.id).Infof("slurm: its node %s is to be drained: the job is given back", strings.Join(j.nodes, ", "))
			continue
		}
		if j.phase == running {
			j.size = 0
			for _, name := range j.nodes {
				if nodes[name].health == useful {
					j.size++
				}
			}
		}
		stay = append(stay, j)
	}
	for id := range s.pool.asked {
		if !alive[id] {
			delete(s.pool.asked, id)
			delete(s.pool.seen, id)
		}
	}
	return stay, taken, overdue, s.vanished(now, alive)
}

// vanished returns the jobs submitted here that ended soon after they were submitted or started,
// and forgets all that have ended. s.mu is held.
func (s *source) vanished(now time.Time, alive map[string]bool) (early []string) {
	p := &s.pool
	for id, since := range p.seen {
		long := !since.IsZero() && now.Sub(since) > settled
		switch {
		case alive[id] && long:
			p.faults = 0
		case alive[id]:
		default:
			delete(p.seen, id)
			if !long && !p.doomed[id] {
				early = append(early, id)
			}
		}
	}
	for id := range p.doomed {
		if !alive[id] {
			delete(p.doomed, id)
		}
	}
	slices.Sort(early)
	return early
}

// blame counts a fault for a job that ended soon after its start, unless it was taken away: its
// script fails, and would otherwise be submitted again and again.
func (s *source) blame(ctx context.Context, id string) error {
	text, err := s.run(ctx, "scontrol", "show", "job", id)
	switch {
	case err == nil && takenAway.MatchString(text):
		return nil
	case err != nil && !strings.Contains(err.Error(), "Invalid job id"): // otherwise Slurm has forgotten the job
		s.mu.Lock()
		s.pool.seen[id] = time.Time{} // the next call asks again
		s.mu.Unlock()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	pause := s.pool.fault()
	s.log.WithField("job", id).Warnf("slurm: the job has ended soon after its start: see its output, and "+
		"`scontrol show job %s`; the next is submitted in %v", id, pause)
	return nil
}

// fault counts one more job that has failed, and returns the pause before the next submission.
func (p *pool) fault() (pause time.Duration) {
	p.faults++
	pause = submitBackoff.After(p.faults)
	p.until = time.Now().Add(pause)
	return pause
}

// submit submits n jobs.
func (s *source) submit(ctx context.Context, n int) error {
	s.mu.Lock()
	wait := time.Now().Before(s.pool.until)
	s.mu.Unlock()
	if wait {
		return nil
	}
	for range n {
		out, err := s.run(ctx, "sbatch", "--parsable", "--nodes=1", "--no-requeue", "--job-name="+s.cfg.jobName, "--comment="+mark, s.cfg.script)
		if err != nil {
			return err
		}
		id, _, _ := strings.Cut(strings.TrimSpace(out), ";") // the name of the cluster may follow
		if _, err := number(id); err != nil {
			return fmt.Errorf("slurm: sbatch printed no id of a job: %w", err)
		}
		s.mu.Lock()
		s.pool.seen[id] = time.Time{}
		s.mu.Unlock()
		s.log.WithField("job", id).Info("slurm: a job is submitted for one more node")
	}
	return nil
}

// shrink gives n nodes back: first waiting jobs, then running ones, youngest first. The steps of a
// running job receive SIGTERM: its agent drains.
func (s *source) shrink(ctx context.Context, stay []poolJob, n int) error {
	slices.Reverse(stay)
	slices.SortStableFunc(stay, func(a, b poolJob) int { return cmp.Compare(a.phase, b.phase) })
	for _, j := range stay {
		if !j.ours || j.size > n {
			continue
		}
		if err := s.end(ctx, &j); err != nil {
			return err
		}
		s.log.WithField("job", j.id).Info("slurm: the job is given back")
		if n -= j.size; n <= 0 {
			break
		}
	}
	return nil
}

// giveBack cancels all jobs that were submitted here, and asks the agents on the nodes of other
// jobs to end.
func (s *source) giveBack(ctx context.Context, jobs []poolJob) error {
	var ids []string
	for _, j := range jobs {
		if j.ours {
			ids = append(ids, j.id)
		}
	}
	var err error
	if len(ids) > 0 {
		_, err = s.run(ctx, "scancel", ids...)
	}
	return errors.Join(err, s.endSteps(ctx))
}
