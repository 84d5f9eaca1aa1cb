package driver

import (
	"fmt"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/job"
)

// remind logs the late workers, with what is known about each, in one line.
func (l *loop) remind(a decide.Remind) {
	if a.Limit != "" {
		l.stalls.await(l.clock.now(), ids(a.Late))
	}
	names := make([]string, 0, decide.MostNamed+1)
	for _, w := range a.Late[:min(len(a.Late), decide.MostNamed)] {
		name := w.String()
		if what := l.stalls.what(l.clock.now(), w.ID()); what != "" {
			name += " is " + what
		}
		names = append(names, name)
	}
	if more := len(a.Late) - decide.MostNamed; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	most := ""
	if a.Limit != "" {
		most = fmt.Sprintf(", %v at most (%s),", job.Round(a.Left), a.Limit)
	}
	l.cfg.Log.Warnf("still waiting%s for workers to %s: %s", most, a.To, strings.Join(names, "; "))
}

// watchStalls evaluates the workers' heartbeats until done is closed.
func (l *loop) watchStalls(done <-chan struct{}) {
	ticker := time.NewTicker(l.stalls.pause())
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-done:
			return
		}
		for _, in := range l.stalls.look(l.clock.now()) {
			l.post(in)
			l.locate.report(in)
		}
		for _, short := range l.stalls.shortages() {
			l.cfg.Log.Warn(short)
		}
		l.handTraces(false)
	}
}
