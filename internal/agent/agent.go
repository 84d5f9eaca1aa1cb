// Package agent is the agent of one host: it advertises the host and its slots in the cluster's
// gossip, and starts, watches and stops workers for drivers that have the cluster's key.
//
//	gossip ←── Meta: name, slots, start, bad slots, draining, launch address
//	driver ──→ server ──┬→ session of run 1 ─┬→ worker in slot 0 (launch.Local)
//	   one stream a     │                    └→ worker in slot 1
//	   session, or the  └→ session of run 2 ──→ worker in slot 2
//	   next after it broke
//
// A session belongs to a run. Its events are numbered and kept until the driver has acknowledged
// them, so that a new stream can continue a broken one without loss or repetition. A driver sends
// beats; if none arrives within the session's lease, the agent ends the session's workers. Each
// worker leads a process group, and a guard kills what is left of a session when the agent itself
// is gone.
package agent

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/internal/agent/runas"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/launch"
)

const (
	// defaultDrain is how long an agent that is asked to stop waits for its workers to drain.
	defaultDrain = 30 * time.Second
	// endTimeout bounds each step of the shutdown that depends on others: the workers' last grace
	// period, the drivers' acknowledgements, the gossip.
	endTimeout = 5 * time.Second
)

// Config describes the host and its cluster.
type Config struct {
	// Name is the host's name, unique in the cluster.
	Name string
	// Slots is the maximum number of workers that run at a time. 0: one.
	Slots int
	// Health, if not nil, watches the devices of the slots until ctx ends, and calls bad with the
	// indices of the slots whose devices have failed, in ascending order, whenever they change.
	// Workers in these slots are killed, and no others are started there.
	Health func(ctx context.Context, bad func(slots []int)) error
	// Launcher starts the workers on this host. Nil: launch.Local.
	Launcher launch.Launcher

	// Credentials are the agent's credentials in the cluster. Nil: they are derived from Key.
	Credentials *identity.Credentials
	// Key, of identity.ClusterKeyLen bytes, encrypts the gossip; OtherKeys also decrypt; Label is
	// the cluster's name.
	Key       []byte
	OtherKeys [][]byte
	Label     string
	// Follow, if not nil, runs while the agent is in the cluster, until ctx ends. It calls use when
	// the gossip keys have changed: the first key encrypts. used returns the number of slots that
	// have workers, by run.
	Follow func(ctx context.Context, used func() map[string]uint32, use func(keys [][]byte) error)
	// Bind is the address and port for gossip (gossip.Config.BindAddr), Advertise the address at
	// which others reach this host if it differs, and Join lists members of the cluster that may
	// already exist.
	Bind, Advertise string
	// Listen is the IP address on which the agent serves drivers and on which workers listen for
	// each other. If Bind has no address, gossip uses it too. Empty: the address of Bind, and for
	// workers the setting of their job.
	Listen string
	Join   []string
	// Seeds, if not nil, returns further members that may exist. It is called whenever the agent
	// searches for members. Joined, if not nil, is called with the address at which others reach
	// this agent's gossip. Neither may block.
	Seeds  func() []string
	Joined func(addr string)
	// LaunchPort is the port for drivers. 0: any free port.
	LaunchPort int

	// RunAs selects the user of workers, for an agent that runs as root. Nil: the agent's own user.
	RunAs RunAs

	// Facts are facts about the host that drivers may request.
	Facts Facts

	// Drain is how long workers may take to drain once the agent is asked to stop. 0: defaultDrain.
	Drain time.Duration
	// Hurry, if not nil, ends the wait for Drain when a value arrives.
	Hurry <-chan struct{}
	// Meter, if not nil, measures the agent.
	Meter *Meter
	// Log takes the agent's messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger

	end time.Duration // tests replace endTimeout by it; 0: endTimeout
}

