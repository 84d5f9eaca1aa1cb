package sockets

import (
	"context"
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// With more than fullMesh ranks, only some pairs are connected before Connect returns: those whose
// distance on the ring of all ranks is a power of two, in either direction. These are the near
// links. A rank of 300 has 18 of them instead of 299. They are the pairs of dissemination, of
// binomial trees and, if the number of ranks is a power of two, of doubling and halving. The other
// links, the far ones, are connected when an operation sends to the other rank or waits for it.
//
// A complete far link works like a near one. Before it is complete, it does not carry:
//
//   - Notices. A rank that learns of the end of the group notifies all ranks to which it is
//     connected, so all ranks learn of it after at most log2(n) such steps. If a rank fails without
//     a notice, its near ranks and the ranks that wait for it detect that.
//   - Goodbyes. An operation that would need a rank that has left fails on the near ranks of that
//     rank when they call it, and they notify the others. No data is lost, since a rank sends data
//     only over complete links.
const fullMesh = 32

// near reports whether two ranks at the given distance on the ring of size ranks are connected
// before Connect returns.
func (f *Generation) near(distance, size int) bool {
	if f.mesh != nil {
		return f.mesh(distance, size)
	}
	back := size - distance
	return size <= fullMesh || distance&(distance-1) == 0 || back&(back-1) == 0
}

// dials dials the connections of far links.
type dials struct {
	ctx         context.Context // ends with the group
	stop        context.CancelFunc
	slots       chan struct{} // has one element for each attempt in progress, up to the allowed number
	dialChannel func(ctx context.Context, peer, channel int)
}

// dial dials this rank's connections to a peer.
func (p *Path) dial(ctx context.Context, peer int, run func(func())) {
	for _, channel := range p.dialled(peer) {
		run(func() {
			select {
			case p.dials.slots <- struct{}{}:
			case <-ctx.Done():
				return
			}
			defer func() { <-p.dials.slots }()
			p.dials.dialChannel(ctx, peer, channel)
		})
	}
}

// Want starts to connect the link to a peer, unless it is connected or being connected. It does not
// block. The peer wants the link too as soon as it is reached, and dials its own channels.
func (p *Path) Want(peer int) {
	l := p.links[peer]
	if l.wanted.Load() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended || !l.wanted.CompareAndSwap(false, true) {
		return
	}
	p.dial(p.dials.ctx, peer, p.running.Go)
}

// takeFresh makes operations drive the far links that have become complete, and reports whether
// there were any. Only the operation in progress calls it.
func (p *Path) takeFresh() bool {
	p.mu.Lock()
	fresh := p.fresh
	p.fresh = nil
	p.hasFresh.Store(false)
	p.mu.Unlock()
	for _, l := range fresh {
		l.stopListening()
		p.mu.Lock()
		var err error
		if !p.released {
			err = l.drive()
		}
		p.mu.Unlock()
		if err != nil {
			p.group.Fail(frame.Gone(fmt.Errorf("collective: %w", err), p.Rank))
		}
		for l.wire.fd >= 0 && l.wire.unsent.Len() > 0 {
			l.carry(l.wire.unsent.Pop())
		}
	}
	return len(fresh) > 0
}

// connected returns the links over which something may have been sent or received.
func (p *Path) connected() []*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	var links []*link
	for _, l := range p.links {
		if l != nil && l.lacking == 0 {
			links = append(links, l)
		}
	}
	return links
}

// wakeOperation makes the operation in progress check its links. The caller holds p.mu.
func (p *Path) wakeOperation() {
	p.wake.Set()
	if p.sleeping.Load() {
		p.alert()
	}
}
