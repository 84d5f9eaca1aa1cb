package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/hvdrun/hvdrun/torchrun"
	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/etcd"
)

// etcdPort is that of endpoints that name none, etcdPrefix stands before the names of all jobs, and
// etcdPatience is how long etcd may be away.
const (
	etcdPort     = "2379"
	etcdPrefix   = "/hvdrun/torchrun/"
	etcdPatience = 30 * time.Second
)

// etcdStore returns the store of a job in etcd, and what ends it.
func (f *torchFlags) etcdStore(ctx context.Context, addr string, conf map[string]string, log logrus.FieldLogger) (store.Store, func(), error) {
	cfg := clientv3.Config{Endpoints: []string{addr}, DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
		DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second,
		// All nodes reach an etcd that was away again at about the same time.
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}, MinConnectTimeout: 2 * time.Second,
		})}}
	secure := conf["protocol"] == "https" || conf["cacert"] != "" || conf["cert"] != ""
	host, _, err := net.SplitHostPort(addr)
	if err == nil && !secure {
		var here bool
		if here, err = torchrun.IsHere(ctx, host); err == nil && !here && !isInsecure(conf) {
			err = errors.New("etcd on another machine is asked over TLS: protocol=https, cacert=FILE, and cert=FILE with key=FILE " +
				"where it wants them; insecure=true does without")
		}
	}
	if err == nil && secure {
		info := transport.TLSInfo{TrustedCAFile: conf["cacert"], CertFile: conf["cert"], KeyFile: conf["key"]}
		cfg.TLS, err = info.ClientConfig()
	}
	if err != nil {
		return nil, nil, fmt.Errorf("--rdzv-conf: %w", err)
	}
	client, err := clientv3.New(cfg)
	if err != nil {
		return nil, nil, runError{fmt.Errorf("etcd: %w", err)}
	}
	s := etcd.New(etcd.Config{Client: client, Prefix: etcdPrefix + f.id + "/", Patience: etcdPatience, Log: log})
	if _, err := s.Get(ctx, "hello"); err != nil {
		_ = client.Close()
		return nil, nil, runError{fmt.Errorf("--rdzv-endpoint: etcd at %s: %w", addr, err)}
	}
	return s, func() { _ = client.Close() }, nil
}

func isInsecure(conf map[string]string) bool {
	return slices.Contains([]string{"1", "true", "yes"}, strings.ToLower(conf["insecure"]))
}
