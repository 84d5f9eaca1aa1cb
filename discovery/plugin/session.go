package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/hvdrun/hvdrun/internal/wire/discoverypb"
)

const (
	// pingInterval is the longest time between two checks whether a plugin is alive: a plugin that
	// is stopped by a signal would be silent for ever.
	pingInterval = 10 * time.Second
	// shutdownGrace is how long a plugin may take to end after a request, before SIGTERM.
	shutdownGrace = 500 * time.Millisecond
	// longestTemp is the longest path, in bytes, of a temporary folder in which the path of a
	// socket is still short enough for the kernel.
	longestTemp = 64
	// shutdownMethod is the gRPC method that ends a plugin that go-plugin serves. Its messages are
	// empty.
	shutdownMethod = "/plugin.GRPCController/Shutdown"
)

// session is one life of the plugin's process. Its goroutine, run, starts the process, supervises
// it and waits for its end.
type session struct {
	plugin *Plugin
	delay  time.Duration // pause before the start
	ctx    context.Context
	cancel context.CancelCauseFunc // kills the process

	process *process
	client  *goplugin.Client
	conn    *grpc.ClientConn
	service discoverypb.DiscoveryClient

	ready  chan struct{} // closed when the plugin has its settings or could not be started
	failed error         // why it could not be started; set before ready is closed
	ended  chan struct{} // closed when the process is gone
	gone   error         // why the process is gone; set before ended is closed
}

func newSession(p *Plugin, delay time.Duration) *session {
	s := &session{plugin: p, delay: delay, ready: make(chan struct{}), ended: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(p.ctx)
	return s
}

func (s *session) hasEnded() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

func (s *session) run() {
	defer s.cancel(nil)
	err := s.pause()
	if err == nil {
		if err = s.start(); err != nil {
			s.plugin.failed(0)
		}
	}
	if err != nil {
		s.failed, s.gone = err, err
		close(s.ended) // first, so that nobody uses this session any more
		close(s.ready)
		return
	}
	close(s.ready)
	defer s.client.Kill() // releases what go-plugin holds; nobody needs to wait for that
	started := time.Now()
	s.gone = s.attend()
	if !errors.Is(s.gone, errClosed) {
		pause := s.plugin.failed(time.Since(started))
		s.plugin.log.Warnf("discovery/plugin: %s: %v; it is started again after %v", s.plugin.name, s.gone, pause)
	}
	close(s.ended)
}

// pause waits until it is time to start.
func (s *session) pause() error {
	if s.delay > 0 {
		select {
		case <-time.After(s.delay):
		case <-s.ctx.Done():
		}
	}
	return context.Cause(s.ctx)
}

// start starts the process, connects to it and passes its settings. If that fails, it leaves
// nothing behind.
func (s *session) start() error {
	p := s.plugin
	ctx, cancel := context.WithTimeoutCause(s.ctx, p.cfg.StartTimeout, fmt.Errorf("it has not started in %v", p.cfg.StartTimeout))
	defer cancel()
	s.process = newProcess(p.cfg, p.log)
	// Some of what go-plugin does before a plugin is ready has no time limit. Killing the process
	// ends all of it.
	release := context.AfterFunc(ctx, s.process.kill)
	err := s.meet(ctx)
	stopped := !release()
	if err == nil && !stopped {
		return nil
	}
	s.process.kill()
	s.process.wait()
	s.client.Kill()
	if stopped {
		return s.process.withLastWords(context.Cause(ctx))
	}
	return s.process.startFault(err)
}

// meet starts the process, connects to it and passes its settings.
func (s *session) meet(ctx context.Context) error {
	p := s.plugin
	temp := os.TempDir()
	if len(temp) > longestTemp {
		temp = "/tmp"
	}
	said := &lineWriter{say: s.process.say}
	s.client = goplugin.NewClient(&goplugin.ClientConfig{
		HandshakeConfig:  handshake,
		VersionedPlugins: map[int]goplugin.PluginSet{protocolVersion: {serviceName: &seam{}}},
		AllowedProtocols: []goplugin.Protocol{goplugin.ProtocolGRPC},
		AutoMTLS:         true,
		SkipHostEnv:      true, // process adds it
		StartTimeout:     2 * p.cfg.StartTimeout,
		SyncStdout:       said,
		SyncStderr:       said,
		Logger:           libraryLog(p.log),
		UnixSocketConfig: &goplugin.UnixSocketConfig{TempDir: temp},
		GRPCDialOptions:  []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage))},
		RunnerFunc: func(_ hclog.Logger, cmd *exec.Cmd, _ string) (runner.Runner, error) {
			s.process.handshakeEnv = cmd.Env
			return s.process, nil
		},
	})
	protocol, err := s.client.Client()
	if err != nil {
		return err
	}
	conn, err := protocol.Dispense(serviceName)
	if err != nil {
		return err
	}
	s.conn = conn.(*grpc.ClientConn)
	s.service = discoverypb.NewDiscoveryClient(s.conn)
	_, err = s.service.Configure(ctx, &discoverypb.ConfigureRequest{Settings: p.cfg.Settings})
	if status.Code(err) == codes.Unimplemented {
		err = CheckSettings(p.cfg.Settings)
	}
	if status.Code(err) == codes.Unavailable {
		select {
		case <-s.process.exited:
			return s.process.status
		case <-time.After(lastWords):
		}
	}
	if err != nil {
		s.process.refuse(errors.New(status.Convert(err).Message()))
	}
	return err
}

