package collective

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// dialChannel dials one connection to a peer.
func (e *Endpoint) dialChannel(ctx context.Context, g *Group, path *tcpPath, peer, channel int, addrs []string) {
	stagger := time.Duration(0)
	if g.family.sameHost(g.original(g.rank), g.original(peer)) {
		stagger = localStagger
	}
	if ctx.Err() != nil {
		return
	}
	h := identity.Hello{Generation: g.generation, From: g.rank, To: peer, Channel: channel, Lane: g.lane}
	c, err := e.dial(ctx, addrs, g.family.key, h, stagger, path.lacking)
	if err == nil {
		e.made.Add(1)
		path.install(peer, channel, c)
	} else if ctx.Err() == nil {
		g.fail(gone(err, peer))
	}
}

var (
	errBroken  = errors.New("collective: the connection broke") // before it was proven
	errNoRoute = errors.New("collective: no route to the peer") // from this host
	errTimeout = errors.New("collective: the connection took too long")
	errLater   = errors.New("collective: not yet") // the peer says so
)

// retryable reports whether a failed attempt may succeed the next time. Where the peer says so
// itself, the attempts end with their context: it already has a connection in the place of this
// one, which is broken and which it has yet to give up, or it has not come to the group.
func retryable(err error, attempt int) bool {
	switch {
	case errors.Is(err, errLater):
		return true
	case errors.Is(err, errBroken):
		return attempt < dialAttempts
	}
	return errors.Is(err, errNoRoute) && attempt < routeAttempts
}

// dial dials until it succeeds, or a retry is useless. A timeout alone is no reason to give up
// where the peer is of this host, nor while other connections of the group come, of which lacking
// tells how many do not: then this host is slow.
func (e *Endpoint) dial(
	ctx context.Context, addrs []string, key identity.DataKey, h identity.Hello, stagger time.Duration, lacking func() int,
) (*conn, error) {
	pause := firstBackoff
	for attempt := 1; ; attempt++ {
		before, began := lacking(), time.Now()
		c, err := e.dialAll(ctx, addrs, key, h, stagger)
		if time.Since(began) >= heldFor {
			attempt = 1 // the peer has not come to the generation, so it can answer nothing
		}
		slow := errors.Is(err, errTimeout) && (stagger > 0 || loopback(addrs) || lacking() < before)
		if err == nil || ctx.Err() != nil || !slow && !retryable(err, attempt) {
			return c, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		case <-timer.C:
		}
		pause = min(2*pause, lastBackoff)
	}
}

// loopback reports whether an address leads to this host alone.
func loopback(addrs []string) bool {
	return slices.ContainsFunc(addrs, func(addr string) bool {
		at, err := netip.ParseAddrPort(addr)
		return err == nil && at.Addr().IsLoopback()
	})
}

// dialAll tries all addresses at once, or each of them so much later than the one before or when
// that has failed, and returns the connection that is proven first. The acceptor agrees to one
// alone, so it cannot agree to a second one.
func (e *Endpoint) dialAll(
	ctx context.Context, addrs []string, key identity.DataKey, h identity.Hello, stagger time.Duration,
) (*conn, error) {
	switch len(addrs) {
	case 0:
		return nil, errors.New("it has given no address")
	case 1:
		return e.dialOne(ctx, addrs[0], key, h)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		c   *conn
		err error
	}
	results := make(chan result)
	var won *conn
	var errs []error
	started := 0
	start := func() {
		addr := addrs[started]
		started++
		go func() {
			c, err := e.dialOne(ctx, addr, key, h)
			results <- result{c, err}
		}()
	}
	var next <-chan time.Time
	if stagger > 0 {
		ticker := time.NewTicker(stagger)
		defer ticker.Stop()
		next = ticker.C
	}
	start()
	for ended := 0; ended < started; { // every goroutine is waited for
		more := won == nil && started < len(addrs)
		if more && stagger == 0 {
			start()
			continue
		}
		var r result
		select {
		case r = <-results:
			ended++
		case <-next:
			if more {
				start()
			}
			continue
		}
		switch {
		case r.err != nil:
			errs = append(errs, r.err)
			if more {
				start()
			}
		case won != nil:
			r.c.raw.Close()
		default:
			won = r.c
			cancel()
		}
	}
	if won == nil {
		return nil, errors.Join(errs...)
	}
	return won, nil
}

func (e *Endpoint) dialOne(ctx context.Context, addr string, key identity.DataKey, h identity.Hello) (*conn, error) {
	if e.dialOnce != nil {
		return nil, e.dialOnce()
	}
	d := net.Dialer{Timeout: dialBound, KeepAliveConfig: keepAlive}
	raw, err := d.DialContext(ctx, "tcp", addr)
	if errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) {
		return nil, fmt.Errorf("%w: %w", errNoRoute, err) // a link that has just come back is in that state for a moment
	}
	if failed, is := err.(net.Error); is && failed.Timeout() {
		return nil, fmt.Errorf("%w: %w", errTimeout, err)
	}
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	c := &conn{Conn: raw, raw: raw}
	if e.cfg.Encrypt {
		c.Conn = tls.Client(raw, e.cfg.Credentials.ClientTLS(identity.Subject{Role: identity.Worker}))
	}
	err = e.cfg.Credentials.ProveDial(c.Conn, key, h)
	if !stop() {
		err = ctx.Err()
	}
	if err == nil {
		return c, nil
	}
	raw.Close()
	var refused *identity.RefusedError
	switch {
	case errors.As(err, &refused) && refused.Later:
		err = fmt.Errorf("%w: %w", errLater, err)
	case refused == nil && !errors.Is(err, identity.ErrUnproven):
		err = fmt.Errorf("%w: %s: %w", errBroken, addr, err)
	}
	return nil, err
}
