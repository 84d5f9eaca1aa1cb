package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/plan"
)

// source finds the nodes of Slurm jobs. newSource returns one; Configure must be called first.
//
// It runs scontrol at most three times for one job: for its nodes, for what it has there, and for
// the nodes' states. It implements Watcher to set its own pace, since a driver polls every second,
// and the controller of a large cluster is busy.
type source struct {
	cfg    config
	run    func(ctx context.Context, program string, args ...string) (string, error)
	launch func(log, program string, args ...string) (ended <-chan struct{}, err error)
	lookup func(string) (string, bool)
	log    logrus.FieldLogger

	mu   sync.Mutex
	seen map[string]memory
	pool pool
}

// memory is what the source remembers about a job that it has seen alive.
type memory struct {
	ended bool
	// tasksPerNode is 1 for a job that was seen with one task per node. Slurm does not update its
	// numbers when a node fails and the job continues without it.
	tasksPerNode int
}

func newSource() *source {
	return &source{lookup: os.LookupEnv, log: logrus.StandardLogger(), seen: map[string]memory{}, pool: pool{
		asked: map[string]time.Time{}, seen: map[string]time.Time{}, doomed: map[string]bool{}, steps: map[string]step{},
	}}
}

// Configure reads the settings.
func (s *source) Configure(values map[string]string) error {
	c, err := readConfig(values, s.lookup)
	if err != nil {
		return err
	}
	s.cfg = c
	s.run, s.launch = commands{dir: c.bin}.run, commands{dir: c.bin}.launch
	return nil
}

// Discover returns the hosts once. They are in the order in which the jobs started, and within one
// job in Slurm's order. A node of two of the jobs is one host with the slots of both, and is
// draining if it is draining in both.
//
// A job that has not started has no hosts. A job that has ended since it was first seen no longer
// has any, which is not an error, and is logged. It is an error if a job that was never seen alive
// has ended or is unknown.
//
// With a script the agents announce the hosts by gossip, and the list contains only hosts that are
// about to end, as draining.
func (s *source) Discover(ctx context.Context) ([]plan.Host, error) {
	if s.run == nil {
		return nil, errors.New("slurm: the source was asked before it got its settings")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.timeout, fmt.Errorf("no answer in %v", s.cfg.timeout))
	defer cancel()
	if s.cfg.script != "" {
		return s.poolHosts(ctx)
	}
	ids := s.cfg.jobIDs
	if s.cfg.jobName != "" {
		var err error
		if ids, err = s.namedJobs(ctx); err != nil {
			return nil, err
		}
	}
	var jobs []job
	for _, id := range ids {
		j, err := s.ask(ctx, id)
		if err != nil {
			return nil, err
		}
		if len(j.nodes) > 0 && (j.phase == running || j.phase == ending) {
			jobs = append(jobs, j)
		}
	}
	slices.SortStableFunc(jobs, func(a, b job) int { return cmp.Compare(a.start, b.start) })
	var hosts []plan.Host
	places := map[string]int{}
	for _, j := range jobs {
		of, err := s.hostsOf(ctx, j)
		if err != nil {
			return nil, err
		}
		for _, h := range of {
			i, shared := places[h.Name]
			if !shared {
				places[h.Name] = len(hosts)
				hosts = append(hosts, h)
				continue
			}
			hosts[i].Slots += h.Slots
			hosts[i].Draining = hosts[i].Draining && h.Draining
		}
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("slurm: %w", context.Cause(ctx))
	}
	return hosts, nil
}

// Watch calls Discover every interval, until ctx ends or it fails.
func (s *source) Watch(ctx context.Context, found func([]plan.Host)) error {
	var last []plan.Host
	for first := true; ; first = false {
		hosts, err := s.Discover(ctx)
		if err != nil {
			return err
		}
		if first || !slices.Equal(hosts, last) {
			last = slices.Clone(hosts)
			found(hosts)
		}
		if err := retry.Pause(ctx, s.cfg.interval); err != nil {
			return err
		}
	}
}

// namedJobs returns the ids of this user's jobs with the name that have not ended, lowest first.
func (s *source) namedJobs(ctx context.Context) ([]string, error) {
	out, err := s.run(ctx, "squeue", "--noheader", "--me", "--array", "--name="+s.cfg.jobName, "--format=%A")
	if err != nil {
		return nil, err
	}
	ids := strings.Fields(out)
	numbers := make(map[string]int, len(ids))
	for _, id := range ids {
		if numbers[id], err = number(id); err != nil {
			return nil, fmt.Errorf("slurm: squeue printed no id of a job: %w", err)
		}
	}
	slices.SortFunc(ids, func(a, b string) int { return cmp.Compare(numbers[a], numbers[b]) })
	return slices.Compact(ids), nil
}