// RunAs selects the user of the workers of a driver. It is a *runas.Policy.
type RunAs interface {
	// For returns the rule for the driver with the certificate, or the reason why the driver may
	// start no workers.
	For(driver identity.Subject) (runas.Rule, error)
}

func (c Config) withDefaults() Config {
	if c.Slots == 0 {
		c.Slots = 1
	}
	if c.Bind == "" && c.Listen != "" {
		c.Bind = net.JoinHostPort(c.Listen, strconv.Itoa(gossip.DefaultPort))
	}
	if c.Drain == 0 {
		c.Drain = defaultDrain
	}
	if c.Log == nil {
		c.Log = logrus.StandardLogger()
	}
	if c.Launcher == nil {
		c.Launcher = launch.Local{}
	}
	return c
}

// endLimit returns the bound of each step of the shutdown that depends on others.
func (c Config) endLimit() time.Duration { return cmp.Or(c.end, endTimeout) }

// Run runs the agent: it joins the cluster, serves drivers, and blocks until ctx ends. Then it
// advertises that the host is draining, starts no more workers, waits for up to Drain until the
// workers have left, ends the remaining ones, waits a few seconds until drivers have acknowledged
// their ends, leaves the cluster, and returns nil. It retries seeds that do not answer; a seed that
// refuses the key or the label is an error. When Run returns, none of its processes and goroutines
// is left.
func Run(ctx context.Context, cfg Config) error {
	cfg = cfg.withDefaults()
	creds, err := cfg.credentials()
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	ln, err := cfg.listen()
	if err != nil {
		return fmt.Errorf("agent: listening for drivers: %w", err)
	}
	a := &agent{cfg: cfg, server: newServer(cfg.Name, cfg.Slots, cfg.Log), failed: make(chan error, 2)}
	a.server.listen = cfg.Listen
	a.server.launcher, a.server.runAs, a.server.inspect = cfg.Launcher, cfg.RunAs, cfg.Facts.inspector(creds)
	side, cancel := context.WithCancel(context.Background())
	defer a.wg.Wait()
	defer cancel()
	a.wg.Go(func() { a.fail(a.server.serve(side, ln, creds)) })
	port := strconv.Itoa(ln.Addr().(*net.TCPAddr).Port)
	if err := a.join(ctx, port); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	if cfg.Meter != nil {
		cfg.Meter.agent.Store(a)
		defer cfg.Meter.agent.Store(nil)
	}
	if cfg.Follow != nil {
		a.wg.Go(func() { cfg.Follow(side, a.server.used, a.member.SetKeys) })
	}
	if cfg.Health != nil {
		a.wg.Go(func() { a.watchHealth(side) })
	}
	cfg.Log.Infof("agent: host %s, %d slots: gossip at %s, drivers at port %s", cfg.Name, cfg.Slots, a.member.Addr(), port)
	select {
	case err = <-a.failed:
	case <-ctx.Done():
		cfg.Log.Warnf("agent: %v: draining, %v at most", context.Cause(ctx), cfg.Drain)
		a.drain()
	}
	a.leave()
	return err
}

// credentials returns the agent's credentials.
func (c Config) credentials() (*identity.Credentials, error) {
	if c.Credentials != nil {
		if who := c.Credentials.Subject(); who != (identity.Subject{Role: identity.Agent, Host: c.Name}) {
			return nil, fmt.Errorf("the credentials are those of %v, and this is host %q", who, c.Name)
		}
		return c.Credentials, nil
	}
	authority, err := identity.ForCluster(c.Key, c.Label)
	if err != nil {
		return nil, err
	}
	return authority.Issue(identity.Subject{Role: identity.Agent, Host: c.Name})
}

// listen opens the listener for drivers.
func (c Config) listen() (*identity.Listener, error) {
	host := c.Listen
	if host == "" && c.Bind != "" {
		var err error
		if host, _, err = net.SplitHostPort(c.Bind); err != nil {
			host = c.Bind // without a port
		}
	}
	return identity.Drivers.Listen(net.JoinHostPort(host, strconv.Itoa(c.LaunchPort)))
}

