// Package plugin turns a discovery.Discoverer into a separate program, and such a program into a
// Discoverer.
//
// A plugin is a program outside of this project that finds the hosts of some kind of cluster. In Go
// it is a main that calls Serve:
//
//	func main() { plugin.Serve(&racks{}) }
//
// In other languages it is a program that implements internal/wire/discovery.proto, over gRPC as
// github.com/hashicorp/go-plugin uses it: the two ends identify each other by certificates made for
// this run.
//
// New returns a Discoverer and Watcher for such a program. It starts the process at the first call,
// passes the settings, logs its output, and starts it again if it has died or hangs: for the
// caller, a death is only a failure of the current call. A host that the plugin pushes is found
// without waiting for a poll.
package plugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	goplugin "github.com/hashicorp/go-plugin"
)

// protocolVersion is the version of internal/wire/discovery.proto. It is increased when hvdrun can
// no longer understand plugins that were built before.
const protocolVersion = 1

// cookieName and cookieValue are a variable in the environment of a plugin, by which a program
// knows that it was started as a plugin.
const (
	cookieName  = "HVD_PLUGIN_COOKIE"
	cookieValue = "hvdrun-discovery"
)

const (
	serviceName = "discovery"
	maxMessage  = 4 << 20
	maxHosts    = 1 << 16
)

// handshake is what both ends know in advance.
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

// Unwrap returns the reason why the value is refused.
func (e *SettingError) Unwrap() error { return e.Err }

// CheckSettings returns a *SettingError for a setting with an unknown key; the error lists the
// known keys.
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
