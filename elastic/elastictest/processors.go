package elastictest

import (
	"runtime"
	"sync"
)

// processors counts the workers of all jobs, so that each has a processor of Go's scheduler, as a
// process has. A rank that waits in a system call otherwise keeps one from the rank that it waits
// for, until the scheduler notices that: for up to 10 ms.
var processors struct {
	mu      sync.Mutex
	workers int
	before  int // GOMAXPROCS without workers
}

// addProcessor gives a worker a processor. The caller must call removeProcessor at its end.
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

// removeProcessor takes back all processors when the last worker has ended.
func removeProcessor() {
	p := &processors
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers--; p.workers == 0 {
		runtime.GOMAXPROCS(p.before)
	}
}
