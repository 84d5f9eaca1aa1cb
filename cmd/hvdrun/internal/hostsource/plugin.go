package hostsource

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/internal/proc"
)

// OwnPlugins are the plugins that come with hvdrun.
var OwnPlugins = []string{"dns", "file", "http", "kubernetes", "slurm"}

// ownPlugin returns the path of a plugin that came with this program, or an empty path if no plugin
// has the name, and the places that it searched.
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

// pluginOf is like ownPlugin, for the program at the given path.
func pluginOf(program, name string) (path string, places []string) {
	places = []string{
		filepath.Join(filepath.Dir(program), "plugins", name), // of make build
		filepath.Join(filepath.Dir(program), "..", "lib", "hvdrun", "plugins", name),
	}
	beside := filepath.Join(filepath.Dir(program), name) // of go install, where file and http may be other programs
	if info, err := buildinfo.ReadFile(beside); err == nil && info.Path == pluginPackages+name {
		return beside, places
	}
	for _, path := range places {
		if _, err := exec.LookPath(path); err == nil {
			return path, places
		}
	}
	return "", places
}

// pluginPackages is the prefix of the import paths of the plugins.
const pluginPackages = "github.com/hvdrun/hvdrun/plugins/"

// pluginPath finds the program of --discovery-plugin. A name without a slash names a plugin that
// came with this program or, if there is no such plugin, a program in PATH.
func pluginPath(s *settings.Settings) (string, error) {
	bare := !strings.Contains(s.Plugin, "/")
	if bare {
		path, places, err := ownPlugin(s.Plugin)
		if err != nil || path != "" {
			return path, err
		}
		if slices.Contains(OwnPlugins, s.Plugin) { // file and http are other programs in PATH
			return "", fmt.Errorf("plugin %s not found, neither %s; go install %s%s@VERSION installs it",
				s.Plugin, strings.Join(places, " nor "), pluginPackages, s.Plugin)
		}
	}
	path, err := exec.LookPath(s.Plugin)
	if err != nil {
		if like := settings.NearestOf(s.Plugin, OwnPlugins); bare && like != "" {
			return "", fmt.Errorf("plugin %s not found; did you mean %s?", s.Plugin, like)
		}
		return "", fmt.Errorf("%s cannot be run: %w", s.Plugin, proc.ExplainStart(errors.Unwrap(err), s.Plugin)) // err itself contains the path too
	}
	return path, nil
}

// openPlugin returns the plugin, whose process starts with the first call.
func openPlugin(s *settings.Settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	path, err := pluginPath(s)
	if err != nil {
		return nil, nil, err
	}
	mark, kill, err := guarded("plugin", log)
	if err != nil {
		return nil, nil, err
	}
	p := plugin.New(plugin.Config{
		Path: path, Settings: s.PluginSettings, Env: []string{mark},
		CallTimeout: s.DiscoveryTimeout, EndTimeout: s.PluginEndTimeout, Log: log, Stray: s.Stray,
		Started: func(pid int, err error) {
			s.Record(audit.Record{What: "start plugin", Program: path, PID: pid, Outcome: audit.Of(err)})
		},
	})
	return p, func() {
		_ = p.Close()
		kill()
	}, nil
}