// attend blocks until the process is gone, and returns the reason.
func (s *session) attend() error {
	ping := time.NewTicker(min(pingInterval, s.plugin.cfg.CallTimeout))
	defer ping.Stop()
	for {
		select {
		case <-s.process.exited:
			return s.process.exitFault()
		case <-ping.C:
			if err := s.ping(); err != nil {
				s.cancel(err)
			}
		case <-s.ctx.Done():
			err := context.Cause(s.ctx)
			if errors.Is(err, errClosed) {
				s.shutDown()
			}
			s.process.kill()
			s.process.wait()
			return err
		}
	}
}

// ping returns an error if the plugin does not answer. Any answer will do.
func (s *session) ping() error {
	ctx, cancel := context.WithTimeout(s.ctx, s.plugin.cfg.CallTimeout)
	defer cancel()
	_, err := grpc_health_v1.NewHealthClient(s.conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: goplugin.GRPCServiceName})
	switch code := status.Code(err); {
	case code == codes.Unavailable || code == codes.DeadlineExceeded:
		return s.tooSlow()
	}
	return nil
}

// shutDown asks the process to end, by a request and then by SIGTERM, and waits until it has ended
// or EndTimeout has passed.
func (s *session) shutDown() {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	err := s.conn.Invoke(ctx, shutdownMethod, &emptypb.Empty{}, &emptypb.Empty{})
	if status.Code(err) != codes.Unimplemented {
		select {
		case <-s.process.exited:
			return
		case <-ctx.Done():
		}
	}
	s.process.signal(syscall.SIGTERM)
	select {
	case <-s.process.exited:
	case <-time.After(s.plugin.cfg.EndTimeout):
		s.plugin.mu.Lock()
		s.plugin.closeErr = ErrKilled
		s.plugin.mu.Unlock()
	}
}

// lineWriter logs each line that is written to it.
type lineWriter struct {
	say  func(line string)
	line []byte
}

// Write takes any part of a line. It cuts lines that are too long.
func (w *lineWriter) Write(b []byte) (int, error) {
	for _, c := range b {
		switch {
		case c == '\n':
			w.say(string(w.line))
			w.line = w.line[:0]
		case len(w.line) < maxLine:
			w.line = append(w.line, c)
		}
	}
	return len(b), nil
}

var _ io.Writer = (*lineWriter)(nil)
