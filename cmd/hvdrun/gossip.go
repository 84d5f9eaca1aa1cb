package main

import (
	"fmt"
	"net"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/agent/client"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// clusterSettings say which cluster of agents to look at, and how to be found in it.
type clusterSettings struct {
	join            []string
	keyFile, label  string
	bind, advertise string
	name            string // of an agent's host
	launchPort      int
	source          *gossip.Source // once it is open
	key             []byte
}

func clusterText(field func(*clusterSettings) *string) func(*settings, string) error {
	return text(func(s *settings) *string { return field(&s.cluster) })
}

func setJoin(s *settings, text string) (err error) {
	s.cluster.join, err = parseList(text)
	return err
}

func setLease(s *settings, text string) (err error) {
	s.lease, err = parseDuration(text)
	if err == nil && (s.lease < client.MinLease || s.lease > client.MaxLease) {
		err = fmt.Errorf("%q is not between %v and %v", text, client.MinLease, client.MaxLease)
	}
	return err
}

// checkGossip refuses settings of gossip that lack what they need.
func (s *settings) checkGossip() error {
	for _, name := range []string{"gossip-key-file", "gossip-label", "gossip-bind", "gossip-advertise"} {
		if s.given(name) && !s.given("gossip-join") {
			return fmt.Errorf("%s: there is no --gossip-join to use it for", s.origin(name))
		}
	}
	if s.given("gossip-join") && !s.given("gossip-key-file") {
		return fmt.Errorf("%s: --gossip-key-file is missing: the key that the agents have", s.origin("gossip-join"))
	}
	return nil
}

// openGossip returns the hosts of the cluster's agents.
func openGossip(s *settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	key, err := identity.ReadClusterKey(s.cluster.keyFile)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", s.origin("gossip-key-file"), err)
	}
	bind := s.cluster.bind
	if bind == "" && s.tuning.Listen != "" {
		bind = net.JoinHostPort(s.tuning.Listen, "0")
	}
	source := gossip.NewSource(gossip.Config{
		BindAddr: bind, AdvertiseAddr: s.cluster.advertise, Join: s.cluster.join,
		Key: key, Label: s.cluster.label, Log: log,
	})
	s.cluster.key, s.cluster.source = key, source
	return source, func() {
		if err := source.Close(); err != nil {
			log.WithError(err).Debug("leaving the cluster")
		}
	}, nil
}

// findAgent returns where the agent of a host takes drivers, in the cluster that is open.
func (s *settings) findAgent(host string) (addr string, ok bool) {
	m, ok := s.cluster.source.Agent(host)
	return m.LaunchAddr, ok && m.LaunchAddr != ""
}
