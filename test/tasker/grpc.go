package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// callByGRPC prints how long gRPC calls take, one after the other, from this process to another,
// from there to a third, and back. This is the path of a task, without a scheduler and without TLS.
func callByGRPC(ctx context.Context, n int) error {
	ctx, cancel := context.WithCancel(ctx)
	var others sync.WaitGroup
	defer others.Wait()
	defer cancel()
	worker, err := startServer(ctx, &others, "last")
	if err != nil {
		return err
	}
	relay, err := startServer(ctx, &others, worker)
	if err != nil {
		return err
	}
	client, conn, err := dialGRPC(relay)
	if err != nil {
		return err
	}
	defer conn.Close()
	var began time.Time
	for i := range n + 1 { // the first call connects
		if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil {
			return err
		}
		if i == 0 {
			began = time.Now()
		}
	}
	fmt.Printf("%d calls of gRPC through another process, %v each\n", n, time.Since(began)/time.Duration(n))
	return nil
}

// startServer starts this program as serveGRPC until ctx ends, and returns its address.
func startServer(ctx context.Context, running *sync.WaitGroup, next string) (addr string, err error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "-grpc-server", next)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	addr, err = bufio.NewReader(out).ReadString('\n')
	running.Go(func() { _ = cmd.Wait() }) // it is killed
	return strings.TrimSpace(addr), err
}

func dialGRPC(addr string) (healthpb.HealthClient, *grpc.ClientConn, error) {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	return healthpb.NewHealthClient(conn), conn, nil
}

// serveGRPC answers calls until ctx ends. If next is an address, it forwards them to the server
// there.
func serveGRPC(ctx context.Context, next string) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	if next == "last" {
		healthpb.RegisterHealthServer(server, health.NewServer())
	} else {
		client, conn, err := dialGRPC(next)
		if err != nil {
			return errors.Join(err, ln.Close())
		}
		defer conn.Close()
		healthpb.RegisterHealthServer(server, passing{client: client})
	}
	context.AfterFunc(ctx, server.Stop)
	fmt.Println(ln.Addr())
	return server.Serve(ln)
}

// passing is a server that forwards its calls to another.
type passing struct {
	healthpb.UnimplementedHealthServer
	client healthpb.HealthClient
}

// Check implements the server.
func (p passing) Check(ctx context.Context, r *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	return p.client.Check(ctx, r)
}
