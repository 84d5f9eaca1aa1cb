package client

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

// TestSilenceIsCountedInLooks: for a process that did not run for an hour, a stream is no more
// silent than before: it reads what the agent sent meanwhile before it gives the agent up.
func TestSilenceIsCountedInLooks(t *testing.T) {
	known := errors.New("the host is gone")
	s := newSession(
		New(Config{Lease: 10 * time.Second, Log: logrus.New()}),
		place{host: "a", there: func() error { return known }},
	)
	s.contact = time.Now().Add(-time.Hour)
	look := func(n int) (err error) {
		for range n {
			err = s.silent()
		}
		return err
	}
	const patient = looksPerBeat * 3 / 2
	if err := look(patient); err != nil {
		t.Errorf("after %d looks: %v", patient, err)
	}
	if _, err := s.hear(&agentpb.FromAgent{What: &agentpb.FromAgent_Beat{Beat: &agentpb.Beat{}}}); err != nil {
		t.Fatal(err)
	}
	if err := look(patient); err != nil {
		t.Errorf("%d looks after a beat: %v", patient, err)
	}
	if err := look(1); !errors.Is(err, known) {
		t.Errorf("one look more: %v", err)
	}
	known = nil
	if err := look(missedBeats*looksPerBeat - patient - 1); err != nil {
		t.Errorf("an agent that may be there: %v", err)
	}
	if err := look(1); err == nil || !strings.Contains(err.Error(), "the agent was silent for") {
		t.Errorf("one look more: %v", err)
	}
}

// TestBlackHole: a path that drops large packets still carries the first messages of each stream,
// so these do not show that the agent is alive. A second heartbeat or an event does.
func TestBlackHole(t *testing.T) {
	s := newSession(New(Config{Lease: 10 * time.Second, Log: logrus.New()}), place{host: "a", there: func() error { return nil }})
	s.heardFrom(&agentpb.Attached{})
	hear := func(m *agentpb.FromAgent) {
		t.Helper()
		if _, err := s.hear(m); err != nil {
			t.Fatal(err)
		}
	}
	beat := &agentpb.FromAgent{What: &agentpb.FromAgent_Beat{Beat: &agentpb.Beat{}}}
	broken := errors.New("the agent was silent for 3.25s")
	s.contact = time.Now().Add(-time.Minute)
	for range 3 {
		s.attachLimit()
		s.heardFrom(&agentpb.Attached{})
		hear(beat)
		if why, _ := s.hopeless(broken); why == nil || !strings.Contains(why.Error(), "large packets") {
			t.Fatalf("a stream that carries no more than its first messages: %v", why)
		}
	}
	hear(beat)
	if why, _ := s.hopeless(broken); why != nil {
		t.Errorf("after a second beat: %v", why)
	}
	s.contact = time.Now().Add(-time.Minute)
	s.heardFrom(&agentpb.Attached{})
	hear(&agentpb.FromAgent{Number: 1, What: &agentpb.FromAgent_Started{Started: &agentpb.Started{Incarnation: "x", Pid: 1}}})
	if why, _ := s.hopeless(broken); why != nil {
		t.Errorf("after an event: %v", why)
	}
}

// TestOneMachineByTwoNames: a warning is logged if two hosts are one machine, unless their names
// show it.
func TestOneMachineByTwoNames(t *testing.T) {
	var out strings.Builder
	log := logrus.New()
	log.SetOutput(&out)
	a := New(Config{Log: log})
	note := func(host, machine string) bool {
		out.Reset()
		a.noteMachine(&jobAgent{host: host, ready: Ready{Machine: machine}})
		return strings.Contains(out.String(), "are the same machine")
	}
	for _, c := range []struct {
		host, machine string
		said          bool
	}{
		{"node1", "x", false}, {"node2", "y", false}, {"node1", "x", false}, {"node1.example.org", "x", true},
		{"old", "", false}, {"older", "", false}, {"localhost", "z", false}, {"127.0.0.2", "z", false}, {"::1", "z", false},
	} {
		if said := note(c.host, c.machine); said != c.said {
			t.Errorf("%s on %q: %v: %s", c.host, c.machine, said, out.String())
		}
	}
	if m := Machine(); m == "" || m != Machine() {
		t.Errorf("this machine: %q", m)
	}
}

// TestTriesToAttach: attempts to attach take longer and longer while the agent is waited for, until
// one succeeds.
func TestTriesToAttach(t *testing.T) {
	s := newSession(New(Config{Lease: 10 * time.Second, Log: logrus.New()}), place{host: "a"})
	for i, want := range []time.Duration{2, 4, 8, 10, 10} {
		s.contact = time.Now().Add(time.Hour) // the lease has not begun
		if got := s.attachLimit(); got != want*time.Second {
			t.Errorf("try %d: %v, want %v s", i, got, int(want))
		}
	}
	s.heardFrom(&agentpb.Attached{})
	s.contact = time.Now().Add(time.Hour)
	if got := s.attachLimit(); got != attachTimeout {
		t.Errorf("after one that succeeded: %v", got)
	}
}

// TestFenceBeginsNothing: the fence of a session that no stream has reached only resumes: an agent
// that does not know the session does not begin it, and does not end a session that has begun
// since. A session that takes over ends what the previous driver left.
func TestFenceBeginsNothing(t *testing.T) {
	s := newSession(New(Config{Lease: 10 * time.Second, Log: logrus.New()}), place{host: "a"})
	if s.attach().GetResume() {
		t.Error("a new session resumes")
	}
	s.end = fenced
	if m := s.attach(); !m.GetResume() || m.GetTakeOver() {
		t.Errorf("the fence attaches with %v", m)
	}
	s.before = &predecessor{}
	if m := s.attach(); m.GetResume() || !m.GetTakeOver() {
		t.Errorf("the fence of what the driver before left attaches with %v", m)
	}
}
