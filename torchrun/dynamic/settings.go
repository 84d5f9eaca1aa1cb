package dynamic

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
)

// The default values of Settings.
const (
	defaultJoin              = 600 * time.Second
	defaultLastCall          = 30 * time.Second
	defaultClose             = 30 * time.Second
	defaultHeartbeat         = 5 * time.Second
	defaultKeepAliveInterval = time.Second
	defaultKeepAliveAttempts = 3

	// waitQuiet is how long a node waits for others before it logs the wait.
	waitQuiet = 10 * time.Second
	// rollback is how long after the end of its join timeout a node still removes itself from the
	// record.
	rollback = 5 * time.Second
	// poll is the longest pause between two reads of the record.
	poll = time.Second
	// backAfter is how much later than this node others may reach a store that was unreachable.
	backAfter = time.Second
	// cached is how long a node uses its copy of the record before it reads the record again.
	cached = time.Second
	// lingerPerNode bounds, per node of a run, how long a node waits after a change.
	lingerPerNode = 3 * time.Millisecond
	// leastJitter and mostJitter bound the random pause before the first join of a run.
	leastJitter = 10 * time.Millisecond
	mostJitter  = 300 * time.Millisecond
)

// retreat bounds the random pause of a node after another node has written first.
var retreat = retry.Backoff{First: 2 * time.Millisecond, Most: 512 * time.Millisecond}

// Settings must be the same for all nodes of a run.
type Settings struct {
	// RunID identifies the run.
	RunID string
	// MinNodes and MaxNodes bound the number of nodes in a round.
	MinNodes, MaxNodes int
	// Join bounds Next, Heartbeat bounds one heartbeat, and Close bounds the other operations.
	// LastCall is how long a round with enough nodes waits for more. Zero: the defaults.
	Join, LastCall, Close, Heartbeat time.Duration
	// KeepAliveInterval is the time between two heartbeats. A node that has missed
	// KeepAliveAttempts of them counts as dead. Zero: the defaults.
	KeepAliveInterval time.Duration
	KeepAliveAttempts int
}

// withDefaults returns the settings with their zero fields filled in, or an error if they are not
// valid.
func (s Settings) withDefaults() (Settings, error) {
	for _, d := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"join", &s.Join, defaultJoin},
		{"last call", &s.LastCall, defaultLastCall},
		{"close", &s.Close, defaultClose},
		{"heartbeat", &s.Heartbeat, defaultHeartbeat},
		{"keep-alive interval", &s.KeepAliveInterval, defaultKeepAliveInterval},
	} {
		if *d.value < 0 {
			return s, fmt.Errorf("dynamic: the %s timeout is %v; it must be more than 0", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.def
		}
	}
	switch {
	case s.RunID == "":
		return s, errors.New("dynamic: the run has no id")
	case s.MinNodes < 1:
		return s, fmt.Errorf("dynamic: the minimum of nodes is %d; it must be at least 1", s.MinNodes)
	case s.MaxNodes < s.MinNodes:
		return s, fmt.Errorf("dynamic: the maximum of nodes, %d, is less than the minimum, %d", s.MaxNodes, s.MinNodes)
	case s.KeepAliveAttempts < 0:
		return s, fmt.Errorf("dynamic: %d missed heartbeats; it must be more than 0", s.KeepAliveAttempts)
	case s.KeepAliveAttempts == 0:
		s.KeepAliveAttempts = defaultKeepAliveAttempts
	}
	return s, nil
}

// ParseConf sets the settings from --rdzv-conf. Keys are those of torchelastic; values are seconds,
// or a number. It returns the unknown keys.
func (s *Settings) ParseConf(conf map[string]string) (unknown []string, err error) {
	for _, key := range slices.Sorted(maps.Keys(conf)) {
		field := map[string]*time.Duration{
			"join_timeout": &s.Join, "last_call_timeout": &s.LastCall, "close_timeout": &s.Close,
			"heartbeat_timeout": &s.Heartbeat, "keep_alive_interval": &s.KeepAliveInterval,
		}[key]
		n, perr := strconv.ParseFloat(conf[key], 64)
		switch {
		case field == nil && key != "keep_alive_max_attempt":
			unknown = append(unknown, key)
		case perr != nil || !(n > 0) || n > math.MaxInt32:
			return unknown, fmt.Errorf("dynamic: %s is %q; it must be a number more than 0", key, conf[key])
		case field != nil:
			*field = time.Duration(n * float64(time.Second))
		case n != math.Trunc(n):
			return unknown, fmt.Errorf("dynamic: %s is %q; it must be a whole number", key, conf[key])
		default:
			s.KeepAliveAttempts = int(n)
		}
	}
	return unknown, nil
}
