package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
)

const (
	// defaultPatience is less than --start-timeout is by default, so that a worker says why it has
	// not joined.
	defaultPatience = 25 * time.Second
	// defaultAbsence is as long as agents ever keep the workers of a driver that is gone: they know
	// when it is enough.
	defaultAbsence = 7 * 24 * time.Hour
	// maxPause bounds the pause between two tries to connect: a driver that is back is found soon.
	maxPause = 500 * time.Millisecond
	// retryPause is between two calls of which the first reached a driver that did not answer it.
	retryPause = 20 * time.Millisecond
	// served is how long a call must have been with the driver for the patience to begin anew after
	// it broke.
	served = time.Second
	// lastTry is how long the try may take that ends the patience and says what is wrong.
	lastTry = 100 * time.Millisecond
)

// ClientConfig says where the driver is and who the worker.
type ClientConfig struct {
	// Addr is the driver's, host:port.
	Addr string
	// Credentials are the worker's.
	Credentials *identity.Credentials
	// Patience is how long the driver may be out of reach before a call gives up. Zero: 25 s.
	Patience time.Duration
	// Absence is the same once the driver has been reached: another may take over from one that has
	// died. Zero: Patience where that is given, else a week.
	Absence time.Duration
}

// Client is a worker's connection to the driver. It stays open between calls. Its methods may be
// called from several goroutines at once.
type Client struct {
	cfg   ClientConfig
	conn  *grpc.ClientConn
	rpc   wire.RendezvousClient
	joins atomic.Uint64 // calls of Join so far: the latest counts
	met   atomic.Bool   // the driver has been reached
}

// NewClient returns a client that has not connected yet: it does no I/O before the first call.
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
	conn, err := wire.NewClient(cfg.Addr, tlsConf, maxPause)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	return &Client{cfg: cfg, conn: conn, rpc: wire.NewRendezvousClient(conn)}, nil
}

// Close breaks the connection and fails calls under way.
func (c *Client) Close() error { return c.conn.Close() }

// Join asks for a world newer than j.After with this worker in it, and blocks until there is one;
// it may take for ever. It asks again when the connection breaks. Its errors are ErrRemoved,
// ErrLast and ErrFinished where the driver dismisses the worker, an *UnreachableError,
// ErrSuperseded, the cause of ctx's end, or say why the driver refuses.
func (c *Client) Join(ctx context.Context, j Joining) (Place, error) {
	req := j.toWire()
	if err := validate(req); err != nil {
		return Place{}, fmt.Errorf("rendezvous: join: %w", err)
	}
	mine := c.joins.Add(1)
	var reply *wire.JoinReply
	err := c.call(ctx, "join", func(ctx context.Context) (err error) {
		reply, err = c.rpc.Join(ctx, req)
		if status.Code(err) == codes.Aborted && c.joins.Load() != mine {
			return ErrSuperseded
		}
		return err
	})
	if err != nil {
		return Place{}, err
	}
	switch reply.GetDismissal() {
	case wire.Dismissal_DISMISSAL_REMOVED:
		if reply.GetLast() {
			return Place{}, ErrLast
		}
		return Place{}, ErrRemoved
	case wire.Dismissal_DISMISSAL_FINISHED:
		return Place{}, ErrFinished
	}
	return placeFromWire(reply.GetWorld(), j.After)
}

// Look returns the newest world, in which this worker need not be: its Rank there means nothing,
// and a Generation of 0 says that there is none yet. Its errors are those of Join, without
// dismissals.
func (c *Client) Look(ctx context.Context) (World, error) {
	var reply *wire.World
	err := c.call(ctx, "look", func(ctx context.Context) (err error) {
		reply, err = c.rpc.Look(ctx, &wire.LookRequest{})
		return err
	})
	if err != nil || reply.GetGeneration() == 0 {
		return World{}, err
	}
	p, err := placeFromWire(reply, 0)
	if err != nil {
		return World{}, err
	}
	return p.World()
}

// Report tells the driver of r and blocks until it has heard, perhaps twice. Its errors are those
// of Join, without dismissals.
func (c *Client) Report(ctx context.Context, r Report, generation, commits uint64) error {
	for on, of := range reportsFromWire {
		if of == r {
			req := &wire.ReportRequest{Report: on, Generation: generation, Commits: commits}
			return c.call(ctx, "report", func(ctx context.Context) error {
				_, err := c.rpc.Report(ctx, req)
				return err
			})
		}
	}
	return fmt.Errorf("rendezvous: %v is no report", r)
}

// patience is how long the driver may be out of reach now.
func (c *Client) patience() time.Duration {
	if c.met.Load() {
		return c.cfg.Absence
	}
	return c.cfg.Patience
}

// call repeats do until the driver has answered it or has been out of reach for the patience. Every
// call here can be repeated without harm.
func (c *Client) call(ctx context.Context, what string, do func(context.Context) error) error {
	since := time.Now() // when the driver was last known to be there, or the call began
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
			// Aborted: an earlier try, still on its way when its connection broke, has come in
			// after this one.
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

// ready waits until there is a connection. It reports false at the deadline, when ctx ends, and for
// a closed client.
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

// last tries once more, shortly: a call fails at once with the reason why there is no connection.
func (c *Client) last(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, lastTry)
	defer cancel()
	return do(ctx)
}

// plain is an error of a call in the words of who made it.
func plain(err error) error { return errors.New(status.Convert(err).Message()) }
