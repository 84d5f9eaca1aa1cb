package gossip

import (
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/sirupsen/logrus"
)

// DefaultPort is the port on which agents gossip, over UDP and TCP, and the port of a seed that
// names none.
const DefaultPort = 7946

// keyLen is the length of a cluster's key in bytes.
const keyLen = 32

// How a death is found. Every member probes another each probeInterval, in an order in which each
// has its turn: directly, by UDP, and after probeTimeout through three others and by TCP. Who gives
// no sign until the interval is over is suspected; all members know that within some
// gossipIntervals, the accused too, which contradicts if it can. The suspicion lasts suspicionMult
// probe intervals, times the decimal logarithm of the number of members where that is above 1; who
// has not contradicted by then is dead to the cluster, but may still come back, and stays on a
// Source's list until patience since the suspicion is over (or leastGrace, where the suspicion took
// nearly that long). So an agent whose host stalls for less than that is not lost.
//
// TestSimulation measures, on processors and a network that cost nothing, from an agent's being cut
// off to the list of an observer without it, as median and worst of 5, 15, 10 and 5 crashes:
//
//	4 members 1.1 s, 1.6 s · 10: 1.2 s, 1.6 s · 100: 1.2 s, 1.5 s · 500: 1.2 s, 1.35 s
//
// and from a Join to that list, in all of them, 20 to 170 ms.
const (
	defaultProbeInterval  = 150 * time.Millisecond
	defaultProbeTimeout   = 60 * time.Millisecond
	defaultGossipInterval = 50 * time.Millisecond
	defaultPatience       = 900 * time.Millisecond
	leastGrace            = 100 * time.Millisecond

	suspicionMult = 2
	gossipNodes   = 4
	// A member that finds itself slow gives others up to awareness times the interval to answer.
	awareness = 2
)

const (
	defaultRejoinInterval = 5 * time.Second
	defaultDialTimeout    = 2 * time.Second
	// fullStateInterval is the pause between full exchanges with a random member, which repair what
	// gossip has missed. memberlist stretches it for clusters of more than 32, to five times that
	// for 500.
	fullStateInterval = 2 * time.Second
	// deadTime is for how long the dead are still spoken to, so that those who live can contradict.
	deadTime = 30 * time.Second
	// silence is how many probe intervals without any answer make a member think that it is cut
	// off, not the others.
	silence = 5
	// rivalTime is for how long Join waits for another agent of the same host to be found dead.
	rivalTime = 5 * time.Second
	// spreadTime bounds the wait for news to be passed on.
	spreadTime = 3 * time.Second
)

// Config describes the cluster to join and this member. Only Key must be set.
type Config struct {
	// Meta is advertised by this member. Nil: it is an observer.
	Meta *Meta
	// BindAddr is the IP address and port to listen on, "10.0.0.1:7946". Empty: every address,
	// port 7946 for an agent, any port for an observer.
	BindAddr string
	// AdvertiseAddr is the IP address, or address and port, at which others reach this member.
	// Empty: the bound address; if that is every address, the one from which the first seed is
	// reached, or else the first of this machine.
	AdvertiseAddr string
	// Join lists members that may already exist, as host:port. None: this member is the first.
	Join []string
	// NotFirst: the cluster had members before. So an observer that is a seed itself fails to join
	// while no other seed answers and no member has joined it. Otherwise it is the first.
	NotFirst bool
	// Seeds, if not nil, returns more such members. It is called whenever unreached members are
	// tried. It must not block.
	Seeds func() []string
	// KeepTrying makes Join succeed even if no seed can be reached; they are tried again and again.
	// A seed that refuses this member's key or label is still an error.
	KeepTrying bool
	// SeedPatience is how long Join tries seeds if none can be reached. 0: it tries once.
	SeedPatience time.Duration
	// Key is the cluster's key, of 32 bytes, which encrypts. OtherKeys also decrypt, while the
	// cluster's key is being replaced; SetKeys changes both.
	Key       []byte
	OtherKeys [][]byte
	// Label names the cluster; messages of members with another label are ignored. It has up to 255
	// bytes, which are sent unencrypted.
	Label string

	// ProbeInterval is the pause between two probes. 0: 150 ms.
	ProbeInterval time.Duration
	// ProbeTimeout is how long a direct probe may take; less than half the interval. 0: 60 ms.
	ProbeTimeout time.Duration
	// GossipInterval is the pause between two rounds of gossip. 0: 50 ms.
	GossipInterval time.Duration
	// Patience is how long a suspect stays listed. 0: 900 ms.
	Patience time.Duration
	// RejoinInterval is the pause between attempts to reach seeds, and members that vanished. 0: 5
	// s.
	RejoinInterval time.Duration
	// DialTimeout bounds a connection's establishment, and each exchange over it. 0: 2 s.
	DialTimeout time.Duration

	// Transport replaces the network in tests. It is closed with the member.
	Transport memberlist.Transport
	// Log takes messages about the cluster; memberlist's own messages have debug level. Nil:
	// logrus.StandardLogger().
	Log logrus.FieldLogger
}

