package client

import (
	"net/netip"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// Config says how agents are found and started, and how long driver and agents wait for each other.
type Config struct {
	// Find returns where the cluster's agent of a host listens, host:port, and whether there is one
	// now. It is called often, also to see whether an agent that is silent is known to be gone, and
	// must not block. Nil: there is no cluster.
	Find func(host string) (addr string, ok bool)
	// Credentials are the driver's in the cluster of the agents that Find finds.
	Credentials *identity.Credentials

	// Starter starts job agents. Nil: hosts without an agent of the cluster are refused.
	Starter Starter
	// Authority is the job's: the driver and job agents have their credentials from it.
	Authority *identity.Authority
	// Hello is sent to job agents; host, run and credentials are filled in.
	Hello Hello
	// Parallel is how many job agents are started at a time. Zero: 16.
	Parallel int
	// LocalOnly says that all hosts are this machine, and always will be: no other machine needs to
	// reach anything.
	LocalOnly bool
	// Listen is the IP address of this machine on which the driver listens, and of which job agents
	// use the one of theirs that leads to it. The zero Addr: loopback, and all addresses as soon as
	// a host is another machine.
	Listen netip.Addr

	// Lease is how long the driver and an agent may be out of each other's reach: after that the
	// workers count as killed here. Zero: defaultLease. They exchange beats ten times as often, but
	// no rarer than each second.
	Lease time.Duration
	// Orphan is how long an agent keeps the workers of a driver that is silent; it bounds Lease.
	// Zero: Lease.
	Orphan time.Duration
	// Keep says that Settle will be called for every worker that has ended: until then its agent
	// keeps it for another driver.
	Keep bool
	// Begun, if not nil, is called with each job agent, one at a time, before anything is started
	// on it. An error makes the agent one that could not be started.
	Begun func(KnownAgent) error
	// Known are the job agents that drivers before this one have begun; of two on one host the
	// later counts.
	Known []KnownAgent
	// Audit is called with a record of each job agent that is started, or could not be. It must not
	// block. Nil: not called.
	Audit func(audit.Record)
	// Log takes messages about the sessions. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// withDefaults fills in what the zero value leaves out.
func (c Config) withDefaults() Config {
	if c.Log == nil {
		c.Log = logrus.StandardLogger()
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
		c.Parallel = 16
	}
	return c
}
