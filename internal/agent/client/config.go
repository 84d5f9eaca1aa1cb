package client

import (
	"net/netip"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// Config configures how agents are found and started, and how long driver and agents wait for each
// other.
type Config struct {
	// Find returns the address (host:port) of the cluster's agent of a host, and whether there is
	// one now. It is called often, also to check whether a silent agent is known to be gone, and
	// must not block. Nil: there is no cluster.
	Find func(host string) (addr string, ok bool)
	// Credentials are the driver's in the cluster of Find.
	Credentials *identity.Credentials

	// Starter starts job agents. Nil: hosts without an agent of the cluster are refused.
	Starter Starter
	// Authority is the job's: it issues the credentials of the driver and of job agents.
	Authority *identity.Authority
	// Hello is sent to job agents; host, run and credentials are filled in.
	Hello Hello
	// Parallel is the number of job agents that are started at a time. Zero: 8; the sshd of a
	// bastion drops connections while more than ten are not authenticated.
	Parallel int
	// Patience is how long the start on a host is retried while connections to the host are dropped
	// before authentication. Zero: 30 s. If Await is set, it is also retried while the host's name
	// does not resolve or the host accepts no connections.
	Patience time.Duration
	Await    bool
	// LocalOnly says that all hosts are this machine and remain so: nothing has to be reachable
	// from other machines.
	LocalOnly bool
	// Listen is the IP address of this machine on which the driver listens. A job agent listens on
	// the address from which its host reaches it. The zero Addr: loopback, and all addresses as
	// soon as a host is another machine.
	Listen netip.Addr

	// Lease is how long the driver and an agent may be unreachable for each other before the driver
	// counts the agent's workers as killed. Zero: defaultLease. They exchange ten beats in that
	// time, at least one each second.
	Lease time.Duration
	// Orphan is how long an agent keeps the workers of a driver that is silent; it bounds Lease.
	// Zero: Lease.
	Orphan time.Duration
	// Keep says that Settle will be called for every worker that has ended: until then the worker's
	// agent keeps the record of its end for another driver.
	Keep bool
	// Begun, if not nil, is called with each job agent, one at a time, before anything is started
	// on it. If it returns an error, the agent counts as not started.
	Begun func(KnownAgent) error
	// Known are the job agents that earlier drivers have started. If two are on one host, the later
	// one counts.
	Known []KnownAgent
	// Ahead is called, from any goroutine, with an error if an agent knows later records of the job
	// than the driver's journal has. It must end the process. Nil: the error is logged.
	Ahead func(error)
	// Audit is called with a record of each job agent that was started, or could not be started. It
	// must not block. Nil: not called.
	Audit func(audit.Record)
	// Log takes messages about the sessions. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// withDefaults returns the Config with its zero fields replaced by the defaults.
func (c Config) withDefaults() Config {
	if c.Log == nil {
		c.Log = logrus.StandardLogger()
	}
	if c.Ahead == nil {
		c.Ahead = func(err error) { c.Log.Error(err) }
	}
	if c.Audit == nil {
		c.Audit = func(audit.Record) {}
	}
	if c.Lease <= 0 {
		c.Lease = defaultLease
	}
	if c.Orphan <= 0 {
		c.Orphan = c.Lease
	}
	c.Lease = min(c.Lease, c.Orphan)
	if c.Parallel <= 0 {
		c.Parallel = 8
	}
	if c.Patience <= 0 {
		c.Patience = 30 * time.Second
	}
	return c
}
