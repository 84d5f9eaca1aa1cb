package main

import (
	"crypto/rand"
	"fmt"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver/audit"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

// defaultSlots is the room on a host whose line does not tell.
func (s *settings) defaultSlots() int {
	if s.slotsPerHost > 0 {
		return s.slotsPerHost
	}
	return max(1, gpus())
}

// openers make a source of each kind, by the setting that asks for it. close ends the source, and
// may be nil.
var openers = map[string]func(s *settings, log logrus.FieldLogger) (source discovery.Discoverer, close func(), err error){
	"host-discovery-script": openScript,
	"discovery-plugin":      openPlugin,
	"gossip-join":           openGossip,
	"slurm":                 openSlurm,
}

// openKind makes the source of a setting of settings.dynamic. close ends it, and may be nil.
func (s *settings) openKind(name string, log logrus.FieldLogger) (source discovery.Discoverer, close func(), err error) {
	return openers[name](s, log)
}

// openScript returns the script. What it starts for a job carries a mark, so that nothing of it
// outlives the job.
func openScript(s *settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	s.record(audit.Record{What: "discover", How: "a script is run again and again", Outcome: audit.Done})
	script := &discovery.Script{
		Command: s.script, DefaultSlots: s.defaultSlots(), Timeout: s.discoveryTimeout, Log: log,
	}
	if s.runID == "" {
		return script, nil, nil
	}
	id := "script-" + rand.Text()
	guard, err := proc.StartGuard(plan.EnvRunID, id)
	if err != nil {
		return nil, nil, workFailed(err)
	}
	script.Env = []string{plan.EnvRunID + "=" + id}
	return script, func() {
		if err := guard.Close(); err != nil {
			log.WithError(err).Warn("the discovery script has left something behind")
		}
	}, nil
}

// dynamic returns the settings that are given of those that name sources which are asked, or
// listened to, as long as the job runs. The sources are merged in this order (see discovery.Merge).
func (s *settings) dynamic() (names []string) {
	if s.slurm.on { // it has all that others have
		return []string{"slurm"}
	}
	for _, name := range []string{"host-discovery-script", "discovery-plugin", "gossip-join"} {
		if s.given(name) {
			names = append(names, name)
		}
	}
	return names
}

// fixedHosts returns the hosts that the settings name, by themselves or in a file; nil where
// sources are asked.
func (s *settings) fixedHosts() ([]plan.Host, error) {
	var hosts []plan.Host
	var err error
	switch {
	case len(s.dynamic()) > 0:
		return nil, nil
	case s.hosts != "":
		if hosts, err = plan.ParseHostList(s.hosts, s.defaultSlots()); err != nil {
			return nil, fmt.Errorf("%s: %w", s.origin("hosts"), err)
		}
	case s.hostfile != "":
		data, err := readHostfile(s.hostfile)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.origin("hostfile"), err)
		}
		if hosts, err = plan.ParseHostfile(data, s.defaultSlots()); err != nil {
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

// fixedOrigin names what has set the fixed hosts.
func (s *settings) fixedOrigin() string {
	if s.hostfile != "" {
		return s.origin("hostfile")
	}
	return s.origin("hosts")
}

// openSource returns what fixed, or else the sources that are given, make one of. close ends it; it
// is there without an error.
func (s *settings) openSource(fixed []plan.Host, log logrus.FieldLogger) (source discovery.Discoverer, close func(), err error) {
	if fixed != nil {
		return discovery.Fixed(fixed), func() {}, nil
	}
	var named []discovery.Named
	var closers []func()
	close = func() {
		for _, c := range closers {
			c()
		}
	}
	for _, name := range s.dynamic() {
		source, closer, err := s.openKind(name, log)
		if err != nil {
			close()
			return nil, nil, fmt.Errorf("%s: %w", s.origin(name), err)
		}
		if closer != nil {
			closers = append(closers, closer)
		}
		named = append(named, discovery.Named{Name: s.origin(name), Source: source})
	}
	if len(named) == 1 {
		return named[0].Source, close, nil
	}
	return discovery.Merge(named...), close, nil
}

// size checks the bounds of the worlds against each other and against the fixed hosts.
func (s *settings) size(fixed []plan.Host) (job.Size, error) {
	elastic := s.given("min-np") || s.given("max-np") || len(s.dynamic()) > 0
	np := s.np
	slots := 0
	for _, h := range fixed {
		slots += h.Slots
	}
	if !s.given("np") {
		if s.hosts == "" && s.hostfile == "" {
			return job.Size{}, fmt.Errorf("-np is missing: the number of slots to wait for before the start")
		}
		if np = max(1, slots-s.spares); s.maxNP > 0 {
			np = min(np, s.maxNP)
		}
	}
	if s.spares > 0 && !elastic {
		return job.Size{}, fmt.Errorf("%s is %d, and the job is not elastic: give --min-np too", s.origin("spares"), s.spares)
	}
	switch {
	case s.minNP > np:
		return job.Size{}, fmt.Errorf("%s is %d, more than the %d slots of %s", s.origin("min-np"), s.minNP, np, s.fixedOrigin())
	case fixed != nil && slots < max(np, 1):
		return job.Size{}, workFailed(fmt.Errorf("%w: %d are needed (%s), and the hosts given have %d",
			job.ErrNotEnoughSlots, max(np, 1), s.origin("np"), slots))

	}
	return job.Size{NP: np, Min: s.minNP, Max: s.maxNP, Spares: s.spares, Elastic: elastic, TasksOnly: s.tasksOnly, Stateless: s.restart.workers}, nil
}
