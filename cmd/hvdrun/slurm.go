package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	// slurmPatience is how long a job waits for enough nodes of Slurm, unless it is told.
	slurmPatience = 24 * time.Hour
	// slurmDrain is how long agents on Slurm's nodes wait for their workers to leave, unless they
	// are told. Nodes are drained by that and slurmMargin earlier than their jobs end.
	slurmDrain, slurmMargin = 50 * time.Second, 10 * time.Second
)

// slurmSettings are those of --slurm.
type slurmSettings struct {
	on     bool
	args   string // options of sbatch
	folder string // of the job, for what its agents need; "": there is no job
	jobID  string // in which hvdrun runs; "": in none
	slots  int    // of a node
}

// What is in the folder. The nodes must see it.
func (c *slurmSettings) keyPath() string   { return filepath.Join(c.folder, "key") }
func (c *slurmSettings) joinPath() string  { return filepath.Join(c.folder, "join") } // where the driver is, host:port
func (c *slurmSettings) agentPath() string { return filepath.Join(c.folder, "agent") }
func (c *slurmSettings) batchPath() string { return filepath.Join(c.folder, "batch") }

func setSlurmArgs(s *settings, text string) error {
	if strings.ContainsAny(text, "\r\n") {
		return errors.New("the options are to be in one line")
	}
	s.slurm.args = text
	return nil
}

// slurmOwn are the plugin's settings that --slurm makes.
var slurmOwn = []string{"job_id", "job_name", "script", "step", "slots", "host"}

// checkSlurm refuses what cannot be meant together with --slurm, or without it.
func (s *settings) checkSlurm() error {
	if !s.slurm.on {
		if s.given("slurm-args") {
			return fmt.Errorf("%s: there is no --slurm to use it for", s.origin("slurm-args"))
		}
		return nil
	}
	for _, name := range []string{"hosts", "hostfile", "host-discovery-script", "gossip-join", "cluster", "gossip-key-file", "gossip-label"} {
		if s.given(name) {
			return fmt.Errorf("%s and %s: each says which hosts there are; give one of them", s.origin("slurm"), s.origin(name))
		}
	}
	if s.given("journal") {
		return fmt.Errorf("%s and %s: the copy lacks the key of the agents on Slurm's nodes; give one of them",
			s.origin("slurm"), s.origin("journal"))
	}
	for _, key := range slurmOwn {
		if _, given := s.pluginSettings[key]; given {
			return fmt.Errorf("%s: %s is set by %s", s.origin("discovery-config"), key, s.origin("slurm"))
		}
	}
	return nil
}

// checkSlurmTools refuses a job with --slurm where Slurm's programs are missing, or the plugin.
func (s *settings) checkSlurmTools(env []string) error {
	if !s.slurm.on {
		return nil
	}
	programs := []string{"sbatch", "squeue", "scontrol", "scancel"}
	if id, _ := lookup(env, "SLURM_JOB_ID"); id != "" {
		programs = append(programs, "srun")
	}
	dir := s.pluginSettings["bin"]
	missing := slices.DeleteFunc(programs, func(name string) bool {
		_, err := exec.LookPath(filepath.Join(dir, name)) // of $PATH where dir is empty
		return err == nil
	})
	if len(missing) > 0 {
		return fmt.Errorf("%s: not found in %s: %s; install Slurm's client programs, or name their folder by --discovery-config bin=DIR",
			s.origin("slurm"), cmp.Or(dir, "$PATH"), strings.Join(missing, ", "))
	}
	if _, err := slurmSlots(env, s.slotsPerHost); err != nil {
		return fmt.Errorf("%s: %w", s.origin("slurm"), err)
	}
	_, err := s.slurmPlugin()
	return err
}

