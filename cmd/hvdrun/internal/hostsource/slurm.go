package hostsource

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

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// CheckSlurmTools returns an error for a job with --slurm if Slurm's programs or the plugin are
// missing.
func CheckSlurmTools(s *settings.Settings, env []string) error {
	if !s.Slurm.On {
		return nil
	}
	programs := []string{"sbatch", "squeue", "scontrol", "scancel"}
	if id, _ := cli.Lookup(env, "SLURM_JOB_ID"); id != "" {
		programs = append(programs, "srun")
	}
	dir := s.PluginSettings["bin"]
	missing := slices.DeleteFunc(programs, func(name string) bool {
		_, err := exec.LookPath(filepath.Join(dir, name)) // in PATH if dir is empty
		return err == nil
	})
	if len(missing) > 0 {
		return fmt.Errorf("%s: not found in %s: %s; install Slurm's client programs, or name their folder by --discovery-config bin=DIR",
			s.Origin("slurm"), cmp.Or(dir, "$PATH"), strings.Join(missing, ", "))
	}
	if _, err := slurmSlots(env, s.SlotsPerHost); err != nil {
		return fmt.Errorf("%s: %w", s.Origin("slurm"), err)
	}
	_, err := slurmPlugin(s)
	return err
}

// slurmPlugin returns the path of the plugin slurm: the one in the settings, or the one that came
// with this program.
func slurmPlugin(s *settings.Settings) (string, error) {
	if s.Plugin != "" {
		return s.Plugin, nil
	}
	path, places, err := ownPlugin("slurm")
	if err != nil {
		return "", fmt.Errorf("%s: %w", s.Origin("slurm"), err)
	}
	if path != "" {
		return path, nil
	}
	return "", fmt.Errorf("%s: plugin slurm not found, neither %s; --discovery-plugin names one", s.Origin("slurm"), strings.Join(places, " nor "))
}

// manyTasks matches SLURM_TASKS_PER_NODE if all nodes have the same number of tasks.
var manyTasks = regexp.MustCompile(`^(\d+)(\(x\d+\))?$`)

// slurmSlots returns the number of slots of a node: the given number if it is set; otherwise, in a
// Slurm job, the job's GPUs per node, or its tasks per node; outside a Slurm job, 1.
func slurmSlots(env []string, given int) (int, error) {
	id, _ := cli.Lookup(env, "SLURM_JOB_ID")
	if given > 0 || id == "" {
		return max(given, 1), nil
	}
	for _, name := range []string{"SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE"} {
		text, _ := cli.Lookup(env, name)
		if n, err := strconv.Atoi(text[strings.LastIndex(text, ":")+1:]); err == nil && n > 0 { // a100:8
			return n, nil
		}
	}
	text, there := cli.Lookup(env, "SLURM_TASKS_PER_NODE")
	if !there {
		return 1, nil
	}
	if m := manyTasks.FindStringSubmatch(text); m != nil {
		return strconv.Atoi(m[1])
	}
	return 0, fmt.Errorf("the nodes of job %s have different numbers of tasks (%s): --slots-per-host says how many workers each is to have",
		id, text)
}

// TakeSlurm completes the settings of --slurm for a job with the folder d, which may be nil.
func TakeSlurm(s *settings.Settings, env []string, d *jobdir.Dir) (err error) {
	c := &s.Slurm
	if !c.On {
		return nil
	}
	if d == nil || !d.Named && filepath.Dir(d.Path) != jobdir.StateDirs(env, jobdir.Shared)[0] {
		return cli.Failed(errors.New("--slurm: the job has no folder in the home folder, which its nodes must see; " +
			"--job-dir names one that they see"))

	}
	c.Folder = d.SlurmPath()
	c.JobID, _ = cli.Lookup(env, "SLURM_JOB_ID")
	c.Slots, err = slurmSlots(env, s.SlotsPerHost)
	return err
}

