#!/bin/bash
# grpc-go raises a client's keepalive time below ten seconds to ten, with a warning in a log that is off by default.
# With a time and a timeout of 1 s, a silent connection is noticed after about 12 s.
# Guess: it is noticed after 2 s, or when the server decides.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

// relay forwards all bytes until silent is set.
func relay(to, from net.Conn, silent *atomic.Bool) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if !silent.Load() {
			to.Write(buf[:n])
		}
	}
}

func main() {
	var silent atomic.Bool
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go grpc.NewServer().Serve(ln)
	conn, err := grpc.NewClient(ln.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: time.Second, Timeout: time.Second, PermitWithoutStream: true}),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			server, err := net.Dial("tcp", addr)
			ours, theirs := net.Pipe()
			go relay(server, theirs, &silent)
			go relay(theirs, server, &silent)
			return ours, err
		}))
	if err != nil {
		panic(err)
	}
	conn.Connect()
	for s := conn.GetState(); s != connectivity.Ready; s = conn.GetState() {
		conn.WaitForStateChange(context.Background(), s)
	}
	silent.Store(true)
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	conn.WaitForStateChange(ctx, connectivity.Ready)
	fmt.Printf("noticed after %.0f s\n", time.Since(began).Seconds())
	_ = io.Discard
}
GO
modules google.golang.org/grpc@v1.85.0
go build -o silent . || exit 2
out=$(./silent); echo "grpc v1.85.0, Time and Timeout 1 s: $out"
warn=$(GRPC_GO_LOG_SEVERITY_LEVEL=warning timeout 3 ./silent 2>&1); echo "with GRPC_GO_LOG_SEVERITY_LEVEL=warning: $warn" | cut -c1-160
seconds=$(echo "$out" | grep -o '[0-9]*'); [ "$seconds" -ge 10 ] && case "$warn" in *"minimum period of 10s"*) ;; *) exit 1;; esac
