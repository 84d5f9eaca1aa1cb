#!/bin/bash
# etcd 3.7 raises the time of a lease to at least one and a half election timeouts. It returns the longer time and no error: a
# lease of 1 s lasts 2 s, and with --election-timeout 10000, as in clusters over long distances, each lease lasts at least 15 s.
# Guess: a lease of 1 s ends after 1 s, or is refused.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strconv"

	clientv3 "go.etcd.io/etcd/client/v3"
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
	for _, seconds := range []int64{1, 5, 20} {
		r, err := c.Grant(ctx, seconds)
		fmt.Print(seconds, "s: ", r.TTL, "s, ", err, "; ")
	}
}
GO
sed -i 's/"data", "panic"/"data"+os.Args[1], "panic"\n\tn, _ := strconv.Atoi(os.Args[1])\n\tcfg.ElectionMs = uint(n)/' main.go
modules go.etcd.io/etcd/server/v3@v3.7.3 go.etcd.io/etcd/client/v3@v3.7.3
go build -o run . || exit 2
a=$(./run 1000 2>/dev/null); echo "etcd v3.7.3, election 1 s: $a"; b=$(./run 10000 2>/dev/null); echo "etcd v3.7.3, election 10 s: $b"
[ "$a" = "1s: 2s, <nil>; 5s: 5s, <nil>; 20s: 20s, <nil>; " ] && [ "$b" = "1s: 15s, <nil>; 5s: 15s, <nil>; 20s: 20s, <nil>; " ]
