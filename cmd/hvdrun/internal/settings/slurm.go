package settings

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

const (
	// slurmPatience is how long a job waits for enough nodes of Slurm by default.
	slurmPatience = 24 * time.Hour
	// SlurmDrain is how long agents on Slurm's nodes wait by default for their workers to leave.
	// Nodes are drained SlurmDrain plus SlurmMargin before their Slurm jobs end.
	SlurmDrain, SlurmMargin = 50 * time.Second, 10 * time.Second
)

// SlurmSettings are the settings of --slurm.
type SlurmSettings struct {
	On     bool
	Args   string // options of sbatch
	Folder string // folder of the job with the files for its agents; "": no job
	JobID  string // of the Slurm job in which hvdrun runs; "": none
	Slots  int    // number of slots of a node
}

// KeyPath returns the path of the key of the job's agents. The folder must be visible on the nodes.
func (c *SlurmSettings) KeyPath() string { return filepath.Join(c.Folder, "key") }

// JoinPath returns the path of the file with the driver's address, host:port.
func (c *SlurmSettings) JoinPath() string { return filepath.Join(c.Folder, "join") }

// AgentPath returns the path of the script that a node runs.
func (c *SlurmSettings) AgentPath() string { return filepath.Join(c.Folder, "agent") }

// BatchPath returns the path of the script of a Slurm job of one node.
func (c *SlurmSettings) BatchPath() string { return filepath.Join(c.Folder, "batch") }

func setSlurmArgs(s *Settings, text string) error {
	if strings.ContainsAny(text, "\r\n") {
		return errors.New("the options must be in one line")
	}
	s.Slurm.Args = text
	return nil
}

// slurmOwn lists the settings of the plugin that --slurm sets.
var slurmOwn = []string{"job_id", "job_name", "script", "step", "slots", "host"}

// checkSlurm returns an error for settings that contradict --slurm, or that need it.
func (s *Settings) checkSlurm() error {
	if !s.Slurm.On {
		if s.Given("slurm-args") {
			return fmt.Errorf("%s: it needs --slurm", s.Origin("slurm-args"))
		}
		return nil
	}
	for _, name := range []string{"hosts", "hostfile", "host-discovery-script", "gossip-join", "cluster", "gossip-key-file", "gossip-label"} {
		if s.Given(name) {
			return fmt.Errorf("%s and %s: each names the hosts; give only one of them", s.Origin("slurm"), s.Origin(name))
		}
	}
	if s.Given("journal") {
		return fmt.Errorf("%s and %s: the copy lacks the key of the agents on Slurm's nodes; give one of them",
			s.Origin("slurm"), s.Origin("journal"))
	}
	for _, key := range slurmOwn {
		if _, given := s.PluginSettings[key]; given {
			return fmt.Errorf("%s: %s is set by %s", s.Origin("discovery-config"), key, s.Origin("slurm"))
		}
	}
	return nil
}
