// Package plugin turns a discovery.Discoverer into a separate program, and such a program into a
// Discoverer.
//
// A plugin is a program, not of this project, that knows a kind of cluster. In Go it is a main that
// calls Serve:
//
//	func main() { plugin.Serve(&racks{}) }
//
// In other languages it is a program that implements internal/wire/discovery.proto, over gRPC as
// github.com/hashicorp/go-plugin uses it: the two ends identify each other by certificates made for
// this run.
//
// New makes a Discoverer and Watcher of such a program. It starts the process at the first
// question, passes the settings, logs its output, and starts it again if it has died or hangs: for
// the caller, a death is only a failure of the current question. A host that the plugin pushes is
// found without waiting for a poll.
package plugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	goplugin "github.com/hashicorp/go-plugin"
)

// protocolVersion is that of internal/wire/discovery.proto. It grows when a plugin that was built
// before could not be understood any more.
const protocolVersion = 1

// cookieName and cookieValue are in the environment of a program that is started as a plugin, and
// tell it so.
const (
	cookieName  = "HVD_PLUGIN_COOKIE"
	cookieValue = "hvdrun-discovery"
)

const (
	serviceName = "discovery"
	maxMessage  = 4 << 20
	maxHosts    = 1 << 16
)

// handshake is what both ends know of each other beforehand.
var handshake = goplugin.HandshakeConfig{MagicCookieKey: cookieName, MagicCookieValue: cookieValue}

// Configurer is an optional interface of a Discoverer passed to Serve that has settings. Configure
// is called once, before all other methods, with the settings of --discovery-config; without that
// flag the map is empty. Configure owns the map. Its error ends the start of the plugin; a
// *SettingError names the key, as CheckSettings does for unknown keys.
type Configurer interface {
	Configure(settings map[string]string) error
}

// SettingError reports a setting that is refused.
type SettingError struct {
	Key string
	Err error
}

// Error names the key.
func (e *SettingError) Error() string { return fmt.Sprintf("setting %q: %v", e.Key, e.Err) }

// Unwrap returns what is wrong with the value.
func (e *SettingError) Unwrap() error { return e.Err }

// CheckSettings returns a *SettingError for a setting with an unknown key; it lists the known ones.
func CheckSettings(settings map[string]string, known ...string) error {
	for _, key := range slices.Sorted(maps.Keys(settings)) {
		if !slices.Contains(known, key) {
			what := "this source has no settings"
			if len(known) > 0 {
				what = "known are " + strings.Join(known, ", ")
			}
			return &SettingError{Key: key, Err: fmt.Errorf("not known; %s", what)}
		}
	}
	return nil
}
