// Package plugin makes a discovery.Discoverer of a program of its own, and a program of a
// Discoverer.
//
// A plugin is a binary from elsewhere that knows a cluster that this project does
// not. In Go it is a main that calls Serve:
//
//	func main() { plugin.Serve(&racks{}) }
//
// and in any language a program that keeps to internal/wire/discovery.proto, gRPC as
// github.com/hashicorp/go-plugin has it: the two ends know each other by certificates made for this
// one run.
//
// New makes a Discoverer and Watcher of such a binary. It starts the process when it is first
// asked, gives it its settings, logs what it prints, and starts it again when it has died or is
// stuck: to who asks, a death is a failure of the question under way and no more. A host that the
// plugin pushes is found without waiting for a poll.
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

// Configurer is what a Discoverer given to Serve may be besides: one that has settings. Configure
// is called once, before anything else, with what stands in --discovery-config: an empty map where
// that is not given. It owns the map. Its error ends the start of the plugin; a *SettingError names
// the key, as CheckSettings does for keys that are not known.
type Configurer interface {
	Configure(settings map[string]string) error
}

// SettingError is a setting that is refused.
type SettingError struct {
	Key string
	Err error
}

// Error names the key.
func (e *SettingError) Error() string { return fmt.Sprintf("setting %q: %v", e.Key, e.Err) }

// Unwrap returns what is wrong with the value.
func (e *SettingError) Unwrap() error { return e.Err }

// CheckSettings returns a *SettingError for a setting whose key is none of the known ones, which it
// lists.
func CheckSettings(settings map[string]string, known ...string) error {
	for _, key := range slices.Sorted(maps.Keys(settings)) {
		if !slices.Contains(known, key) {
			what := "there are none"
			if len(known) > 0 {
				what = "known are " + strings.Join(known, ", ")
			}
			return &SettingError{Key: key, Err: fmt.Errorf("not known; %s", what)}
		}
	}
	return nil
}
