// Package etcd opens connections to etcd.
package etcd

import (
	"context"
	"fmt"
	"net"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// DefaultPort is the port of endpoints without one.
const DefaultPort = "2379"

// leastPing is the shortest time after which gRPC pings an idle connection; gRPC raises a shorter
// time to this one.
const leastPing = 10 * time.Second

// Config says how to reach etcd.
type Config struct {
	// Endpoints are host:port each.
	Endpoints []string
	// TLS enables TLS. CA, Cert and Key are paths of PEM files, or empty; CA and Cert imply TLS.
	TLS           bool
	CA, Cert, Key string
}

// Open returns a client without waiting for an answer from etcd. The caller must close it. It
// connects directly, whatever HTTPS_PROXY says. It retries a lost connection at least once a
// second, so that all clients of an etcd that was unreachable return at about the same time. A
// server that is silent for Silence counts as lost: requests in flight fail as unavailable, and a
// retry uses another connection. If the context of a request for keys or leases reaches its
// deadline, the error quotes the last failed attempt.
func Open(cfg Config) (*clientv3.Client, error) {
	return open(cfg, new(net.Dialer).DialContext)
}

func open(cfg Config, connect func(ctx context.Context, network, addr string) (net.Conn, error)) (*clientv3.Client, error) {
	w := &watcher{connect: connect}
	conf := clientv3.Config{
		Endpoints: cfg.Endpoints, Logger: zap.NewNop(),
		DialKeepAliveTime: leastPing, DialKeepAliveTimeout: lostAfter,
		DialOptions: []grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
				MinConnectTimeout: 2 * time.Second,
			}),
			grpc.WithContextDialer(w.dial),
			grpc.WithNoProxy(),
			grpc.WithChainUnaryInterceptor(w.attempt),
		},
	}
	if cfg.TLS || cfg.CA != "" || cfg.Cert != "" {
		var err error
		if conf.TLS, err = cfg.tls(); err != nil {
			return nil, fmt.Errorf("etcd: %w", err)
		}
	}
	client, err := clientv3.New(conf)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	w.mu.Lock()
	w.ask = client.ActiveConnection()
	w.mu.Unlock()
	if err := w.quote(client); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return client, nil
}
