// Package life is that of a worker which is no process but a goroutine: its environment, its
// signals and its death. Contexts carry it, so that a program's own functions can be such workers
// as they are.
package life

import (
	"context"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/rendezvous"
)

// Moment is where a worker is.
type Moment struct {
	Phase      rendezvous.Phase
	Commit     uint64 // the number of the commit that was begun last
	Committed  bool   // all ranks have made it just now
	Rank       int    // -1 before the first world
	Generation uint64
}

// Life is a worker's. Its methods may be called by many goroutines; those on a nil Life, which is a
// process's, do nothing.
type Life struct {
	// Lookup is its environment, as os.LookupEnv is a process's.
	Lookup func(name string) (string, bool)
	// Log takes what it logs.
	Log logrus.FieldLogger
	// Reached is called on the worker's goroutine wherever it comes to. It may block, and Kill the
	// worker.
	Reached func(Moment)

	mu      sync.Mutex
	over    bool
	entered bool
	cut     []func() // what ends all that others see of it, and does not block
	clean   []func() // what waits until nothing of it is left
	heeding []chan<- os.Signal
}

type key struct{}

// With returns a context that carries l.
func With(ctx context.Context, l *Life) context.Context { return context.WithValue(ctx, key{}, l) }

// From returns the life that a context carries; nil where there is none.
func From(ctx context.Context) *Life {
	l, _ := ctx.Value(key{}).(*Life)
	return l
}

// Enter says that the worker can be seen from now on, how that ends, and how its remains are waited
// for.
func (l *Life) Enter(cut, clean func()) {
	if l == nil {
		return
	}
	l.mu.Lock()
	over := l.over
	l.entered = true
	l.cut, l.clean = append(l.cut, cut), append(l.clean, clean)
	l.mu.Unlock()
	if over {
		cut()
	}
}

// Entered tells whether it ever could be seen.
func (l *Life) Entered() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entered
}

// Kill ends it at once: nothing of it is seen any more. It reports false where it was over already.
func (l *Life) Kill() bool {
	l.mu.Lock()
	was, cut := l.over, slices.Clone(l.cut)
	l.over = true
	l.mu.Unlock()
	if was {
		return false
	}
	for _, f := range cut {
		f()
	}
	return true
}

// Survive ends the calling goroutine where the life is over.
func (l *Life) Survive() {
	if l == nil {
		return
	}
	l.mu.Lock()
	over := l.over
	l.mu.Unlock()
	if over {
		runtime.Goexit()
	}
}

// Reach tells where the worker has come to, and ends the calling goroutine where its life is over.
func (l *Life) Reach(m Moment) {
	if l == nil {
		return
	}
	l.Survive()
	l.Reached(m)
	l.Survive()
}

// Clean waits until nothing of it is left, after a Kill and when its goroutine has ended.
func (l *Life) Clean() {
	l.mu.Lock()
	clean := slices.Clone(l.clean)
	l.mu.Unlock()
	for _, f := range clean {
		f()
	}
}

// Notify has SIGTERMs sent to c, as signal.Notify does.
func (l *Life) Notify(c chan<- os.Signal) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heeding = append(l.heeding, c)
}

// Stop undoes Notify.
func (l *Life) Stop(c chan<- os.Signal) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heeding = slices.DeleteFunc(l.heeding, func(h chan<- os.Signal) bool { return h == c })
}

// Terminate is a SIGTERM. It reports false where nobody heeds it, which is to kill.
func (l *Life) Terminate() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.heeding {
		select {
		case c <- syscall.SIGTERM:
		default:
		}
	}
	return len(l.heeding) > 0
}
