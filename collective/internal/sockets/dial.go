package sockets

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/retry"
)

// dialChannel dials one connection to a peer. If the data channel has a connection on each of
// several routes, it dials the others too.
func (e *Endpoint) dialChannel(ctx context.Context, path *Path, peer, channel int) {
	if ctx.Err() != nil {
		return
	}
	w, name, before := e.way(ctx, path.gen, path.Original(peer)), channel, 0
	switch {
	case channel == controlChannel:
		e.dialOn(ctx, path, peer, channel, channel, w.from(w.beside))
		return
	case channel == dataChannel:
		var all int
		if before, all = path.widen(peer, w.rails); all > before {
			name = countedChannel + all
		}
	case w.rails > 0:
		w = w.from((channel - firstExtraChannel + 1) % w.rails)
	}
	if !e.dialOn(ctx, path, peer, channel, name, w) || name == channel {
		return
	}
	var extra sync.WaitGroup
	for n := before; n < name-countedChannel; n++ {
		extra.Go(func() {
			channel := firstExtraChannel + n - 1
			e.dialOn(ctx, path, peer, channel, channel, w.from(n%w.rails))
		})
	}
	extra.Wait()
}

// dialOn dials one connection of a channel, whose name for the peer is name. It reports whether the
// connection was made; if not, the group ends.
func (e *Endpoint) dialOn(ctx context.Context, path *Path, peer, channel, name int, w way) bool {
	h := identity.Hello{Generation: path.gen.Number, From: path.Rank, To: peer, Channel: name, Lane: path.ID}
	c, err := e.dial(ctx, w, path.gen.Key, h, path.lacking)
	if err == nil {
		e.made.Add(1)
		path.install(peer, channel, c)
	} else if ctx.Err() == nil {
		path.group.Fail(frame.Gone(err, peer))
	}
	return err == nil
}

var (
	errBroken  = errors.New("collective: the connection broke") // before it was proven
	errNoRoute = errors.New("collective: no route to the peer") // from this host
	errTimeout = errors.New("collective: the connection took too long")
	errLater   = errors.New("collective: the peer is not ready") // as it says itself
)

// retryable reports whether a failed attempt may succeed the next time. If the peer itself asks to
// retry, attempts end only with their context: the peer still has a broken connection in place of
// this one, or has not reached the group.
func retryable(err error, attempt int) bool {
	switch {
	case errors.Is(err, errLater):
		return true
	case errors.Is(err, errBroken):
		return attempt < dialAttempts
	}
	return errors.Is(err, errNoRoute) && attempt < routeAttempts
}

// dial dials until it succeeds or a retry is useless. A timeout alone is not a reason to give up if
// the peer is on this host, or while other connections of the group are being made, since then this
// host is slow. lacking returns the number of connections that are still missing.
func (e *Endpoint) dial(ctx context.Context, w way, key identity.DataKey, h identity.Hello, lacking func() int) (*conn, error) {
	for attempt := 1; ; attempt++ {
		before, began := lacking(), time.Now()
		c, err := e.dialAll(ctx, w, key, h)
		if time.Since(began) >= heldFor {
			attempt = 1 // the peer has not reached the generation, so it cannot answer
		}
		slow := errors.Is(err, errTimeout) && (w.local || loopback(w.addrs) || lacking() < before)
		if err == nil || ctx.Err() != nil || !slow && !retryable(err, attempt) {
			return c, err
		}
		if retry.Pause(ctx, dialBackoff.After(attempt)) != nil {
			return nil, ctx.Err()
		}
	}
}

// loopback reports whether some of the addresses are loopback addresses.
func loopback(addrs []string) bool {
	return slices.ContainsFunc(addrs, func(addr string) bool {
		at, err := netip.ParseAddrPort(addr)
		return err == nil && at.Addr().IsLoopback()
	})
}

