package tasks

import (
	"net"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// BenchmarkCall waits for each task before it submits the next.
func BenchmarkCall(b *testing.B) {
	p := newPlace(b, scheduler.Config{})
	p.serve(ServeConfig{})
	pool := p.connect(ConnectConfig{})
	ctx := b.Context()
	for b.Loop() {
		if _, err := double.Call(ctx, pool, 1); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPipelined has up to 10,000 tasks in flight: with 2 workers, with a journal, and with
// 1,000 workers.
func BenchmarkPipelined(b *testing.B) {
	for _, c := range []struct {
		name    string
		workers int
		journal bool
	}{{"2 workers", 2, false}, {"2 workers, journal", 2, true}, {"1000 workers", 1000, false}} {
		b.Run(c.name, func(b *testing.B) {
			cfg, workers := scheduler.Config{Run: "r"}, c.workers
			if c.journal {
				cfg.Journal = filepath.Join(b.TempDir(), "journal")
			}
			p := newPlace(b, cfg)
			for range workers {
				p.serve(ServeConfig{})
			}
			pool := p.connect(ConnectConfig{Window: 10_000})
			ctx := b.Context()
			if _, err := double.Call(ctx, pool, 1); err != nil {
				b.Fatal(err)
			}
			futures := make([]*Future[int], b.N)
			b.ResetTimer()
			for i := range futures {
				f, err := double.Submit(ctx, pool, i)
				if err != nil {
					b.Fatal(err)
				}
				futures[i] = f
			}
			for i, f := range futures {
				if n, err := f.Get(ctx); err != nil || n != 2*i {
					b.Fatal(n, err)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tasks/s")
		})
	}
}

// BenchmarkGRPC measures gRPC calls from a client to a server and back, for comparison: one after
// the other, and 100 at a time.
func BenchmarkGRPC(b *testing.B) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, health.NewServer())
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(ln) })
	defer serving.Wait()
	defer server.Stop()
	conn, err := grpc.NewClient(ln.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	client := healthpb.NewHealthClient(conn)
	b.Run("call", func(b *testing.B) {
		for b.Loop() {
			if _, err := client.Check(b.Context(), &healthpb.HealthCheckRequest{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("pipelined", func(b *testing.B) {
		var calling sync.WaitGroup
		const callers = 100
		for c := range callers {
			calling.Go(func() {
				for i := c; i < b.N; i += callers {
					if _, err := client.Check(b.Context(), &healthpb.HealthCheckRequest{}); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		calling.Wait()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
	})
}