// openSlurm returns the source of the nodes that Slurm gives to the job. It consists of gossip,
// which finds the agents on the nodes and uses the job's own key, and of the plugin, which requests
// nodes from Slurm.
func openSlurm(s *settings.Settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	c := &s.Slurm
	if c.Folder == "" {
		return nil, nil, errors.New("only a job asks for nodes; squeue and sinfo show the existing ones")
	}
	var err error
	if s.Plugin, err = slurmPlugin(s); err != nil {
		return nil, nil, err
	}
	if err := writeSlurm(s); err != nil {
		return nil, nil, cli.Failed(err)
	}
	s.PluginSettings = maps.Clone(s.PluginSettings)
	if s.PluginSettings == nil {
		s.PluginSettings = map[string]string{}
	}
	s.PluginSettings["job_name"], s.PluginSettings["script"] = s.Cluster.Label, c.BatchPath()
	s.PluginSettings["slots"] = strconv.Itoa(c.Slots)
	if c.JobID != "" {
		s.PluginSettings["job_id"], s.PluginSettings["step"] = c.JobID, c.AgentPath()
	}
	if _, given := s.PluginSettings["notice"]; !given {
		s.PluginSettings["notice"] = (slurmDrain(s) + settings.SlurmMargin).String()
	}
	nodes, closeNodes, err := openPlugin(s, log)
	if err != nil {
		return nil, nil, err
	}
	agents, closeAgents, err := OpenGossip(s, log)
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

func slurmDrain(s *settings.Settings) time.Duration {
	return cmp.Or(s.Timeouts.Drain, settings.SlurmDrain)
}

// writeSlurm writes into the job's folder what the agents need: the driver's address, which changes
// when another driver takes over, and the scripts that Slurm runs.
func writeSlurm(s *settings.Settings) error {
	c := &s.Slurm
	if err := safefile.MakeDir(c.Folder, safefile.Private); err != nil {
		return err
	}
	if err := identity.GenerateClusterKey(c.KeyPath()); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	join, err := bindSlurm(s)
	if err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	s.Cluster.KeyFile, s.Cluster.Label, s.Cluster.Join = c.KeyPath(), "hvdrun-"+s.RunID, []string{join}
	for path, text := range map[string]string{
		c.JoinPath():  join + "\n",
		c.AgentPath(): slurmAgent(s, cmp.Or(s.SSH.RemoteHvdrun, program)),
		c.BatchPath(): batch(c),
	} {
		if err := safefile.Replace(path, []byte(text), safefile.Private); err != nil {
			return err
		}
	}
	return nil
}

// bindSlurm chooses the address on which to listen for the agents, with the port of the previous
// driver if it is free. It returns the address that the agents join.
func bindSlurm(s *settings.Settings) (join string, err error) {
	host, port, err := net.SplitHostPort(cmp.Or(s.Cluster.Bind, net.JoinHostPort(cmp.Or(s.Tuning.Listen, "0.0.0.0"), "0")))
	if err != nil {
		return "", fmt.Errorf("%s: %w", s.Origin("gossip-bind"), err)
	}
	if port == "0" {
		if port, err = slurmPort(s); err != nil {
			return "", err
		}
	}
	s.Cluster.Bind = net.JoinHostPort(host, port)
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", err
		}
	}
	return net.JoinHostPort(cmp.Or(s.Cluster.Advertise, host), port), nil
}

func slurmPort(s *settings.Settings) (string, error) {
	before, _ := safefile.OwnText(s.Slurm.JoinPath(), jobdir.MaxMembersText) // the file may not exist
	_, port, _ := net.SplitHostPort(strings.TrimSpace(string(before)))
	if n, err := strconv.Atoi(port); err == nil && identity.IsFreePort(n) {
		return port, nil
	}
	n, err := identity.FreePort()
	return strconv.Itoa(n), err
}

// slurmAgent returns the script that runs the agent on a node.
func slurmAgent(s *settings.Settings, program string) string {
	c := &s.Slurm
	more := ""
	if s.BindGPUs {
		more = " --bind-gpus"
	}
	return fmt.Sprintf(`# The agent of a node: a step of a job of Slurm.
exec %s agent --name "$SLURMD_NODENAME-$SLURM_JOB_ID" --slots %d --drain-timeout %v --key-file %s --label %s \
	--bind 0.0.0.0:0 --join "$(cat %s)"%s
`, quoteShell(program), c.Slots, slurmDrain(s), quoteShell(c.KeyPath()), s.Cluster.Label, quoteShell(c.JoinPath()), more)
}

// batch returns the script of a Slurm job of one node. The agent runs as a step, because Slurm
// signals only steps when the grace time of a preemption begins.
func batch(c *settings.SlurmSettings) string {
	more := ""
	if c.Args != "" {
		more = "#SBATCH " + c.Args + "\n"
	}
	output := strings.ReplaceAll(c.Folder, "%", "%%") + "/%N-%j.out"
	return fmt.Sprintf(`#!/bin/sh
#SBATCH --output="%s"
%sexport SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
exec srun --nodes=1 --ntasks=1 --mpi=none sh %s
`, output, more, quoteShell(c.AgentPath()))
}

func quoteShell(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
