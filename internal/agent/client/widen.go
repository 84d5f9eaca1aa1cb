package client

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// widening is where the driver listens: for workers of this machine near, and for those of others
// far, which is 0 as long as there are none.
type widening struct {
	near, far atomic.Int64
	widens    atomic.Bool // the driver listens for other machines when it is asked to

	mu     sync.Mutex
	open   func() (port int, err error) // nil: the driver has not begun
	wanted bool
	opened bool
}

// Widen implements launch.Widener.
func (a *Agents) Widen(open func() (port int, err error)) {
	if a.cfg.Listen.IsValid() {
		return // the driver listens there, for all
	}
	a.wide.mu.Lock()
	a.wide.open = open
	a.wide.widens.Store(true)
	wanted := a.wide.wanted
	a.wide.mu.Unlock()
	if wanted {
		if err := a.widen(); err != nil {
			a.cfg.Log.Errorf("agent: workers on other machines do not reach the driver: %v", err)
		}
	}
}

// widen makes the driver listen for other machines, or notes that it has to once it begins.
func (a *Agents) widen() error {
	if a.cfg.Listen.IsValid() {
		if a.cfg.Listen.IsLoopback() {
			return fmt.Errorf("it is not this machine, and cannot reach the driver: --listen is %v, a loopback address; "+
				"name another, or leave --listen out", a.cfg.Listen)
		}
		return nil
	}
	w := &a.wide
	w.mu.Lock()
	w.wanted = true
	if w.open == nil || w.opened {
		w.mu.Unlock()
		return nil
	}
	port, err := w.open()
	if err == nil {
		w.opened = true
		w.far.Store(int64(port))
	}
	w.mu.Unlock()
	if err == nil {
		a.tell()
	}
	return err
}

// driverPort returns the port at which the agent's workers reach the driver; 0: it does not listen
// yet.
func (s *session) driverPort() int64 {
	if s.away && s.a.wide.widens.Load() {
		return s.a.wide.far.Load()
	}
	return s.a.wide.near.Load()
}
