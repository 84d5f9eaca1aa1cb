// Package fakeproc simulates a process for a worker that runs as a goroutine: its environment, its
// signals and its death. With passes a Process in a context, so that unchanged functions of a
// program can run as such workers.
package fakeproc

import (
	"context"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
)

// Moment describes the progress of a worker.
type Moment struct {
	Phase      line.Phase
	Commit     uint64 // number of the last commit begun
	Committed  bool   // all ranks have just made it
	Rank       int    // -1 before the first world
	Generation uint64
}

// Process simulates the process of a worker that runs as a goroutine. Its methods are safe for
// concurrent use. On a nil Process, which a worker in a real process has, Enter, Survive and Reach
// do nothing.
type Process struct {
	// Lookup returns a variable of its environment, like os.LookupEnv.
	Lookup func(name string) (string, bool)
	// Log receives the worker's log.
	Log logrus.FieldLogger
	// Reached is called on the worker's goroutine at each Moment. It may block and may call Kill.
	Reached func(Moment)
	// Line is its end of the socket to its launcher.
	Line net.Conn
	// Network is the network on which the process listens and connects. The zero value is the
	// kernel's.
	Network identity.Network

	mu        sync.Mutex
	over      bool
	entered   bool
	cut       []func() // end what other workers can see, without blocking
	clean     []func() // wait for all goroutines of the worker
	signalled []chan<- os.Signal
}

type key struct{}

// With returns a context that carries p.
func With(ctx context.Context, p *Process) context.Context { return context.WithValue(ctx, key{}, p) }

// From returns the Process of a context, or nil.
func From(ctx context.Context) *Process {
	p, _ := ctx.Value(key{}).(*Process)
	return p
}

// Enter records that peers can see the worker. cut makes it invisible to them without blocking;
// clean waits for all goroutines of the worker.
func (p *Process) Enter(cut, clean func()) {
	if p == nil {
		return
	}
	p.mu.Lock()
	over := p.over
	p.entered = true
	p.cut, p.clean = append(p.cut, cut), append(p.clean, clean)
	p.mu.Unlock()
	if over {
		cut()
	}
}

// Entered reports whether Enter was called.
func (p *Process) Entered() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.entered
}

// Kill ends the worker at once: peers see that its process ends. It returns false if the worker was
// already killed.
func (p *Process) Kill() bool {
	p.mu.Lock()
	was, cut := p.over, slices.Clone(p.cut)
	p.over = true
	p.mu.Unlock()
	if was {
		return false
	}
	for _, f := range cut {
		f()
	}
	return true
}

// Survive ends the calling goroutine if the process was killed.
func (p *Process) Survive() {
	if p == nil {
		return
	}
	p.mu.Lock()
	over := p.over
	p.mu.Unlock()
	if over {
		runtime.Goexit()
	}
}

// Reach reports the worker's progress, and ends the calling goroutine if the process was killed.
func (p *Process) Reach(m Moment) {
	if p == nil {
		return
	}
	p.Survive()
	p.Reached(m)
	p.Survive()
}

// Clean waits for all goroutines of the worker. It must be called after Kill and after the worker's
// own goroutine has ended.
func (p *Process) Clean() {
	p.mu.Lock()
	clean := slices.Clone(p.clean)
	p.mu.Unlock()
	for _, f := range clean {
		f()
	}
}

// Notify makes SIGTERMs arrive on c, like signal.Notify.
func (p *Process) Notify(c chan<- os.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.signalled = append(p.signalled, c)
}

// Stop undoes Notify.
func (p *Process) Stop(c chan<- os.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.signalled = slices.DeleteFunc(p.signalled, func(h chan<- os.Signal) bool { return h == c })
}

// Terminate sends a SIGTERM. It returns false if no channel receives the signal; the caller then
// kills the worker.
func (p *Process) Terminate() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.signalled {
		select {
		case c <- syscall.SIGTERM:
		default:
		}
	}
	return len(p.signalled) > 0
}