// ask returns the current state of the job. A job that has ended has no nodes.
func (s *source) ask(ctx context.Context, id string) (job, error) {
	out, err := s.run(ctx, "scontrol", "show", "job", "-d", id)
	var j job
	switch {
	case err != nil && strings.Contains(err.Error(), "Invalid job id"):
		// The controller forgets a job some minutes after its end.
		j = job{id: id, phase: ended, state: "the controller no longer knows it"}
	case err != nil:
		return job{}, err
	default:
		if j, err = parseJob(out, id, s.cfg.gres); err != nil {
			return job{}, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m, seen := s.seen[id]
	switch {
	case j.phase != ended:
		m.ended = false // it may have been requeued
		if j.tasksPerNode == 0 && j.tasks > 0 && j.tasks <= len(j.nodes) {
			m.tasksPerNode = 1
		}
		j.tasksPerNode = max(j.tasksPerNode, m.tasksPerNode)
		s.seen[id] = m
	case seen && !m.ended:
		m.ended = true
		s.seen[id] = m
		s.log.WithField("job", id).WithField("state", j.state).Warn("slurm: the job has ended: it no longer has hosts")
	case !seen && s.cfg.jobName == "":
		if err != nil {
			return job{}, fmt.Errorf("slurm: job %s: %w", id, err)
		}
		return job{}, fmt.Errorf("slurm: job %s has ended already: %s", id, j.state)
	}
	if j.phase == ended {
		j.nodes = nil
	}
	return j, nil
}

// hostsOf returns the hosts among the nodes of the job.
func (s *source) hostsOf(ctx context.Context, j job) ([]plan.Host, error) {
	slots, err := s.slots(j)
	if err != nil {
		return nil, err
	}
	out, err := s.run(ctx, "scontrol", "show", "node", "-o", strings.Join(j.nodes, ","))
	if err != nil {
		return nil, err
	}
	nodes, err := parseNodes(out)
	if err != nil {
		return nil, err
	}
	var hosts []plan.Host
	taken := map[string]bool{}
	for _, name := range j.nodes {
		n, there := nodes[name]
		if !there {
			return nil, fmt.Errorf("slurm: scontrol shows no node %s of job %s", name, j.id)
		}
		if n.health == useless {
			continue
		}
		host := map[string]string{"name": n.name, "hostname": n.hostname, "addr": n.addr}[s.cfg.host]
		if taken[host] {
			return nil, fmt.Errorf("slurm: two nodes of job %s have the %s %q: use host=name", j.id, s.cfg.host, host)
		}
		taken[host] = true
		draining := n.health == leaving || j.phase == ending
		hosts = append(hosts, plan.Host{Name: host, Slots: slots[name], Draining: draining})
	}
	return hosts, nil
}

// slots returns the number of slots on each node of the job.
func (s *source) slots(j job) (map[string]int, error) {
	kind := s.cfg.slots
	slots := make(map[string]int, len(j.nodes))
	if n, err := strconv.Atoi(kind); err == nil {
		for _, name := range j.nodes {
			slots[name] = n
		}
		return slots, nil
	}
	if kind == "auto" {
		kind = "tasks"
		for _, n := range j.gpus {
			if n > 0 {
				kind = "gpus"
			}
		}
	}
	for _, name := range j.nodes {
		if _, there := j.cpus[name]; !there && kind != "tasks" {
			return nil, fmt.Errorf("slurm: scontrol does not show the resources of job %s on node %s", j.id, name)
		}
		slots[name] = map[string]int{"gpus": j.gpus[name], "cpus": j.cpus[name] / s.cfg.cpusPerSlot}[kind]
	}
	if kind != "tasks" {
		return slots, nil
	}
	tasks, err := tasksPerNode(j.id, s.lookup)
	if err != nil {
		return nil, err
	}
	for _, name := range j.nodes {
		switch n, told := tasks[name]; {
		case told:
			slots[name] = n
		case j.tasksPerNode > 0:
			slots[name] = j.tasksPerNode
		default:
			return nil, fmt.Errorf("slurm: job %s has %d tasks on %d nodes, and from outside of the job it is unknown which "+
				"has how many: submit it with --ntasks-per-node, or set slots", j.id, j.tasks, len(j.nodes))
		}
	}
	return slots, nil
}
