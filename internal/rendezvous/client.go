package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

const (
	// defaultPatience is less than the default of --start-timeout, so that a worker reports why it
	// has not joined.
	defaultPatience = 25 * time.Second
	// defaultAbsence is the longest that agents ever keep the workers of a driver that is gone;
	// they decide when to end them.
	defaultAbsence = 7 * 24 * time.Hour
	// maxPause bounds the pause between two attempts to connect, so that a new driver is found
	// soon.
	maxPause = 500 * time.Millisecond
	// retryPause is the pause before a call is repeated that reached the driver but was not
	// answered.
	retryPause = 20 * time.Millisecond
	// served is how long a call must have lasted for the patience to begin anew after it broke.
	served = time.Second
	// lastTry is the limit of the last try, whose error is returned.
	lastTry = 100 * time.Millisecond
)

// ClientConfig configures a Client.
type ClientConfig struct {
	// Addr is the driver's address, host:port.
	Addr string
	// Credentials are the worker's credentials.
	Credentials *identity.Credentials
	// Patience is how long the driver may be unreachable before a call fails. Zero: 25 s.
	Patience time.Duration
	// Absence is the same after the driver has been reached once, because another driver may take
	// over. Zero: Patience if that is set, otherwise a week.
	Absence time.Duration
	// Widen has the worker's data listener listen on addresses that other machines reach, and
	// returns all that it has. Join calls it, at most once, when the driver asks for that, and
	// joins with these addresses. Nil: the driver does not ask, nor does it ask a worker that joins
	// without addresses.
	Widen func() ([]string, error)
	// Network is where the driver is. The zero value is the kernel's.
	Network identity.Network
	// Socket, if not nil, is the worker's end of the socket by which its launcher takes calls for
	// the driver, without TLS. The client closes it. Once it is broken, the client calls at Addr.
	Socket net.Conn
}

// Client is a worker's connection to the driver. It stays open between calls. Its methods are safe
// for concurrent use.
type Client struct {
	cfg   ClientConfig
	conn  *grpc.ClientConn
	rpc   rendezvouspb.RendezvousClient
	joins atomic.Uint64 // number of calls of Join; the latest one counts
	met   atomic.Bool   // the driver has been reached
	wide  atomic.Bool   // Widen has been called
	// has are the members of the last world; nil: none. The driver answers a join with how others
	// differ from them.
	has atomic.Pointer[members]
}

// NewClient returns a client. It does no I/O before the first call.
func NewClient(cfg ClientConfig) (*Client, error) {
	if cfg.Addr == "" || cfg.Credentials == nil {
		return nil, errors.New("rendezvous: a client needs the driver's address and credentials")
	}
	if cfg.Absence <= 0 {
		cfg.Absence = cfg.Patience
	}
	if cfg.Absence <= 0 {
		cfg.Absence = defaultAbsence
	}
	if cfg.Patience <= 0 {
		cfg.Patience = defaultPatience
	}
	tlsConf := cfg.Credentials.ClientTLS(identity.Subject{Role: identity.Driver})
	var conn *grpc.ClientConn
	var err error
	if cfg.Socket != nil {
		conn, err = wire.NewClientOver(cfg.Socket, cfg.Addr, tlsConf, maxPause)
	} else {
		conn, err = wire.NewClientBy(cfg.Network.Dial, cfg.Addr, tlsConf, maxPause)
	}
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	return &Client{cfg: cfg, conn: conn, rpc: rendezvouspb.NewRendezvousClient(conn)}, nil
}

// Close closes the connection; current calls fail.
func (c *Client) Close() error {
	err := c.conn.Close()
	if c.cfg.Socket != nil {
		_ = c.cfg.Socket.Close() // the connection has closed it, if there was a call
	}
	return err
}

// Join asks for a world newer than j.After of which this worker is a member, and blocks until there
// is one, possibly for ever. It repeats the request when the connection breaks. It returns
// ErrRemoved, ErrLast or ErrFinished if the driver dismisses the worker, an *UnreachableError,
// ErrSuperseded, the cause of ctx's end, or the driver's reason for refusing the request.
func (c *Client) Join(ctx context.Context, j Joining) (Place, error) {
	had := c.has.Load()
	reply, err := c.joinOnce(ctx, j, had)
	if err == nil && reply.GetWiden() && c.cfg.Widen != nil && c.wide.CompareAndSwap(false, true) {
		if j.DataAddrs, err = c.cfg.Widen(); err != nil {
			return Place{}, fmt.Errorf("rendezvous: listening for workers on other machines: %w", err)
		}
		reply, err = c.joinOnce(ctx, j, had)
	}
	if err != nil {
		return Place{}, err
	}
	switch reply.GetDismissal() {
	case rendezvouspb.Dismissal_DISMISSAL_REMOVED:
		if reply.GetLast() {
			return Place{}, ErrLast
		}
		return Place{}, ErrRemoved
	case rendezvouspb.Dismissal_DISMISSAL_FINISHED:
		return Place{}, ErrFinished
	}
	place, err := placeFromWire(reply.GetWorld(), j.After, had)
	if err == nil {
		c.has.Store(place.members)
	}
	return place, err
}