// dialAll tries all addresses at once or, with a stagger, each address when the previous one has
// failed or that much later than the previous one. It returns the connection that is proven first.
// The acceptor accepts only one.
func (e *Endpoint) dialAll(ctx context.Context, w way, key identity.DataKey, h identity.Hello) (*conn, error) {
	switch len(w.addrs) {
	case 0:
		return nil, errors.New("it has given no address")
	case 1:
		return e.dialOne(ctx, w.addrs[0], key, h, nil)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := race{way: w, results: make(chan attempt), connected: make(chan int, len(w.addrs)), answered: make([]bool, len(w.addrs))}
	r.dial = func(addr string, connected func()) (*conn, error) { return e.dialOne(ctx, addr, key, h, connected) }
	won := r.run(cancel)
	if won.c == nil {
		return nil, errors.Join(r.errs...)
	}
	for i, addr := range w.addrs[:won.index] {
		if w.ordered && !r.answered[i] {
			e.routes.Break(time.Now(), w.host, netip.MustParseAddrPort(addr).Addr())
		}
	}
	return won.c, nil
}

// race is a set of attempts at several addresses, of which one wins.
type race struct {
	way
	dial      func(addr string, connected func()) (*conn, error)
	results   chan attempt
	connected chan int
	answered  []bool // by address: the peer's kernel has answered
	started   int
	errs      []error
}

// attempt is an attempt that has ended.
type attempt struct {
	index int
	c     *conn
	err   error
}

// start starts the next attempt.
func (r *race) start() {
	index, addr := r.started, r.addrs[r.started]
	r.started++
	go func() {
		c, err := r.dial(addr, func() { r.connected <- index })
		r.results <- attempt{index, c, err}
	}()
}

// run returns the attempt that is proven first. It calls cancel to end the other attempts, and
// blocks until all have ended.
func (r *race) run(cancel func()) (won attempt) {
	var next <-chan time.Time
	if r.stagger > 0 {
		ticker := time.NewTicker(r.stagger)
		defer ticker.Stop()
		next = ticker.C
	}
	r.start()
	held := 0                            // attempts that are being proven, and delay the next ones
	for ended := 0; ended < r.started; { // waits for every goroutine
		more := won.c == nil && r.started < len(r.addrs)
		if more && r.stagger == 0 {
			r.start()
			continue
		}
		var a attempt
		select {
		case index := <-r.connected:
			r.answered[index] = true
			held++
			continue
		case a = <-r.results:
			ended++
		case <-next:
			if more && !(r.ordered && held > 0) {
				r.start()
			}
			continue
		}
		switch {
		case a.err != nil:
			if r.answered[a.index] {
				held--
			}
			r.errs = append(r.errs, a.err)
			if more {
				r.start()
			}
		case won.c != nil:
			a.c.raw.Close()
		default:
			won = a
			cancel()
		}
	}
	return won
}

// dialRaw connects to one address.
func (e *Endpoint) dialRaw(ctx context.Context, addr string) (net.Conn, error) {
	if dial := e.cfg.Network.Dial; dial != nil {
		ctx, cancel := context.WithTimeout(ctx, dialBound)
		defer cancel()
		return dial(ctx, addr)
	}
	d := net.Dialer{Timeout: dialBound, KeepAliveConfig: keepAlive}
	return d.DialContext(ctx, "tcp", addr)
}

// dialOne dials one address and proves this rank to the peer. It calls connected, unless that is
// nil, when the peer's kernel has answered, before the proof.
func (e *Endpoint) dialOne(
	ctx context.Context, addr string, key identity.DataKey, h identity.Hello, connected func(),
) (*conn, error) {
	if e.dialOnce != nil {
		return nil, e.dialOnce()
	}
	raw, err := e.dialRaw(ctx, addr)
	if errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) {
		return nil, fmt.Errorf("%w: %w", errNoRoute, err) // a link that has just recovered is in this state for a moment
	}
	if failed, is := err.(net.Error); is && failed.Timeout() {
		return nil, fmt.Errorf("%w: %w", errTimeout, err)
	}
	if err != nil {
		return nil, err
	}
	if connected != nil {
		connected()
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
