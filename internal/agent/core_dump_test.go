package agent

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/launch"
)

// wedged is a launcher whose workers dump their cores and cannot be killed.
type wedged struct{ told chan struct{} }

func (w wedged) Run(_ context.Context, s *launch.Spec, started func(int)) error {
	started(1 << 30)
	s.Dying("was killed by signal 6 (aborted) and dumps its core", 0)
	<-w.told
	return &launch.UnkillableError{PID: 1 << 30, After: 10 * time.Second, State: "D"}
}

// TestDyingAndUnkillable: a driver learns that a worker is dying while its process still exists,
// and that a worker cannot be killed.
func TestDyingAndUnkillable(t *testing.T) {
	h := newHost(t, 1)
	w := wedged{make(chan struct{})}
	h.launcher = w
	l := agents(t, driverOf(t, "wedged"), h.addr, longLease)
	s, _ := script(t, 0, "")
	what := ""
	s.Dying = func(text string, _ syscall.Signal) { what = text; close(w.told) }
	err := l.Run(t.Context(), s, nil)
	var stuck *launch.UnkillableError
	if !errors.As(err, &stuck) || *stuck != (launch.UnkillableError{PID: 1 << 30, After: 10 * time.Second, State: "D"}) {
		t.Errorf("Run returned %v", err)
	}
	if what != "was killed by signal 6 (aborted) and dumps its core" {
		t.Errorf("it was told %q", what)
	}
}

// doomed is a launcher whose workers are killed once a look at them is requested.
type doomed struct{ told chan struct{} }

func (d doomed) Run(_ context.Context, s *launch.Spec, started func(int)) error {
	started(1 << 30)
	<-s.Look
	s.Dying("was killed by signal 9 (killed)", syscall.SIGKILL)
	<-d.told
	return &launch.ExitError{Code: 137, Signal: syscall.SIGKILL}
}

// TestLook: a driver can ask whether a worker is being killed, and learns it before the process has
// ended.
func TestLook(t *testing.T) {
	h := newHost(t, 1)
	d := doomed{make(chan struct{})}
	h.launcher = d
	l := agents(t, driverOf(t, "doomed"), h.addr, longLease)
	s, _ := script(t, 0, "")
	look := make(chan struct{}, 1)
	s.Look = look
	var by syscall.Signal
	s.Dying = func(_ string, signal syscall.Signal) { by = signal; close(d.told) }
	err := l.Run(t.Context(), s, func(int) { look <- struct{}{} })
	var exit *launch.ExitError
	if !errors.As(err, &exit) || exit.Signal != syscall.SIGKILL || by != syscall.SIGKILL {
		t.Errorf("Run returned %v, and it was told of signal %d", err, by)
	}
}

// TestEvictedIsNotDying: a worker that its agent has asked to end, and then kills, has left; only
// its end is reported.
func TestEvictedIsNotDying(t *testing.T) {
	for _, evicted := range []bool{false, true} {
		s := &session{srv: newServer("a", 1, quiet()), log: quiet()}
		w := &worker{s: s, incarnation: "i", evicted: evicted}
		w.dying("was killed by signal 9 (killed)", syscall.SIGKILL)
		if told := len(s.events) > 0; told == evicted {
			t.Errorf("evicted %v: told %v", evicted, told)
		}
	}
}

// TestGraceIsWithinTheLease: the lease is the time until workers are gone, including their grace.
func TestGraceIsWithinTheLease(t *testing.T) {
	for _, c := range []struct{ lease, grace, want time.Duration }{
		{10 * time.Minute, 30 * time.Second, 30 * time.Second}, {4 * time.Second, 30 * time.Second, 2 * time.Second}, {time.Second, 0, 0},
	} {
		s := &session{lease: c.lease, workers: map[string]*worker{"a": {grace: c.grace}, "over": {grace: time.Hour, over: true}}}
		s.srv, s.contact = newServer("a", 1, quiet()), time.Now()
		if next := s.checkLease(); next > c.lease/2 || s.why != nil {
			t.Errorf("lease %v: the next look comes after %v, too late for the grace of workers that come meanwhile", c.lease, next)
		}
		if got := s.lead(); got != c.want {
			t.Errorf("lease %v, grace %v: workers are asked %v before its end, want %v", c.lease, c.grace, got, c.want)
		}
	}
}
