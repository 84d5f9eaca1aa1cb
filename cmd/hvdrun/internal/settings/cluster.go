package settings

import (
	"fmt"

	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// ClusterSettings are the settings of the cluster of agents that this process joins.
type ClusterSettings struct {
	Join            []string
	KeyFile, Label  string
	Dir             string // folder of the cluster's authority, for a driver
	Bind, Advertise string
	Members         []string // further members of the cluster that the previous driver knew
	agentSettings
	Source      *gossip.Source        // nil until the source is open
	Credentials *identity.Credentials // of the driver; nil until the source is open
}

// agentSettings are the settings that only an agent has.
type agentSettings struct {
	Name       string // of the host
	LaunchPort int
	// StoppedStatus is the exit status of an agent that was asked to stop.
	StoppedStatus int
	Enroll        string // the registrar, host:port
	TokenFile     string
	StateDir      string
	RunAs         string // the policy's file
}

func setJoin(s *Settings, text string) (err error) {
	s.Cluster.Join, err = parseList(text)
	return err
}

func setLease(s *Settings, text string) (err error) {
	s.Lease, err = ParseDuration(text)
	if err == nil && (s.Lease < client.MinLease || s.Lease > client.MaxLease) {
		err = fmt.Errorf("%q is not between %v and %v", text, client.MinLease, client.MaxLease)
	}
	return err
}

// checkGossip returns an error if settings of gossip lack others that they need.
func (s *Settings) checkGossip() error {
	for _, name := range []string{"cluster", "gossip-key-file", "gossip-label", "gossip-bind", "gossip-advertise"} {
		if s.Given(name) && !s.Given("gossip-join") && !s.Slurm.On {
			return fmt.Errorf("%s: it needs --gossip-join", s.Origin(name))
		}
	}
	if s.Given("gossip-key-file") && s.Given("cluster") {
		return fmt.Errorf("%s and %s: give one of them", s.Origin("cluster"), s.Origin("gossip-key-file"))
	}
	if s.Given("gossip-join") && !s.Given("gossip-key-file") && !s.Given("cluster") {
		return fmt.Errorf("%s: --gossip-key-file is missing: the key that the agents have; "+
			"or --cluster, the folder of their cluster (hvdrun cluster init)", s.Origin("gossip-join"))
	}
	return nil
}
