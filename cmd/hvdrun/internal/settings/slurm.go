package settings

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

const (
	// slurmPatience is how long a job waits for enough nodes of Slurm, unless it is told.
	slurmPatience = 24 * time.Hour
	// SlurmDrain is how long agents on Slurm's nodes wait for their workers to leave, unless they
	// are told. Nodes are drained by that and SlurmMargin earlier than their jobs end.
	SlurmDrain, SlurmMargin = 50 * time.Second, 10 * time.Second
)

// SlurmSettings are those of --slurm.
type SlurmSettings struct {
	On     bool
	Args   string // options of sbatch
	Folder string // of the job, for what its agents need; "": there is no job
	JobID  string // in which hvdrun runs; "": in none
	Slots  int    // of a node
}

// KeyPath is the file of the key of the job's agents. The nodes must see the folder.
func (c *SlurmSettings) KeyPath() string { return filepath.Join(c.Folder, "key") }

// JoinPath is the file that says where the driver is, host:port.
func (c *SlurmSettings) JoinPath() string { return filepath.Join(c.Folder, "join") }

// AgentPath is the script that a node runs.
func (c *SlurmSettings) AgentPath() string { return filepath.Join(c.Folder, "agent") }

// BatchPath is the script of a job of one node.
func (c *SlurmSettings) BatchPath() string { return filepath.Join(c.Folder, "batch") }

func setSlurmArgs(s *Settings, text string) error {
	if strings.ContainsAny(text, "\r\n") {
		return errors.New("the options are to be in one line")
	}
	s.Slurm.Args = text
	return nil
}

// slurmOwn are the plugin's settings that --slurm makes.
var slurmOwn = []string{"job_id", "job_name", "script", "step", "slots", "host"}

// checkSlurm refuses what cannot be meant together with --slurm, or without it.
func (s *Settings) checkSlurm() error {
	if !s.Slurm.On {
		if s.Given("slurm-args") {
			return fmt.Errorf("%s: there is no --slurm to use it for", s.Origin("slurm-args"))
		}
		return nil
	}
	for _, name := range []string{"hosts", "hostfile", "host-discovery-script", "gossip-join", "cluster", "gossip-key-file", "gossip-label"} {
		if s.Given(name) {
			return fmt.Errorf("%s and %s: each says which hosts there are; give one of them", s.Origin("slurm"), s.Origin(name))
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
