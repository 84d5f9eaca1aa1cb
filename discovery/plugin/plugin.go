package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wire/discoverypb"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	defaultStartTimeout = 10 * time.Second
	defaultCallTimeout  = 30 * time.Second
	defaultEndTimeout   = time.Second
	// lastWords is how long a call that has lost its connection waits for the reason why the
	// process has ended.
	lastWords = 5 * time.Second
)

// startBackoff is the pause before a plugin that has died is started again. It starts over after a
// session that lasted at least its longest pause.
var startBackoff = retry.Backoff{First: 100 * time.Millisecond, Most: 10 * time.Second}

// Config configures the plugin to run.
type Config struct {
	// Path is the plugin's program: a name without a slash is searched for in PATH. Args are its
	// arguments.
	Path string
	Args []string
	// Settings are passed to the plugin before the first call. They are not logged.
	Settings map[string]string
	// Env is added to the plugin's environment, which is otherwise that of this process.
	Env []string
	// StartTimeout bounds the time from the start of the process until it has taken its settings.
	// 0: 10 s.
	StartTimeout time.Duration
	// CallTimeout bounds one answer of the plugin, including the first list of a Watch: a plugin
	// that needs longer is killed. 0: 30 s.
	CallTimeout time.Duration
	// EndTimeout is how long Close waits after SIGTERM until it sends SIGKILL. 0: 1 s.
	EndTimeout time.Duration
	// Log takes the plugin's output and the events of its process. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
	// Stray is called with each line that the plugin prints to stdout after the handshake, where it
	// should print nothing. It is called from one goroutine for each process of the plugin. The
	// line is also logged. Nil: not called.
	Stray func(line string)
	// Started is called with each process of the plugin, or with the error if one could not be
	// started. Nil: not called.
	Started func(pid int, err error)
}

// Plugin is a Discoverer and Watcher that asks a plugin's process. It starts the process when it is
// first needed, and again when it is needed and has died: at once, or after pauses that grow from
// 100 ms to 10 s if the process keeps dying soon. It kills the process if that does not answer in
// time; the kernel kills it when this process dies. Its methods are safe for concurrent use.
type Plugin struct {
	cfg  Config
	name string
	log  logrus.FieldLogger

	ctx      context.Context // ends with Close
	cancel   context.CancelCauseFunc
	sessions sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	closeErr  error // of Close
	current   *session
	failures  int // consecutive sessions that ended soon
	notBefore time.Time
}

var (
	_ discovery.Discoverer = (*Plugin)(nil)
	_ discovery.Watcher    = (*Plugin)(nil)
	_ discovery.Scaler     = (*Plugin)(nil)
)

var errClosed = errors.New("it was closed")

// New returns a Plugin for the config. It starts nothing. The caller must call Close if it has used
// the Plugin.
func New(cfg Config) *Plugin {
	if cfg.StartTimeout <= 0 {
		cfg.StartTimeout = defaultStartTimeout
	}
	if cfg.CallTimeout <= 0 {
		cfg.CallTimeout = defaultCallTimeout
	}
	if cfg.EndTimeout <= 0 {
		cfg.EndTimeout = defaultEndTimeout
	}
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	cfg.Args, cfg.Env = slices.Clone(cfg.Args), slices.Clone(cfg.Env)
	cfg.Settings = maps.Clone(cfg.Settings)
	p := &Plugin{cfg: cfg, name: filepath.Base(cfg.Path)}
	p.log = cfg.Log.WithField("plugin", p.name)
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	return p
}

// ErrKilled is the error of Close if the plugin's process did not end with SIGTERM.
var ErrKilled = errors.New("it did not end with SIGTERM and had to be killed")

// Close ends the plugin's process and waits for it: it sends a request to end, after half a second
// SIGTERM, and SIGKILL after EndTimeout; then it returns ErrKilled. Calls in progress fail, as do
// later ones.
func (p *Plugin) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel(errClosed)
	p.sessions.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closeErr
}

// PID returns the id of the plugin's process, or 0 if it is not running.
func (p *Plugin) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.current
	if s == nil || s.hasEnded() {
		return 0
	}
	select {
	case <-s.ready:
		return s.process.child.PID
	default:
		return 0
	}
}

// Discover asks the plugin for its hosts, starts it if necessary, and blocks until the answer.
func (p *Plugin) Discover(ctx context.Context) ([]plan.Host, error) {
	s, err := p.session(ctx)
	if err != nil {
		return nil, p.error(err)
	}
	call, _, end := p.call(ctx)
	defer end()
	list, err := s.service.Discover(call, &discoverypb.DiscoverRequest{})
	if err != nil {
		return nil, p.error(s.fault(ctx, call, err))
	}
	hosts, err := fromWire(list)
	if err != nil {
		return nil, p.error(err)
	}
	return hosts, nil
}

