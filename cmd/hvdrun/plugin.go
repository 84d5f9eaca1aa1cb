package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/internal/audit"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

// setPluginSettings reads key=value, a line each. What stands after the first = is the value as it
// is.
func setPluginSettings(s *settings, text string) error {
	s.pluginSettings = map[string]string{}
	for line := range strings.SplitSeq(text, "\n") {
		if strings.TrimSpace(line) == "" {
			continue
		}
		key, value, found := strings.Cut(line, "=")
		key = strings.TrimSpace(key)
		if !found || key == "" {
			return fmt.Errorf("%q is not of the form key=value", line)
		}
		if _, twice := s.pluginSettings[key]; twice {
			return fmt.Errorf("%s is given twice", key)
		}
		s.pluginSettings[key] = value
	}
	return nil
}

// openPlugin returns the plugin, which starts when it is asked first. A guard of its own, which
// outlives it and not this process, ends what its process may have started.
func openPlugin(s *settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	path, err := exec.LookPath(s.plugin)
	if err != nil {
		return nil, nil, fmt.Errorf("%s cannot be run: %w", s.plugin, proc.ExplainStart(errors.Unwrap(err), s.plugin)) // err itself repeats the path
	}
	id := "plugin-" + rand.Text()
	guard, err := proc.StartGuard(plan.EnvRunID, id)
	if err != nil {
		return nil, nil, runError{err}
	}
	p := plugin.New(plugin.Config{
		Path: path, Settings: s.pluginSettings, Env: []string{plan.EnvRunID + "=" + id},
		CallTimeout: s.discoveryTimeout, Log: log, Stray: s.stray,
		Started: func(pid int, err error) {
			s.record(audit.Record{What: "start plugin", Program: path, PID: pid, Outcome: audit.Of(err)})
		},
	})
	return p, func() {
		_ = p.Close()
		if err := guard.Close(); err != nil {
			log.WithError(err).Warn("the discovery plugin has left something behind")
		}
	}, nil
}
