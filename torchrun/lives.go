package torchrun

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/replica"
)

// lifeLen is the length of the text that identifies an agent's process, which comes from rand.Text.
const lifeLen = 26

// mostWatched is the largest number of members whose processes a node watches: those with the
// lowest ranks.
const mostWatched = 16

// errOtherLife means that another process now has the address of an agent.
var errOtherLife = errors.New("torchrun: another process has the agent's address")

// Member returns the name of this agent's process among the members of a round: the address at
// which others reach it, a slash, and a text that no other process has. It returns "" if the agent
// does not listen.
func (p *Peers) Member() string {
	addr := p.Addr()
	if addr == "" {
		return ""
	}
	return addr + "/" + p.life
}

// addrOf splits the name of a member into its address and the text that identifies its process.
func addrOf(member string) (addr, life string) {
	addr, life, _ = strings.Cut(member, "/")
	return addr, life
}

// watchedLife is the process of another agent that this one watches. The lock of Peers guards it.
type watchedLife struct {
	stop  context.CancelFunc
	done  chan struct{} // closed when it is no longer watched
	ended bool
}

// serveLife serves a connection by which another agent watches this process. It first sends the
// text that identifies this process, of lifeLen bytes, and sends one more byte when this process
// leaves for good.
func (p *Peers) serveLife(conn net.Conn) {
	stop := context.AfterFunc(p.alive, func() {
		_ = conn.SetWriteDeadline(time.Now().Add(byeTimeout))
		_, _ = conn.Write([]byte{0})
		conn.Close()
	})
	defer stop()
	if _, err := conn.Write([]byte(p.life)); err == nil {
		_, _ = conn.Read(make([]byte, 1)) // until either end closes the connection
	}
}

// greet connects to a member's process, and returns a connection whose end shows the end of that
// process. It returns errOtherLife, or the reason why the process cannot be reached.
func (p *Peers) greet(ctx context.Context, member string) (net.Conn, error) {
	addr, life := addrOf(member)
	conn, err := p.dial(ctx, addr, agentLife.of(0))
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	var said [lifeLen]byte
	_, err = io.ReadFull(conn, said[:])
	if !stop() {
		err = context.Cause(ctx)
	}
	if err == nil && string(said[:]) != life {
		err = errOtherLife
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// watch watches the processes of the given members, and no others, for their ends.
func (p *Peers) watch(members []string) {
	own := p.Member()
	members = slices.DeleteFunc(slices.Clone(members), func(m string) bool { _, life := addrOf(m); return m == own || life == "" })
	members = members[:min(len(members), mostWatched)]
	p.mu.Lock()
	defer p.mu.Unlock()
	for m, w := range p.lives {
		if !slices.Contains(members, m) && !w.ended {
			w.stop()
			delete(p.lives, m)
		}
	}
	for _, m := range members {
		if p.lives[m] != nil || p.closed {
			continue
		}
		w := &watchedLife{done: make(chan struct{})}
		var ctx context.Context
		ctx, w.stop = context.WithCancel(p.alive)
		p.lives[m] = w
		p.wg.Go(func() {
			defer close(w.done)
			defer w.stop()
			if p.awaitEnd(ctx, m) {
				p.mu.Lock()
				w.ended = true
				p.mu.Unlock()
			}
		})
	}
}

// awaitEnd blocks until a member's process or ctx has ended, and reports whether the process has.
func (p *Peers) awaitEnd(ctx context.Context, member string) bool {
	for ctx.Err() == nil {
		bounded, cancel := context.WithTimeout(ctx, helloTimeout)
		conn, err := p.greet(bounded, member)
		cancel()
		if err == nil {
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			_, err = io.ReadFull(conn, make([]byte, 1))
			conn.Close()
			if !stop() {
				return false
			}
			// With or without a goodbye, the other end's kernel has closed the connection. A reset,
			// in contrast, may come from a firewall.
			if err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return true
			}
		}
		if errors.Is(err, errOtherLife) {
			return true
		}
		_ = retry.Pause(ctx, retryPause)
	}
	return false
}

// evidence returns what is known about a member's process that could not be reached because of err.
func (p *Peers) evidence(member string, err error) replica.Evidence {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.lives[member]
	return replica.Evidence{Refused: isRefused(err), Ended: w != nil && w.ended, Replaced: errors.Is(err, errOtherLife)}
}

// isRefused reports whether a connection was refused: by the machine, because nobody listens, or by
// a firewall.
func isRefused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// lead makes this node the leader of the members' copies, which are a service of the given kind.
// own is this node's copy.
func (p *Peers) lead(ctx context.Context, own *replica.Node, copies kind, members []string) (*replica.Leader, replica.Copy, error) {
	return replica.Lead(ctx, replica.Config{
		Own: own, Addr: p.Member(), Evidence: p.evidence, Log: p.log,
		Dial: func(ctx context.Context, member string) (net.Conn, error) {
			addr, _ := addrOf(member)
			return p.dial(ctx, addr, copies.of(0))
		},
	}, members)
}

// namesOf returns the names of a round's members.
func namesOf(members []dynamic.Member) []string {
	names := make([]string, len(members))
	for i, m := range members {
		names[i] = m.Info
	}
	return names
}
