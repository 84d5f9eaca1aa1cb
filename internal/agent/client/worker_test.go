package client

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// killedDriver dies at a write, or when it records that the write was done.
type killedDriver struct {
	bytes.Buffer
	left int // deeds
}

type killed struct{}

func (k *killedDriver) deed() {
	if k.left--; k.left < 0 {
		panic(killed{})
	}
}

func (k *killedDriver) Write(p []byte) (int, error) {
	k.deed()
	return k.Buffer.Write(p)
}

// TestNoLineIsLostWithTheDriver: wherever a driver dies while it passes on output, the next one
// omits no line, and repeats at most the one line that was written and not recorded.
func TestNoLineIsLostWithTheDriver(t *testing.T) {
	const text = "one\ntwo\r\nthree\nfo" // the rest of the fourth comes later
	const rest = "ur\nfive\n\nsix"
	want := strings.SplitAfter(text+rest, "\n")
	for deeds := range 100 {
		k := &killedDriver{left: deeds}
		var told uint64
		var held []byte
		play := func() (dead bool) {
			defer func() {
				if r := recover(); r != nil {
					_, dead = r.(killed)
					if !dead {
						panic(r)
					}
				}
			}()
			line, _ := (&launch.Output{Stdout: k}).Worker(nil)
			line.Hold(held)
			spec := &launch.Spec{PassedBefore: told}
			spec.Passed = func(at uint64) {
				k.deed()
				told, held = at, append([]byte(nil), line.Held()...)
			}
			var w io.Writer = line
			passOn(spec, &w, []byte(text), 0)
			passOn(spec, &w, []byte(rest), uint64(len(text)))
			return line.Close() != nil
		}
		if !play() {
			return // it has been killed at every point
		}
		k.left = 1000
		if play() {
			t.Fatalf("deed %d: the second driver died too", deeds)
		}
		got := strings.SplitAfter(k.String(), "\n")
		for i := 1; i < len(got); i++ { // the one that can be there twice
			if len(got) > len(want) && got[i] == got[i-1] {
				got = append(got[:i], got[i+1:]...)
			}
		}
		if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
			t.Errorf("deed %d: %q; want %q", deeds, got, want)
		}
	}
	t.Fatal("it never ended")
}

// TestEndBehindBlockedOutput: an end is reported even if nobody reads the output before it, and
// even if start, output and end arrived before any of them was handled.
func TestEndBehindBlockedOutput(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	s := newSession(New(Config{Log: log}), place{host: "a", addr: "127.0.0.1:1"})
	unread, stdout := io.Pipe()
	ended := make(chan error, 1)
	spec := &launch.Spec{
		Incarnation: "i", Slot: plan.SlotID{Host: "a"}, Command: []string{"c"}, Stdout: stdout,
		Ended: func(err error) { ended <- err },
	}
	w, err := newWorker(spec)
	if err != nil || !s.add(w) {
		t.Fatal(err)
	}
	for i, m := range []*agentpb.FromAgent{
		{What: &agentpb.FromAgent_Started{Started: &agentpb.Started{Incarnation: "i", Pid: 7}}},
		{What: &agentpb.FromAgent_Output{Output: &agentpb.Output{Incarnation: "i", Stream: 1, Text: []byte("unread")}}},
		{What: &agentpb.FromAgent_Exited{Exited: &agentpb.Exited{Incarnation: "i", Signal: 9}}},
	} {
		m.Number = uint64(i + 1)
		if _, err := s.hear(m); err != nil {
			t.Fatal(err)
		}
	}
	handled := make(chan error)
	go func() {
		over, err := s.handle(t.Context(), w, func(int) {})
		if !over {
			err = fmt.Errorf("the worker is not over: %w", err)
		}
		handled <- err
	}()
	for _, end := range []func() error{
		func() error { return <-ended },
		func() error { unread.Close(); return <-handled },
	} {
		exit, ok := errors.AsType[*launch.ExitError](end())
		if !ok || exit.Signal != syscall.SIGKILL {
			t.Errorf("%v", exit)
		}
	}
}

// withWorker returns a session without a stream that is to start one worker, i.
func withWorker(t *testing.T) (*session, *worker) {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	s := newSession(New(Config{Log: log}), place{host: "a", addr: "127.0.0.1:1"})
	w, err := newWorker(&launch.Spec{Incarnation: "i", Slot: plan.SlotID{Host: "a"}, Command: []string{"c"}})
	if err != nil || !s.add(w) {
		t.Fatal(err)
	}
	return s, w
}

// TestLookIsAskedOnce: the agent is asked once for each look.
func TestLookIsAskedOnce(t *testing.T) {
	s, w := withWorker(t)
	w.everSent, w.known = true, true
	s.request(func() { w.look = true })
	asked := 0
	for range 2 {
		messages, _ := s.due(false)
		for _, m := range messages {
			if m.GetLook().GetIncarnation() == "i" {
				asked++
			}
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
}

// TestRecordsFirst: the agent learns of a journal's records before it starts the worker that they
// led to.
func TestRecordsFirst(t *testing.T) {
	s, _ := withWorker(t)
	s.a.Noted(time.Unix(0, 7))
	messages, _ := s.due(false)
	if len(messages) != 2 || messages[0].GetBeat().GetNoted() != 7 || messages[1].GetStart().GetIncarnation() != "i" {
		t.Errorf("it is sent %v, want a beat, then the start", messages)
	}
}

// TestLargeEnvironments: environments are accepted up to the limit of Linux; for a larger one the
// error contains the remedy.
func TestLargeEnvironments(t *testing.T) {
	for size, fits := range map[int]bool{1 << 20: true, 2 << 20: true, 6<<20 - 4096: true, 7 << 20: false} {
		spec := &launch.Spec{Incarnation: "i", Command: []string{"/bin/true"}, Env: []string{"A=" + strings.Repeat("x", size)}}
		w, err := newWorker(spec)
		if (err == nil) != fits || err != nil && !strings.Contains(err.Error(), "enableServiceLinks") {
			t.Errorf("%d bytes: %v", size, err)
		}
		if err == nil && proto.Size(w.start) > wire.MaxStart {
			t.Errorf("%d bytes make a message of %d", size, proto.Size(w.start))
		}
	}
}
