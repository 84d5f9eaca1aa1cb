package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/driver/audit"
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

// ownPlugin returns the path of a plugin that came with this program, or if there is none of that
// name an empty one; and where it would be.
func ownPlugin(name string) (path string, places []string, err error) {
	own, err := os.Executable()
	if err == nil {
		own, err = filepath.EvalSymlinks(own)
	}
	if err != nil {
		return "", nil, err
	}
	path, places = pluginOf(own, name)
	return path, places, nil
}

// pluginOf is ownPlugin of the program at a path.
func pluginOf(program, name string) (path string, places []string) {
	places = []string{
		filepath.Join(filepath.Dir(program), "plugins", name), // of make build
		filepath.Join(filepath.Dir(program), "..", "lib", "hvdrun", "plugins", name),
	}
	for _, path := range places {
		if _, err := exec.LookPath(path); err == nil {
			return path, places
		}
	}
	return "", places
}

// pluginPath finds the program of --discovery-plugin. A name without a slash is that of a plugin
// that came with this program, before it is one of a program in PATH: file is such a one too.
func (s *settings) pluginPath() (string, error) {
	if !strings.Contains(s.plugin, "/") {
		if path, _, err := ownPlugin(s.plugin); err != nil || path != "" {
			return path, err
		}
	}
	path, err := exec.LookPath(s.plugin)
	if err != nil {
		return "", fmt.Errorf("%s cannot be run: %w", s.plugin, proc.ExplainStart(errors.Unwrap(err), s.plugin)) // err itself repeats the path
	}
	return path, nil
}

// openPlugin returns the plugin, which starts when it is asked first. A guard of its own, which
// outlives it and not this process, ends what its process may have started.
func openPlugin(s *settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	path, err := s.pluginPath()
	if err != nil {
		return nil, nil, err
	}
	id := "plugin-" + rand.Text()
	guard, err := proc.StartGuard(plan.EnvRunID, id)
	if err != nil {
		return nil, nil, workFailed(err)
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