// slurmPlugin returns the plugin slurm: the one that is named, or that which came with this
// program.
func (s *settings) slurmPlugin() (string, error) {
	if s.plugin != "" {
		return s.plugin, nil
	}
	path, places, err := ownPlugin("slurm")
	if err != nil {
		return "", fmt.Errorf("%s: %w", s.origin("slurm"), err)
	}
	if path != "" {
		return path, nil
	}
	return "", fmt.Errorf("%s: there is no plugin slurm, neither %s; --discovery-plugin names one", s.origin("slurm"), strings.Join(places, " nor "))
}

// manyTasks is what SLURM_TASKS_PER_NODE says where all nodes have the same number.
var manyTasks = regexp.MustCompile(`^(\d+)(\(x\d+\))?$`)

// slurmSlots returns how many slots a node has: as many as were given, or as the job in which
// hvdrun runs has GPUs or else tasks on a node. Outside of a job it is one.
func slurmSlots(env []string, given int) (int, error) {
	id, _ := lookup(env, "SLURM_JOB_ID")
	if given > 0 || id == "" {
		return max(given, 1), nil
	}
	for _, name := range []string{"SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE"} {
		text, _ := lookup(env, name)
		if n, err := strconv.Atoi(text[strings.LastIndex(text, ":")+1:]); err == nil && n > 0 { // a100:8
			return n, nil
		}
	}
	text, there := lookup(env, "SLURM_TASKS_PER_NODE")
	if !there {
		return 1, nil
	}
	if m := manyTasks.FindStringSubmatch(text); m != nil {
		return strconv.Atoi(m[1])
	}
	return 0, fmt.Errorf("the nodes of job %s have different numbers of tasks (%s): --slots-per-host says how many workers each is to have",
		id, text)
}

// takeSlurm makes the settings of --slurm those of a job. d may be nil.
func (s *settings) takeSlurm(env []string, d *jobDir) (err error) {
	c := &s.slurm
	if !c.on {
		return nil
	}
	if d == nil || !d.named && filepath.Dir(d.path) != stateDirs(env, shared)[0] {
		return workFailed(errors.New("--slurm: the job has no folder in the home folder, where its nodes would see it; " +
			"--job-dir names one that they see"))

	}
	c.folder = d.slurmPath()
	c.jobID, _ = lookup(env, "SLURM_JOB_ID")
	c.slots, err = slurmSlots(env, s.slotsPerHost)
	return err
}

// openSlurm returns the nodes that Slurm gives to the job: their agents, which are found by gossip
// and have a key of the job's own, and the plugin, which brings them.
func openSlurm(s *settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	c := &s.slurm
	if c.folder == "" {
		return nil, nil, errors.New("nodes are asked for by a job alone; squeue and sinfo show those there are")
	}
	var err error
	if s.plugin, err = s.slurmPlugin(); err != nil {
		return nil, nil, err
	}
	if err := s.writeSlurm(); err != nil {
		return nil, nil, workFailed(err)
	}
	s.pluginSettings = maps.Clone(s.pluginSettings)
	if s.pluginSettings == nil {
		s.pluginSettings = map[string]string{}
	}
	s.pluginSettings["job_name"], s.pluginSettings["script"] = s.cluster.label, c.batchPath()
	s.pluginSettings["slots"] = strconv.Itoa(c.slots)
	if c.jobID != "" {
		s.pluginSettings["job_id"], s.pluginSettings["step"] = c.jobID, c.agentPath()
	}
	if _, given := s.pluginSettings["notice"]; !given {
		s.pluginSettings["notice"] = (s.slurmDrain() + slurmMargin).String()
	}
	nodes, closeNodes, err := openPlugin(s, log)
	if err != nil {
		return nil, nil, err
	}
	agents, closeAgents, err := openGossip(s, log)
	if err != nil {
		closeNodes()
		return nil, nil, err
	}
	merged := discovery.Merge(discovery.Named{Name: "Slurm", Source: nodes}, discovery.Named{Name: "the agents on its nodes", Source: agents})
	return merged, func() {
		closeNodes()
		closeAgents()
	}, nil
}

