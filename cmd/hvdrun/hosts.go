package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// defaultSlots is the room on a host whose line does not tell.
func (s *settings) defaultSlots() int {
	if s.slotsPerHost > 0 {
		return s.slotsPerHost
	}
	return max(1, gpus())
}

// fixedHosts returns the hosts that the settings name, by themselves or in a file; nil where a script is asked.
func (s *settings) fixedHosts() ([]plan.Host, error) {
	var sources []string
	for _, name := range []string{"hosts", "hostfile", "host-discovery-script"} {
		if s.given(name) {
			sources = append(sources, s.origin(name))
		}
	}
	if len(sources) > 1 {
		return nil, fmt.Errorf("%s: each says which hosts there are; give one of them", strings.Join(sources, " and "))
	}
	var hosts []plan.Host
	var err error
	switch {
	case s.script != "":
		return nil, nil
	case s.hosts != "":
		if hosts, err = plan.ParseHostList(s.hosts, s.defaultSlots()); err != nil {
			return nil, fmt.Errorf("%s: %w", s.origin("hosts"), err)
		}
	case s.hostfile != "":
		data, err := os.ReadFile(s.hostfile)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.origin("hostfile"), err)
		}
		if hosts, err = plan.ParseHosts(string(data), s.defaultSlots()); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", s.origin("hostfile"), s.hostfile, err)
		}
		if len(hosts) == 0 {
			return nil, fmt.Errorf("%s: %s names no host", s.origin("hostfile"), s.hostfile)
		}
	case s.given("np"):
		return []plan.Host{{Name: "localhost", Slots: s.np}}, nil
	default:
		return []plan.Host{{Name: "localhost", Slots: s.defaultSlots()}}, nil
	}
	return hosts, nil
}

// discoverer returns the source of hosts that fixed, or else the script, is. What the script starts carries the run's mark,
// if it is for one, so that nothing of it outlives the run.
func (s *settings) discoverer(fixed []plan.Host, runID string, log logrus.FieldLogger) discovery.Discoverer {
	if fixed != nil {
		return discovery.Fixed(fixed)
	}
	script := &discovery.Script{
		Command: s.script, DefaultSlots: s.defaultSlots(), Timeout: s.discoveryTimeout, Log: log,
	}
	if runID != "" {
		script.Env = []string{plan.EnvRunID + "=" + runID}
	}
	return script
}

// size checks the bounds of the worlds against each other and against the fixed hosts.
func (s *settings) size(fixed []plan.Host) (driver.Size, error) {
	elastic := s.given("min-np") || s.given("max-np") || s.script != ""
	np := s.np
	slots := 0
	for _, h := range fixed {
		slots += h.Slots
	}
	if !s.given("np") {
		if s.hosts == "" && s.hostfile == "" {
			return driver.Size{}, fmt.Errorf("-np is missing: the number of slots to wait for before the start")
		}
		if np = slots; s.maxNP > 0 {
			np = min(np, s.maxNP)
		}
	}
	switch {
	case s.minNP > np:
		return driver.Size{}, fmt.Errorf("%s is %d, more than the %d of -np: min ≤ np ≤ max", s.origin("min-np"), s.minNP, np)
	case s.maxNP != 0 && s.maxNP < np:
		return driver.Size{}, fmt.Errorf("%s is %d, less than the %d of -np: min ≤ np ≤ max", s.origin("max-np"), s.maxNP, np)
	case fixed != nil && slots < max(np, 1):
		return driver.Size{}, runError{fmt.Errorf("%w: %d are needed (%s), and the hosts given have %d",
			driver.ErrNotEnoughSlots, max(np, 1), s.origin("np"), slots)}
	}
	return driver.Size{NP: np, Min: s.minNP, Max: s.maxNP, Elastic: elastic}, nil
}

// checkLocal refuses fixed hosts on which workers cannot be started.
func checkLocal(hosts []plan.Host) error {
	for _, h := range hosts {
		if !launch.IsLocal(h.Name) {
			return notLocal(h.Name)
		}
	}
	return nil
}

func notLocal(host string) error {
	return fmt.Errorf("host %q is not this machine: this version starts workers on this machine only", host)
}
