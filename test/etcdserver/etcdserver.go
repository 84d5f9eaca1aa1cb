// Package etcdserver runs a real etcd for tests.
package etcdserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// ErrMissing reports that etcd is not installed on this machine.
var ErrMissing = errors.New("etcd is not installed (package etcd-server)")

// Server is an etcd of one member, without TLS. Its methods are for one goroutine.
type Server struct {
	// Endpoint is the address at which it listens for clients, host:port.
	Endpoint string

	dir, peer string
	wrap      []string
	cmd       *exec.Cmd
}

// Start starts a server with its files in dir, at an address of this machine, and blocks until it
// answers. wrap is a command that runs it, for example in a network namespace. The caller must call
// Stop. The server ends when the thread that started it ends, or at the latest with this process.
func Start(ctx context.Context, dir, host string, wrap ...string) (*Server, error) {
	if _, err := exec.LookPath("etcd"); err != nil {
		return nil, ErrMissing
	}
	s := &Server{dir: dir, wrap: wrap}
	for _, addr := range []*string{&s.Endpoint, &s.peer} {
		port, err := FreePort()
		if err != nil {
			return nil, fmt.Errorf("etcdserver: %w", err)
		}
		*addr = net.JoinHostPort(host, port)
	}
	return s, s.Restart(ctx)
}

// FreePort returns a port that is free on loopback; it is rarely in use at other addresses.
func FreePort() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	return port, err
}

// Restart starts a stopped server with its old data, and blocks until it answers.
func (s *Server) Restart(ctx context.Context) error {
	client, peer := "http://"+s.Endpoint, "http://"+s.peer
	line := slices.Concat(s.wrap, []string{"etcd", "--data-dir", filepath.Join(s.dir, "data"),
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer})
	log, err := os.OpenFile(s.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("etcdserver: %w", err)
	}
	defer log.Close()
	s.cmd = exec.Command(line[0], line[1:]...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	s.cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=arm64")
	s.cmd.Stdout, s.cmd.Stderr = log, log
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("etcdserver: %w", err)
	}
	if len(s.wrap) > 0 {
		return nil // it can be reached only from elsewhere
	}
	return s.await(ctx)
}

// await blocks until the server answers.
func (s *Server) await(ctx context.Context) error {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		reply, err := http.Get("http://" + s.Endpoint + "/health")
		if err == nil {
			_ = reply.Body.Close()
			if reply.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("etcdserver: %w (its log is %s)", context.Cause(ctx), s.LogPath())
		}
	}
}

// LogPath returns the path of the file with the server's output.
func (s *Server) LogPath() string { return filepath.Join(s.dir, "log") }

// Suspend stops the server with SIGSTOP and blocks until no thread of it runs.
func (s *Server) Suspend() error { return sandbox.Suspend(s.cmd.Process.Pid) }

// Resume continues a suspended server.
func (s *Server) Resume() error { return s.cmd.Process.Signal(syscall.SIGCONT) }

// Stop kills the server and waits for its end.
func (s *Server) Stop() {
	_ = s.cmd.Process.Kill() // it may have ended
	_ = s.cmd.Wait()
}
