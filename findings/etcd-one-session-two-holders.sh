#!/bin/bash
# etcd 3.7, client/v3/concurrency: two Mutexes of one Session both hold the lock, and the Unlock of one takes it from the other.
# Guess: the second Lock waits, as for a Mutex of another Session.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"net/url"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

func main() {
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel = "data", "panic"
	client, peer := []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}, []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	cfg.ListenClientUrls, cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = client, peer, peer
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		panic(err)
	}
	defer server.Close()
	<-server.Server.ReadyNotify()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{server.Clients[0].Addr().String()}, Logger: zap.NewNop()})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	ctx := context.Background()
	session := func() *concurrency.Session {
		s, err := concurrency.NewSession(c)
		if err != nil {
			panic(err)
		}
		return s
	}
	takes := func(m *concurrency.Mutex) bool {
		bounded, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		return m.Lock(bounded) == nil
	}
	one, other := session(), session()
	a, b, z := concurrency.NewMutex(one, "/lock"), concurrency.NewMutex(one, "/lock"), concurrency.NewMutex(other, "/lock")
	fmt.Print("first ", takes(a), ", second of the same session ", takes(b), ", of another ", takes(z))
	if err := a.Unlock(ctx); err != nil {
		panic(err)
	}
	fmt.Println("; after the first's unlock, though the second has not: of another", takes(concurrency.NewMutex(other, "/lock")))
}
GO
modules go.etcd.io/etcd/server/v3@v3.7.3 go.etcd.io/etcd/client/v3@v3.7.3
go build -o run . || exit 2
out=$(./run 2>/dev/null); echo "etcd v3.7.3: $out"
[ "$out" = "first true, second of the same session true, of another false; after the first's unlock, though the second has not: of another true" ]
