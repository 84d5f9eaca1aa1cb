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

// How a death is detected. In each probeInterval, every member probes one other member, all of them
// in turn: directly by UDP, and after probeTimeout through three others and by TCP. A member that
// does not respond before the interval is over is suspected. All members learn of the suspicion
// within some gossipIntervals, including the suspect, which refutes it if it can. The suspicion
// lasts suspicionMult probe intervals, times the decimal logarithm of the number of members if that
// is above 1. A member that has not refuted it by then is dead to the cluster, but may still come
// back: it stays on a Source's list until patience has passed since the suspicion began, and for at
// least leastGrace after its death. An agent whose host stalls for less than that is not lost.
//
// TestSimulation measures, with processors and a network that take no time, how long it takes from
// the moment when an agent is cut off until the list of an observer lacks it. Median and maximum of
// 5, 15, 10 and 5 crashes:
//
//	4 members 1.1 s, 1.6 s · 10: 1.2 s, 1.6 s · 100: 1.2 s, 1.5 s · 500: 1.2 s, 1.35 s
//
// The time from a Join until the list has the agent is 20 to 170 ms in all of these clusters.
const (
	defaultProbeInterval = 150 * time.Millisecond
	defaultProbeTimeout  = 60 * time.Millisecond
	gossipInterval       = 50 * time.Millisecond
	defaultPatience      = 900 * time.Millisecond
	leastGrace           = 100 * time.Millisecond

	suspicionMult = 2
	gossipNodes   = 4
	// A member that finds itself slow extends the interval in which others must answer, up to
	// awareness times.
	awareness = 2
)

const (
	defaultRejoinInterval = 5 * time.Second
	// dialTimeout bounds the time to establish a connection, and each exchange over it.
	dialTimeout = 2 * time.Second
	// fullStateInterval is the pause between full exchanges of state with a random member, which
	// repair what gossip has missed. memberlist extends it for clusters of more than 32 members, to
	// five times as long for 500.
	fullStateInterval = 2 * time.Second
	// deadTime is how long messages are still sent to dead members, so that those that are alive
	// can refute their death.
	deadTime = 30 * time.Second
	// silence is the number of probe intervals without any answer after which a member assumes that
	// it is cut off itself, and not the others.
	silence = 5
	// rivalTime is how long Join waits for another agent of the same host to be declared dead.
	rivalTime = 5 * time.Second
	// spreadTime is how long to wait until a message has been passed on.
	spreadTime = 3 * time.Second
)

// Config describes the cluster to join and this member. Only Key must be set.
type Config struct {
	// Meta is what this member advertises. Nil: the member is an observer.
	Meta *Meta
	// BindAddr is the IP address and port to listen on, "10.0.0.1:7946". Empty: every address,
	// port 7946 for an agent, any port for an observer.
	BindAddr string
	// AdvertiseAddr is the IP address, or address and port, at which others reach this member.
	// Empty: the bound address; if that is every address, the one from which the first seed is
	// reached, or else the first of this machine.
	AdvertiseAddr string
	// Join lists members that may already exist, as host:port. Empty: this member is the first.
	Join []string
	// NotFirst says that the cluster had members before. An observer that is itself a seed then
	// fails to join if no other seed answers and no member has joined it. Otherwise it would be the
	// first member.
	NotFirst bool
	// Seeds, if not nil, returns further addresses of members. It is called whenever unreached
	// members are tried, and must not block.
	Seeds func() []string
	// KeepTrying makes Join succeed even if no seed can be reached; the member keeps trying them. A
	// seed that refuses this member's key or label is still an error.
	KeepTrying bool
	// SeedPatience is how long Join tries seeds if none can be reached. 0: it tries once.
	SeedPatience time.Duration
	// Key is the cluster's key of 32 bytes, which encrypts and decrypts. OtherKeys only decrypt,
	// while the cluster's key is being replaced. SetKeys changes both.
	Key       []byte
	OtherKeys [][]byte
	// Label names the cluster. Messages of members with another label are ignored. It has up to 255
	// bytes, which are sent unencrypted.
	Label string

	// ProbeInterval is the pause between two probes. 0: 150 ms.
	ProbeInterval time.Duration
	// ProbeTimeout is how long a direct probe may take; less than half the interval. 0: 60 ms.
	ProbeTimeout time.Duration
	// Patience is how long a suspected member stays listed. 0: 900 ms.
	Patience time.Duration
	// RejoinInterval is the pause between attempts to reach seeds, and members that vanished. 0: 5
	// s.
	RejoinInterval time.Duration

	// Transport replaces the network in tests. It is closed with the member.
	Transport memberlist.Transport
	// Log takes messages about the cluster; memberlist's own messages have debug level. Nil:
	// logrus.StandardLogger().
	Log logrus.FieldLogger
}

// withDefaults returns the Config with its zero fields filled in, or an error if it is not valid.
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
		{&c.Patience, defaultPatience}, {&c.RejoinInterval, defaultRejoinInterval},
	} {
		if *d.value <= 0 {
			*d.value = d.standard
		}
	}
	if c.ProbeTimeout >= c.ProbeInterval {
		return c, fmt.Errorf("gossip: a probe timeout of %v exceeds the probe interval of %v", c.ProbeTimeout, c.ProbeInterval)
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

// library returns the configuration for memberlist.
//
// Names of members are never used twice: memberlist would refuse a restarted agent at another
// address if it considered the name alive, and would let that agent refute its predecessor's last
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
	l.GossipInterval, l.GossipNodes, l.GossipToTheDeadTime = gossipInterval, gossipNodes, deadTime
	l.PushPullInterval, l.TCPTimeout = fullStateInterval, dialTimeout
	l.HandoffQueueDepth = 4096
	l.EnableCompression = false // it costs more time on each probe than it saves on the few long messages
	return l, nil
}

// hostPort splits an address that may lack a port; then it returns the given port.
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
