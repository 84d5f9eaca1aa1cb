package hostsource

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/internal/agent/runas"
	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// SingleKeyWarning is logged if a single shared key protects a cluster.
const SingleKeyWarning = "one shared key is for trying out: whoever reads it can run commands on every host; " +
	"`hvdrun cluster init` makes a cluster whose hosts and workers cannot"

// seedPatience is how long a job waits for an answer of the first agent, which may be started at
// the same time as the job.
const seedPatience = 10 * time.Second

// OpenGossip returns a source that lists the hosts of the cluster's agents. The function that it
// returns closes the source.
func OpenGossip(s *settings.Settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	cfg := gossip.Config{
		BindAddr: s.Cluster.Bind, AdvertiseAddr: s.Cluster.Advertise, Join: slices.Concat(s.Cluster.Join, s.Cluster.Members),
		NotFirst: len(s.Cluster.Members) > 0,
		Label:    s.Cluster.Label, Log: log, SeedPatience: seedPatience,
	}
	if cfg.BindAddr == "" && s.Tuning.Listen != "" {
		cfg.BindAddr = net.JoinHostPort(s.Tuning.Listen, "0")
	}
	follow := func(context.Context) {}
	var err error
	if s.Cluster.Dir != "" {
		follow, err = openCluster(s, &cfg, log)
	} else {
		err = useSingleKey(s, &cfg, log)
	}
	if err != nil {
		return nil, nil, err
	}
	source := gossip.NewSource(cfg)
	s.Cluster.Source = source
	unfollow := cli.Background(follow)
	return source, func() {
		unfollow()
		if err := source.Close(); err != nil {
			log.WithError(err).Debug("leaving the cluster")
		}
	}, nil
}

// openCluster reads the keys in the folder of the cluster into cfg. It returns a function that
// keeps them up to date until its context ends.
func openCluster(s *settings.Settings, cfg *gossip.Config, log logrus.FieldLogger) (func(context.Context), error) {
	dir, err := cluster.Open(s.Cluster.Dir)
	var state *cluster.State
	if err == nil {
		state, err = dir.View()
	}
	if err == nil && s.RunID != "" {
		name, uid := driverUser()
		s.Cluster.Credentials, err = dir.Driver(s.RunID, name, uid, time.Now())
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Origin("cluster"), err)
	}
	if s.Cluster.Credentials != nil {
		if err := dir.RecordDriver(s.Cluster.Credentials); err != nil { // the folder may be mounted read-only
			log.Warnf("%s: the issue of a certificate is not recorded there: %v", s.Origin("cluster"), err)
		}
	}
	cfg.Key, cfg.OtherKeys = state.Ring.Keys[0], state.Ring.Keys[1:]
	return func(ctx context.Context) {
		dir.Follow(ctx, s.Cluster.Credentials, state.Ring.Version, s.Cluster.Source.SetKeys, log)
	}, nil
}

// useSingleKey derives all credentials from the key that agents and drivers share.
func useSingleKey(s *settings.Settings, cfg *gossip.Config, log logrus.FieldLogger) (err error) {
	if cfg.Key, err = identity.ReadClusterKey(s.Cluster.KeyFile); err != nil {
		return fmt.Errorf("%s: %w", s.Origin("gossip-key-file"), err)
	}
	if s.RunID == "" {
		return nil
	}
	if !s.Slurm.On { // with --slurm the key is the job's own
		log.Warnf("%s: %s", s.Origin("gossip-key-file"), SingleKeyWarning)
	}
	authority, err := identity.ForCluster(cfg.Key, s.Cluster.Label)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Origin("gossip-label"), err)
	}
	name, uid := driverUser()
	s.Cluster.Credentials, err = authority.Issue(identity.Subject{RunID: s.RunID, Role: identity.Driver, User: name, UID: uid})
	return err
}

// driverUser returns the user of this process.
func driverUser() (name, uid string) {
	uid = strconv.Itoa(os.Getuid())
	if u, err := runas.UserByID(uid); err == nil {
		return u.Username, uid
	}
	return "", uid
}

// FindAgent returns the address at which the agent of a host accepts drivers, in the open cluster.
func FindAgent(s *settings.Settings, host string) (addr string, ok bool) {
	m, ok := s.Cluster.Source.Agent(host)
	return m.LaunchAddr, ok && m.LaunchAddr != ""
}