// Watch receives lists from the plugin, which it starts if necessary, until ctx ends or the plugin
// stops, dies or sends an invalid list. It returns discovery.ErrNoWatch, wrapped, if the plugin
// cannot push.
func (p *Plugin) Watch(ctx context.Context, found func([]plan.Host)) error {
	s, err := p.session(ctx)
	if err != nil {
		return p.error(err)
	}
	call, heard, end := p.call(ctx)
	defer end()
	stream, err := s.service.Watch(call, &discoverypb.WatchRequest{})
	for first := true; err == nil; first = false {
		var list *discoverypb.HostList
		if list, err = stream.Recv(); err != nil {
			if status.Code(err) == codes.Unimplemented && first {
				return p.error(discovery.ErrNoWatch)
			}
			break
		}
		heard()
		hosts, err := fromWire(list)
		if err != nil {
			return p.error(err)
		}
		if ctx.Err() != nil {
			break
		}
		found(hosts)
	}
	return p.error(s.fault(ctx, call, err))
}

// Scale asks the plugin, which it starts if necessary, for slots. It returns discovery.ErrNoScale,
// wrapped, if the plugin cannot create hosts.
func (p *Plugin) Scale(ctx context.Context, least, most int) error {
	s, err := p.session(ctx)
	if err != nil {
		return p.error(err)
	}
	call, _, end := p.call(ctx)
	defer end()
	_, err = s.service.Scale(call, &discoverypb.ScaleRequest{Least: count(least), Most: count(most)})
	switch {
	case status.Code(err) == codes.Unimplemented:
		return p.error(discovery.ErrNoScale)
	case err != nil:
		return p.error(s.fault(ctx, call, err))
	}
	return nil
}

// count returns a number of slots as it is sent.
func count(n int) uint32 { return uint32(min(max(n, 0), math.MaxInt32)) }

// call returns the context of a call: it ends with ctx, or after CallTimeout unless heard is called
// before. The context has no deadline, which would be passed on to the plugin: the plugin could act
// on it first, and the reason of the failure would be unclear. The caller must call end.
func (p *Plugin) call(ctx context.Context) (call context.Context, heard func(), end func()) {
	call, cancel := context.WithCancel(context.WithoutCancel(ctx))
	release := context.AfterFunc(ctx, cancel)
	late := time.AfterFunc(p.cfg.CallTimeout, cancel)
	heard = func() { late.Stop() }
	return call, heard, func() {
		late.Stop()
		release()
		cancel()
	}
}

// error returns err with the plugin's name before it.
func (p *Plugin) error(err error) error { return fmt.Errorf("discovery/plugin: %s: %w", p.name, err) }

// session returns the current session, or starts one, and blocks until it is ready.
func (p *Plugin) session(ctx context.Context) (*session, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, errClosed
	}
	s := p.current
	if s == nil || s.hasEnded() {
		s = newSession(p, time.Until(p.notBefore))
		p.current = s
		p.sessions.Go(s.run)
	}
	p.mu.Unlock()
	select {
	case <-s.ready:
		return s, s.failed
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// failed records that a session has ended unexpectedly, and returns the pause before the next one.
func (p *Plugin) failed(ran time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ran >= startBackoff.Most {
		p.failures = 0
	}
	p.failures++
	pause := startBackoff.After(p.failures)
	p.notBefore = time.Now().Add(pause)
	return pause
}

// tooSlow is the reason to kill a plugin that has left a call unanswered.
func (s *session) tooSlow() error {
	return fmt.Errorf("it has not answered in %v, and was killed", s.plugin.cfg.CallTimeout)
}

// fault returns the reason why a call failed. ctx is the caller's context, and call is the one
// derived from it with the time limit: if only call has ended, the plugin was too slow, and fault
// kills it.
func (s *session) fault(ctx, call context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case call.Err() != nil:
		err := s.tooSlow()
		s.cancel(err)
		<-s.ended
		return err
	case s.hasEnded():
		return s.gone // err may be a consequence: the connection was closed
	case errors.Is(err, io.EOF):
		return errors.New("it has stopped watching")
	case status.Code(err) == codes.Unavailable:
		select {
		case <-s.ended:
			return s.gone
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(lastWords):
		}
	}
	return errors.New(status.Convert(err).Message())
}