func (s *settings) slurmDrain() time.Duration { return cmp.Or(s.timeouts.Drain, slurmDrain) }

// writeSlurm writes what agents need into the job's folder: the driver's address, which is another
// one when another driver goes on with the job, and what Slurm is to run.
func (s *settings) writeSlurm() error {
	c := &s.slurm
	if err := safefile.MakeDir(c.folder, safefile.Private); err != nil {
		return err
	}
	if err := identity.GenerateClusterKey(c.keyPath()); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	join, err := s.bindSlurm()
	if err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	s.cluster.keyFile, s.cluster.label, s.cluster.join = c.keyPath(), "hvdrun-"+s.runID, []string{join}
	for path, text := range map[string]string{
		c.joinPath():  join + "\n",
		c.agentPath(): s.slurmAgent(cmp.Or(s.ssh.remoteHvdrun, program)),
		c.batchPath(): c.batch(),
	} {
		if err := safefile.Replace(path, []byte(text), safefile.Private); err != nil {
			return err
		}
	}
	return nil
}

// bindSlurm chooses where to listen to the agents, at the port of the driver before if that is
// free, and returns what they are to join.
func (s *settings) bindSlurm() (join string, err error) {
	host, port, err := net.SplitHostPort(cmp.Or(s.cluster.bind, net.JoinHostPort(cmp.Or(s.tuning.Listen, "0.0.0.0"), "0")))
	if err != nil {
		return "", fmt.Errorf("%s: %w", s.origin("gossip-bind"), err)
	}
	if port == "0" {
		if port, err = s.slurmPort(); err != nil {
			return "", err
		}
	}
	s.cluster.bind = net.JoinHostPort(host, port)
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", err
		}
	}
	return net.JoinHostPort(cmp.Or(s.cluster.advertise, host), port), nil
}

func (s *settings) slurmPort() (string, error) {
	before, _ := safefile.OwnText(s.slurm.joinPath(), maxMembersText) // there may be none
	_, port, _ := net.SplitHostPort(strings.TrimSpace(string(before)))
	if n, err := strconv.Atoi(port); err == nil && identity.IsFreePort(n) {
		return port, nil
	}
	n, err := identity.FreePort()
	return strconv.Itoa(n), err
}

// slurmAgent is what runs on a node.
func (s *settings) slurmAgent(program string) string {
	c := &s.slurm
	more := ""
	if s.bindGPUs {
		more = " --bind-gpus"
	}
	return fmt.Sprintf(`# The agent of a node: a step of a job of Slurm.
exec %s agent --name "$SLURMD_NODENAME-$SLURM_JOB_ID" --slots %d --drain-timeout %v --key-file %s --label %s \
	--bind 0.0.0.0:0 --join "$(cat %s)"%s
`, quoteShell(program), c.slots, s.slurmDrain(), quoteShell(c.keyPath()), s.cluster.label, quoteShell(c.joinPath()), more)
}

// batch is the script of a job of one node. Its agent is a step, for steps alone are told when the
// grace of a preemption begins.
func (c *slurmSettings) batch() string {
	more := ""
	if c.args != "" {
		more = "#SBATCH " + c.args + "\n"
	}
	output := strings.ReplaceAll(c.folder, "%", "%%") + "/%N-%j.out"
	return fmt.Sprintf(`#!/bin/sh
#SBATCH --output="%s"
%sexport SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
exec srun --nodes=1 --ntasks=1 --mpi=none sh %s
`, output, more, quoteShell(c.agentPath()))
}

func quoteShell(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// forgetSlurm removes the key of a job that has ended, and what needs it. The agents' output stays.
func (d *jobDir) forgetSlurm() error {
	c := slurmSettings{folder: d.slurmPath()}
	var failed error
	for _, path := range []string{c.keyPath(), c.joinPath(), c.agentPath(), c.batchPath()} {
		failed = errors.Join(failed, gone(os.Remove(path)))
	}
	_ = os.Remove(c.folder) // where nothing is in it
	return failed
}
