package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/agent/runas"
	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// clusterSettings say which cluster of agents to look at, and how to be found in it.
type clusterSettings struct {
	join            []string
	keyFile, label  string
	dir             string // of the authority; a driver's
	bind, advertise string
	members         []string // more of the cluster, which the driver before has known
	agentSettings
	source      *gossip.Source        // once it is open
	credentials *identity.Credentials // a driver's, then
}

// agentSettings are those of an agent only.
type agentSettings struct {
	name       string // of the host
	launchPort int
	// stoppedStatus is the exit status of an agent that was asked to stop.
	stoppedStatus int
	enroll        string // the registrar, host:port
	tokenFile     string
	stateDir      string
	runAs         string // the policy's file
}

func clusterText(field func(*clusterSettings) *string) func(*settings, string) error {
	return text(func(s *settings) *string { return field(&s.cluster) })
}

func setJoin(s *settings, text string) (err error) {
	s.cluster.join, err = parseList(text)
	return err
}

func setLease(s *settings, text string) (err error) {
	s.lease, err = parseDuration(text)
	if err == nil && (s.lease < client.MinLease || s.lease > client.MaxLease) {
		err = fmt.Errorf("%q is not between %v and %v", text, client.MinLease, client.MaxLease)
	}
	return err
}

// checkGossip refuses settings of gossip that lack what they need.
func (s *settings) checkGossip() error {
	for _, name := range []string{"cluster", "gossip-key-file", "gossip-label", "gossip-bind", "gossip-advertise"} {
		if s.given(name) && !s.given("gossip-join") && !s.slurm.on {
			return fmt.Errorf("%s: there is no --gossip-join to use it for", s.origin(name))
		}
	}
	if s.given("gossip-key-file") && s.given("cluster") {
		return fmt.Errorf("%s and %s: give one of them", s.origin("cluster"), s.origin("gossip-key-file"))
	}
	if s.given("gossip-join") && !s.given("gossip-key-file") && !s.given("cluster") {
		return fmt.Errorf("%s: --gossip-key-file is missing: the key that the agents have; "+
			"or --cluster, the folder of their cluster (hvdrun cluster init)", s.origin("gossip-join"))
	}
	return nil
}

// singleKeyWarning is logged where one key is all that protects a cluster.
const singleKeyWarning = "one shared key is for trying out: whoever reads it can run commands on every host; " +
	"`hvdrun cluster init` makes a cluster whose hosts and workers cannot"

// seedPatience is how long a job waits for the first agent to answer, which may have been started
// together with it.
const seedPatience = 10 * time.Second

// openGossip returns the hosts of the cluster's agents.
func openGossip(s *settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	cfg := gossip.Config{
		BindAddr: s.cluster.bind, AdvertiseAddr: s.cluster.advertise, Join: slices.Concat(s.cluster.join, s.cluster.members),
		Label: s.cluster.label, Log: log, SeedPatience: seedPatience,
	}
	if cfg.BindAddr == "" && s.tuning.Listen != "" {
		cfg.BindAddr = net.JoinHostPort(s.tuning.Listen, "0")
	}
	follow := func(context.Context) {}
	var err error
	if s.cluster.dir != "" {
		follow, err = s.openCluster(&cfg, log)
	} else {
		err = s.useSingleKey(&cfg, log)
	}
	if err != nil {
		return nil, nil, err
	}
	source := gossip.NewSource(cfg)
	s.cluster.source = source
	ctx, cancel := context.WithCancel(context.Background())
	var following sync.WaitGroup
	following.Go(func() { follow(ctx) })
	return source, func() {
		cancel()
		following.Wait()
		if err := source.Close(); err != nil {
			log.WithError(err).Debug("leaving the cluster")
		}
	}, nil
}

// Of the members of a cluster so many are written down for the driver that may follow; the file is
// not longer than maxMembersText.
const (
	maxMembers     = 16
	maxMembersText = 16 << 10
)