// agent is a Run, or a RunJob, in progress.
type agent struct {
	cfg    Config
	server *server
	member *gossip.Member // nil: a job agent
	failed chan error
	wg     sync.WaitGroup

	mu   sync.Mutex // serializes changes of meta
	meta gossip.Meta
}

func (a *agent) fail(err error) {
	if err != nil {
		a.failed <- err
	}
}

func (a *agent) join(ctx context.Context, launchPort string) (err error) {
	a.meta = gossip.Meta{
		Name: a.cfg.Name, Slots: a.cfg.Slots, Start: time.Now(), LaunchAddr: net.JoinHostPort("", launchPort),
	}
	a.member, err = gossip.Join(ctx, gossip.Config{
		Meta: &a.meta, Key: a.cfg.Key, OtherKeys: a.cfg.OtherKeys, Label: a.cfg.Label,
		BindAddr: a.cfg.Bind, AdvertiseAddr: a.cfg.Advertise, Join: a.cfg.Join, Seeds: a.cfg.Seeds, KeepTrying: true, Log: a.cfg.Log,
	})
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	if a.cfg.Joined != nil {
		a.cfg.Joined(a.member.Addr())
	}
	return nil
}

// advertise changes what the agent advertises about the host in the cluster.
func (a *agent) advertise(ctx context.Context, change func(*gossip.Meta)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.meta)
	if err := a.member.SetMeta(ctx, a.meta); err != nil && ctx.Err() == nil {
		a.cfg.Log.Warnf("agent: the metadata of this host cannot be changed: %v", err)
	}
}

func (a *agent) watchHealth(ctx context.Context) {
	err := a.cfg.Health(ctx, func(slots []int) {
		a.cfg.Log.Warnf("agent: slots whose devices have failed: %v", slots)
		slots = slices.Clone(slots)
		a.server.setBad(slots)
		if a.member == nil {
			return
		}
		a.advertise(ctx, func(m *gossip.Meta) { m.BadSlots = slots })
	})
	if err != nil && ctx.Err() == nil {
		a.cfg.Log.Warnf("agent: devices are no longer watched: %v", err)
	}
}

// drain waits up to Drain until the workers have left, then ends the remaining ones.
func (a *agent) drain() {
	a.server.drain()
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Drain)
	defer cancel()
	a.advertise(ctx, func(m *gossip.Meta) { m.Draining = true })
	if !a.await(ctx, a.server.occupied) {
		a.cfg.Log.Warn("agent: ending the remaining workers")
		a.evict(a.cfg.endLimit())
	}
	a.flush()
}

// evict ends the workers, each with its grace period, and kills those that are left after the
// limit.
func (a *agent) evict(limit time.Duration) {
	a.server.stop(false)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if !a.await(ctx, a.server.occupied) {
		a.server.stop(true)
	}
}

// flush waits, for a bounded time, until drivers have acknowledged the ends of their workers.
func (a *agent) flush() {
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.endLimit())
	defer cancel()
	if !a.await(ctx, a.server.unacknowledged) {
		a.cfg.Log.Warn("agent: a driver has not acknowledged how all of its workers ended")
	}
}

// await blocks until count returns 0 left. It returns false if ctx ends first or Hurry yields a
// value.
func (a *agent) await(ctx context.Context, count func() (left int, change <-chan struct{})) bool {
	for {
		left, change := count()
		if left == 0 {
			return true
		}
		select {
		case <-change:
		case <-ctx.Done():
			return false
		case <-a.cfg.Hurry:
			return false
		}
	}
}

// leave leaves the cluster.
func (a *agent) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.endLimit())
	defer cancel()
	if err := a.member.Leave(ctx); err != nil {
		a.cfg.Log.Debugf("agent: leaving the cluster: %v", err)
	}
}
