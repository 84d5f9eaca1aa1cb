package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/plugins/settings"
)

// config holds the settings, which README.md describes.
type config struct {
	jobIDs      []string // empty: jobName selects the jobs
	jobName     string
	script      string        // "": no jobs are submitted
	step        string        // with a script: what is run on each node of jobIDs; "": nothing
	notice      time.Duration // with a script: time before the end of its job from which a node is draining
	host        string        // name, hostname or addr
	slots       string        // auto, gpus, tasks, cpus or a number
	nodeSlots   int           // with a script: that number
	gres        string
	cpusPerSlot int
	bin         string
	timeout     time.Duration
	interval    time.Duration
}

// readConfig reads and checks all settings. Without job_id and job_name, the job is the one in
// which this process runs.
func readConfig(values map[string]string, lookup func(string) (string, bool)) (config, error) {
	s := settings.Read("slurm", values)
	c := config{
		jobName:     s.Text("job_name", ""),
		script:      s.Text("script", ""),
		step:        s.Text("step", ""),
		notice:      s.Duration("notice", time.Minute, 0, 24*time.Hour),
		host:        s.OneOf("host", "name", "hostname", "addr"),
		slots:       s.Text("slots", "auto"),
		gres:        s.Text("gres", "gpu"),
		cpusPerSlot: s.Int("cpus_per_slot", 1, 1, plan.MaxSlots),
		bin:         s.Text("bin", ""),
		timeout:     s.Duration("timeout", 20*time.Second, time.Millisecond, time.Hour),
		interval:    s.Duration("interval", 5*time.Second, time.Millisecond, time.Hour),
	}
	for _, id := range s.List("job_id") {
		if _, err := number(id); err != nil {
			s.Fault("job_id", "%w; it is the number that squeue shows", err)
		}
		c.jobIDs = append(c.jobIDs, id)
	}
	if n, err := strconv.Atoi(c.slots); err == nil {
		if n < 0 || n > plan.MaxSlots {
			s.Fault("slots", "%d is not a number from 0 to %d", n, plan.MaxSlots)
		}
	} else {
		c.slots = s.OneOf("slots", "auto", "gpus", "tasks", "cpus")
	}
	if strings.ContainsAny(c.gres, ":,=() \t") {
		s.Fault("gres", "%q is not the name of a generic resource", c.gres)
	}
	if strings.ContainsAny(c.jobName, ", \t\r\n") || strings.HasPrefix(c.jobName, "-") {
		s.Fault("job_name", "%q is not the name of one job", c.jobName)
	}
	c.checkScript(s)
	slices.Sort(c.jobIDs)
	switch c.jobIDs = slices.Compact(c.jobIDs); {
	case c.step != "" && len(c.jobIDs) == 0:
		s.Fault("step", "job_id is missing: the jobs on whose nodes it is run")
	case c.step != "":
	case c.jobName != "" && len(c.jobIDs) > 0:
		s.Fault("job_name", "job_id is set, too: one of them says which jobs")
	case c.jobName == "" && !s.Given("job_id"):
		id, _ := lookup("SLURM_JOB_ID")
		if _, err := number(id); err != nil {
			s.Fault("job_id", "must be given, or job_name: this process runs in no job (there is no SLURM_JOB_ID)")
		}
		c.jobIDs = []string{id}
	case c.jobName == "" && len(c.jobIDs) == 0:
		s.Fault("job_id", "is empty")
	}
	return c, s.Err()
}

// checkScript refuses settings that do not go with a script, or that need one. With a script, a
// node has the slots that its agent offers, and the name of the host consists of the node's and the
// job's.
func (c *config) checkScript(s *settings.Reader) {
	switch {
	case c.script == "" && s.Given("notice"):
		s.Fault("notice", "there is no script to use it for")
	case c.script == "" && c.step != "":
		s.Fault("step", "script is missing: what is submitted where these nodes are too few")
	case c.script == "":
		return
	case c.jobName == "":
		s.Fault("script", "job_name is missing: the name of the jobs that are submitted")
	case s.Given("host"):
		s.Fault("host", "with a script, the hosts are called NODE-JOB")
	case strings.HasPrefix(c.script, "-"):
		s.Fault("script", "%q is not the path of a script", c.script)
	}
	if !s.Given("slots") {
		c.slots = "1"
	}
	if n, err := strconv.Atoi(c.slots); err != nil || n < 1 {
		s.Fault("slots", "with a script, it is the number of slots that the agent of a node offers")
	} else {
		c.nodeSlots = n
	}
}

// tasksPerNode returns the number of tasks on each node, from the environment that Slurm has set,
// if this process runs in the job; nil if it does not.
func tasksPerNode(jobID string, lookup func(string) (string, bool)) (map[string]int, error) {
	if id, _ := lookup("SLURM_JOB_ID"); id != jobID {
		return nil, nil
	}
	list, haveList := lookup("SLURM_JOB_NODELIST")
	counts, haveCounts := lookup("SLURM_TASKS_PER_NODE")
	if !haveList || !haveCounts {
		return nil, nil
	}
	names, err := expandHostlist(list)
	if err != nil {
		return nil, err
	}
	numbers, err := expandCounts(counts)
	if err != nil {
		return nil, err
	}
	if len(names) != len(numbers) {
		return nil, fmt.Errorf("slurm: SLURM_JOB_NODELIST names %d nodes, SLURM_TASKS_PER_NODE has %d",
			len(names), len(numbers))
	}
	tasks := make(map[string]int, len(names))
	for i, name := range names {
		tasks[name] = numbers[i]
	}
	return tasks, nil
}