// withDefaults returns the Config with its zero fields filled in, or what is wrong with it.
func (c Config) withDefaults() (Config, error) {
	if len(c.Key) != keyLen {
		return c, fmt.Errorf("gossip: the cluster's key has %d bytes, not %d", len(c.Key), keyLen)
	}
	if len(c.Label) > memberlist.LabelMaxSize {
		return c, fmt.Errorf("gossip: the cluster's label has %d bytes; at most %d", len(c.Label), memberlist.LabelMaxSize)
	}
	for _, d := range []struct {
		value    *time.Duration
		standard time.Duration
	}{
		{&c.ProbeInterval, defaultProbeInterval}, {&c.ProbeTimeout, defaultProbeTimeout},
		{&c.GossipInterval, defaultGossipInterval}, {&c.Patience, defaultPatience},
		{&c.RejoinInterval, defaultRejoinInterval}, {&c.DialTimeout, defaultDialTimeout},
	} {
		if *d.value <= 0 {
			*d.value = d.standard
		}
	}
	if c.ProbeTimeout >= c.ProbeInterval {
		return c, fmt.Errorf("gossip: a probe that may take %v does not fit an interval of %v", c.ProbeTimeout, c.ProbeInterval)
	}
	if c.BindAddr == "" {
		port := DefaultPort
		if c.Meta == nil {
			port = 0
		}
		c.BindAddr = net.JoinHostPort("0.0.0.0", strconv.Itoa(port))
	}
	if c.Log == nil {
		c.Log = logrus.StandardLogger()
	}
	return c, nil
}

// library returns what memberlist is to do.
//
// Names of members are never used twice: memberlist would refuse a restarted agent of another
// address for a name that it thinks alive, and would let it dispute its predecessor's last
// messages.
func (c Config) library(name string) (*memberlist.Config, error) {
	keys, err := c.keyring()
	if err != nil {
		return nil, err
	}
	l := memberlist.DefaultLANConfig()
	l.Name, l.Label, l.Keyring = name, c.Label, keys
	l.ProbeInterval, l.ProbeTimeout = c.ProbeInterval, c.ProbeTimeout
	l.SuspicionMult, l.SuspicionMaxTimeoutMult = suspicionMult, 1
	l.AwarenessMaxMultiplier = awareness
	l.GossipInterval, l.GossipNodes, l.GossipToTheDeadTime = c.GossipInterval, gossipNodes, deadTime
	l.PushPullInterval, l.TCPTimeout = fullStateInterval, c.DialTimeout
	l.HandoffQueueDepth = 4096
	l.EnableCompression = false // it costs more time on each probe than it saves on the few long messages
	return l, nil
}

// hostPort splits an address of which the port may be missing.
func hostPort(addr string, port int) (string, int, error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		if host, text, err = net.SplitHostPort(net.JoinHostPort(addr, strconv.Itoa(port))); err != nil {
			return "", 0, fmt.Errorf("gossip: %q is not host:port", addr)
		}
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || host == "" {
		return "", 0, fmt.Errorf("gossip: %q is not host:port", addr)
	}
	return host, int(n), nil
}
