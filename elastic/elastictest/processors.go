package elastictest

import (
	"runtime"
	"sync"
)

// processors counts the workers of all jobs, so that each has a P (a processor of Go's scheduler),
// as a process has. Otherwise a rank that waits in a system call keeps its P from the rank for
// which it waits, until the scheduler notices that, after up to 10 ms.
var processors struct {
	mu      sync.Mutex
	workers int
	before  int // GOMAXPROCS without workers
}

// addProcessor adds a P for a worker. The caller must call removeProcessor when the worker ends.
func addProcessor() {
	p := &processors
	p.mu.Lock()
	defer p.mu.Unlock()
	now := runtime.GOMAXPROCS(0)
	if p.workers == 0 {
		p.before = now
	}
	p.workers++
	if p.workers >= now {
		runtime.GOMAXPROCS(p.workers + 1)
	}
}

// removeProcessor removes all added Ps when the last worker has ended.
func removeProcessor() {
	p := &processors
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers--; p.workers == 0 {
		runtime.GOMAXPROCS(p.before)
	}
}
