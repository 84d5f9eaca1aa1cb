package sockets

import (
	"errors"
	"runtime"

	"golang.org/x/sys/unix"
)

// This file is for tests of whole groups: they observe connections, and disturb them.

// Unproven returns the number of connections that wait for newer generations, or are being proven.
func (e *Endpoint) Unproven() int { return e.listener.Unproven() }

// Narrow limits the number of unproven connections of e, and the number of connections that wait
// for a group.
func (e *Endpoint) Narrow(most int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.forcedBound = most
	e.grow()
}

// Sparse makes the groups that e connects from now on have the fewest near links: a ring.
func (e *Endpoint) Sparse() {
	e.mesh = func(distance, size int) bool { return distance == 1 || distance == size-1 }
}

// Railed makes e connect to peers on other hosts as if there were the given number of routes of
// equal speed.
func (e *Endpoint) Railed(rails int) { e.forcedRails = rails }

// Occupy claims a channel from a rank in the newest group of all ranks, as soon as that exists,
// until free is called.
func (e *Endpoint) Occupy(from, channel int) (free func()) {
	for {
		e.mu.Lock()
		f := e.current
		e.mu.Unlock()
		if f == nil {
			runtime.Gosched()
			continue
		}
		path, _ := f.groups.Path(0)
		if !path.claim(from, channel) {
			panic("the place is taken")
		}
		return func() { path.unclaim(from, channel) }
	}
}

// ShareFrom makes the connections of data channels share frames from least bytes on.
func (p *Path) ShareFrom(least int) {
	for _, l := range p.links {
		if l != nil {
			l.wire.shareFrom = least
		}
	}
}

// Sockets calls each with the descriptor of every existing connection of the data channel to a
// peer; the first has index 0.
func (p *Path) Sockets(peer int, each func(index, fd int) error) (err error) {
	l := p.links[peer]
	if l.data == nil {
		return nil
	}
	if l.data.undriven() {
		fd, failed := l.data.duplicate()
		return errors.Join(failed, each(0, fd), unix.Close(fd))
	}
	err = each(0, l.wire.fd)
	for i := range l.wire.more {
		err = errors.Join(err, each(i+1, l.wire.more[i].fd))
	}
	return err
}

// Rails returns the number of existing connections of the data channel to a peer.
func (p *Path) Rails(peer int) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.links[peer]
	for _, c := range append([]*conn{l.data}, l.more...) {
		if c != nil {
			n++
		}
	}
	return n
}

// Connected returns the number of ranks to which this one is connected.
func (p *Path) Connected() int { return len(p.connected()) }