// joinOnce asks with the addresses of j, and returns what the driver answers. The worker has those
// members; nil: none.
func (c *Client) joinOnce(ctx context.Context, j Joining, had *members) (*rendezvouspb.JoinReply, error) {
	req := j.toWire()
	if had != nil {
		req.HasMembers = had.number
	}
	req.CanWiden = c.cfg.Widen != nil && len(j.DataAddrs) > 0 && !c.wide.Load()
	if err := validate(req); err != nil {
		return nil, fmt.Errorf("rendezvous: join: %w", err)
	}
	mine := c.joins.Add(1)
	var reply *rendezvouspb.JoinReply
	err := c.call(ctx, "join", func(ctx context.Context) (err error) {
		reply, err = c.rpc.Join(ctx, req)
		if status.Code(err) == codes.Aborted && c.joins.Load() != mine {
			return ErrSuperseded
		}
		return err
	})
	return reply, err
}

// Look returns the newest world. This worker need not be a member: its Rank there has no meaning. A
// Generation of 0 means that there is none yet. Its errors are those of Join, without dismissals.
func (c *Client) Look(ctx context.Context) (World, error) {
	var reply *rendezvouspb.World
	err := c.call(ctx, "look", func(ctx context.Context) (err error) {
		reply, err = c.rpc.Look(ctx, &rendezvouspb.LookRequest{})
		return err
	})
	if err != nil || reply.GetGeneration() == 0 {
		return World{}, err
	}
	p, err := placeFromWire(reply, 0, nil)
	if err != nil {
		return World{}, err
	}
	return p.World()
}

// Report tells the driver of r and blocks until the driver has answered; it may be told twice. Its
// errors are those of Join, without dismissals.
func (c *Client) Report(ctx context.Context, r Report, generation, commits uint64) error {
	for on, of := range reportsFromWire {
		if of == r {
			return c.report(ctx, &rendezvouspb.ReportRequest{Report: on, Generation: generation, Commits: commits})
		}
	}
	return fmt.Errorf("rendezvous: %v is not a report", r)
}

// ReportBackend tells the driver by which backend the devices of a generation compute together. It
// blocks as Report does, and returns the same errors, or one for a name that [BackendHandler] does
// not allow.
func (c *Client) ReportBackend(ctx context.Context, generation uint64, backend string) error {
	if err := checkBackend(backend); err != nil {
		return fmt.Errorf("rendezvous: report: %w", err)
	}
	return c.report(ctx, &rendezvouspb.ReportRequest{Report: rendezvouspb.Report_REPORT_BACKEND, Generation: generation, Backend: backend})
}

// ReportFailure tells the driver which error ends the program, as CleanError returns it. It blocks
// as Report does, and returns the same errors.
func (c *Client) ReportFailure(ctx context.Context, text string) error {
	text = CleanError(text)
	if err := checkError(text); err != nil {
		return fmt.Errorf("rendezvous: report: %w", err)
	}
	return c.report(ctx, &rendezvouspb.ReportRequest{Report: rendezvouspb.Report_REPORT_FAILED, Error: text})
}

func (c *Client) report(ctx context.Context, req *rendezvouspb.ReportRequest) error {
	return c.call(ctx, "report", func(ctx context.Context) error {
		_, err := c.rpc.Report(ctx, req)
		return err
	})
}

// Call makes a call of another service of the driver by the client's connection. It is repeated,
// and fails, as those of the client are: do may be called again after an error.
func (c *Client) Call(ctx context.Context, what string, do func(context.Context, grpc.ClientConnInterface) error) error {
	return c.call(ctx, what, func(ctx context.Context) error { return do(ctx, c.conn) })
}

// patience returns how long the driver may be unreachable now.
func (c *Client) patience() time.Duration {
	if c.met.Load() {
		return c.cfg.Absence
	}
	return c.cfg.Patience
}

// call repeats do until the driver has answered or has been unreachable for the patience. Every
// call of this package may be repeated.
func (c *Client) call(ctx context.Context, what string, do func(context.Context) error) error {
	since := time.Now() // when the driver last responded, or the call began
	for {
		if !c.ready(ctx, since.Add(c.patience())) && ctx.Err() == nil {
			if c.conn.GetState() == connectivity.Shutdown {
				return fmt.Errorf("rendezvous: %s: the client is closed", what)
			}
			err := c.last(ctx, do)
			if err == nil || errors.Is(err, ErrSuperseded) {
				return err
			}
			return &UnreachableError{Addr: c.cfg.Addr, For: time.Since(since), Err: plain(err)}
		}
		c.met.Store(true)
		began := time.Now()
		err := do(ctx)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("rendezvous: %s: %w", what, context.Cause(ctx))
		case errors.Is(err, ErrSuperseded):
			return err
		}
		switch status.Code(err) {
		case codes.Unavailable, codes.Aborted:
			// Aborted: an earlier attempt, delayed when its connection broke, has arrived after
			// this one.
		default:
			return fmt.Errorf("rendezvous: %s: %w", what, plain(err))
		}
		if now := time.Now(); now.Sub(began) >= served {
			since = now
		}
		timer := time.NewTimer(retryPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// ready waits for a connection. It returns false at the deadline, when ctx ends, and for a closed
// client.
func (c *Client) ready(ctx context.Context, deadline time.Time) bool {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for ctx.Err() == nil {
		state := c.conn.GetState()
		switch state {
		case connectivity.Ready:
			return true
		case connectivity.Shutdown:
			return false
		case connectivity.Idle:
			c.conn.Connect()
		}
		c.conn.WaitForStateChange(ctx, state)
	}
	return false
}

// last makes one more attempt with a short timeout: it fails with the reason why there is no
// connection.
func (c *Client) last(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, lastTry)
	defer cancel()
	return do(ctx)
}

// plain returns the message of a call's error, without gRPC's prefix.
func plain(err error) error { return errors.New(status.Convert(err).Message()) }
