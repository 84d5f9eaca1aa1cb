package torchrun

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/internal/etcd"
	"github.com/hvdrun/hvdrun/torchrun"
	"github.com/hvdrun/hvdrun/torchrun/store"
	storeetcd "github.com/hvdrun/hvdrun/torchrun/store/etcd"
)

// etcdPrefix is the prefix of the keys of all jobs, and etcdPatience is how long etcd may be
// unreachable.
const (
	etcdPrefix   = "/hvdrun/torchrun/"
	etcdPatience = 30 * time.Second
)

// etcdStore returns the store of a job in etcd and a function that closes it.
func (f *torchFlags) etcdStore(ctx context.Context, addr string, conf *rdzvConf, log logrus.FieldLogger) (store.Store, func(), error) {
	cfg := conf.etcd
	cfg.Endpoints = []string{addr}
	host, _, err := net.SplitHostPort(addr)
	if err == nil && !cfg.TLS {
		var here bool
		if here, err = torchrun.IsHere(ctx, host); err == nil && !here && !conf.insecure {
			err = errors.New("etcd on another machine is asked over TLS: protocol=https, cacert=FILE, and cert=FILE with key=FILE " +
				"where it wants them; insecure=true does without")
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("--rdzv-conf: %w", err)
	}
	client, err := etcd.Open(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("--rdzv-conf: %w", err)
	}
	s := storeetcd.New(storeetcd.Config{Client: client, Prefix: etcdPrefix + f.id + "/", Patience: etcdPatience, Log: log})
	if _, err := s.Get(ctx, "hello"); err != nil {
		_ = client.Close()
		return nil, nil, cli.Failed(fmt.Errorf("--rdzv-endpoint: etcd at %s: %w", addr, err))
	}
	return s, func() { _ = client.Close() }, nil
}