// rememberMembers writes down, whenever hosts have changed, where some members of the cluster are,
// until the returned function is called. The driver may be the only one whose address agents know:
// then the driver that follows is looked for by agents that have missed the one before, which takes
// some time.
func (s *settings) rememberMembers(d *jobDir, cfg *driver.Config, log logrus.FieldLogger) (end func()) {
	if d == nil || s.cluster.source == nil {
		return func() {}
	}
	changed, ended := make(chan struct{}, 1), make(chan struct{})
	next := cfg.Events
	cfg.Events = func(e job.Event) {
		if next != nil {
			next(e)
		}
		if e.Name != job.HostsFound {
			return
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	var writing sync.WaitGroup
	writing.Go(func() {
		for {
			select {
			case <-changed:
			case <-ended:
				return
			}
			addrs := s.cluster.source.Addrs()
			if len(addrs) == 0 {
				continue // those of before may come back
			}
			text := strings.Join(addrs[:min(len(addrs), maxMembers)], "\n") + "\n"
			if err := safefile.Replace(d.membersPath(), []byte(text), safefile.Private); err != nil {
				log.WithError(err).Warn("another driver would not know the cluster's members")
			}
		}
	})
	return func() {
		close(ended)
		writing.Wait()
	}
}

// knownMembers returns the members of the cluster that the driver before has written down.
func (d *jobDir) knownMembers() ([]string, error) {
	text, err := safefile.OwnText(d.membersPath(), maxMembersText)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return strings.Fields(string(text)), err
}

// openCluster takes the keys from the folder of the cluster, and returns what keeps them up to date
// until the context ends.
func (s *settings) openCluster(cfg *gossip.Config, log logrus.FieldLogger) (func(context.Context), error) {
	dir, err := cluster.Open(s.cluster.dir)
	var state *cluster.State
	if err == nil {
		state, err = dir.View()
	}
	if err == nil && s.runID != "" {
		name, uid := driverUser()
		s.cluster.credentials, err = dir.Driver(s.runID, name, uid, time.Now())
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.origin("cluster"), err)
	}
	if s.cluster.credentials != nil {
		if err := dir.RecordDriver(s.cluster.credentials); err != nil { // it may be mounted to be read alone
			log.Warnf("%s: that a certificate was issued is not recorded there: %v", s.origin("cluster"), err)
		}
	}
	cfg.Key, cfg.OtherKeys = state.Ring.Keys[0], state.Ring.Keys[1:]
	return func(ctx context.Context) {
		dir.Follow(ctx, s.cluster.credentials, state.Ring.Version, s.cluster.source.SetKeys, log)
	}, nil
}

// useSingleKey takes everything from the key that agents and drivers share.
func (s *settings) useSingleKey(cfg *gossip.Config, log logrus.FieldLogger) (err error) {
	if cfg.Key, err = identity.ReadClusterKey(s.cluster.keyFile); err != nil {
		return fmt.Errorf("%s: %w", s.origin("gossip-key-file"), err)
	}
	if s.runID == "" {
		return nil
	}
	if !s.slurm.on { // whose key is the job's own
		log.Warnf("%s: %s", s.origin("gossip-key-file"), singleKeyWarning)
	}
	authority, err := identity.ForCluster(cfg.Key, s.cluster.label)
	if err != nil {
		return fmt.Errorf("%s: %w", s.origin("gossip-label"), err)
	}
	name, uid := driverUser()
	s.cluster.credentials, err = authority.Issue(identity.Subject{RunID: s.runID, Role: identity.Driver, User: name, UID: uid})
	return err
}

// driverUser returns who runs this process.
func driverUser() (name, uid string) {
	uid = strconv.Itoa(os.Getuid())
	if u, err := runas.UserByID(uid); err == nil {
		return u.Username, uid
	}
	return "", uid
}

// findAgent returns where the agent of a host takes drivers, in the cluster that is open.
func (s *settings) findAgent(host string) (addr string, ok bool) {
	m, ok := s.cluster.source.Agent(host)
	return m.LaunchAddr, ok && m.LaunchAddr != ""
}
