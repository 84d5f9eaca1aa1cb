package server

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/stacks"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// door opens the launcher's listener for its workers.
func (j *job) door() *Door {
	j.t.Helper()
	own, err := j.authority.Issue(identity.Subject{Role: identity.Agent, Host: "h"})
	if err != nil {
		j.t.Fatal(err)
	}
	d, err := OpenDoor(j.lines, identity.Network{}, "127.0.0.1:0", own)
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(d.Close)
	return d
}

// env returns the environment of a worker whose launcher listens at door.
func (j *job) env(inc, door string) plan.Worker {
	j.t.Helper()
	creds, err := j.authority.Issue(subject(inc, 0))
	if err != nil {
		j.t.Fatal(err)
	}
	j.driver().Admit(identity.Subject{Host: "h", Incarnation: inc})
	return plan.Worker{
		RunID: "run", Incarnation: inc, Slot: plan.Slot{SlotID: plan.SlotID{Host: "h"}, LocalSize: 1, CrossSize: 1},
		Size: 1, LauncherAddr: door, Credentials: creds.ForWorker().Encode(),
	}
}

// runs starts to serve a worker's process, and returns the process's end of the socket.
func (j *job) runs(env plan.Worker) net.Conn {
	near, far := net.Pipe()
	talk := j.lines.Talk(env.Environ())
	var talking sync.WaitGroup
	talking.Go(func() {
		cleanup := talk(context.Background(), os.Getpid(), far)
		far.Close()
		if cleanup != nil {
			cleanup()
		}
	})
	j.t.Cleanup(func() {
		near.Close()
		talking.Wait()
	})
	return near
}

func (j *job) client(cfg line.ClientConfig) *line.Client {
	j.t.Helper()
	c, err := line.NewClient(cfg)
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { c.Close() })
	return c
}

// TestClient: a worker of package elastic moves from world to world, over its socket or through the
// launcher's listener.
func TestClient(t *testing.T) {
	for _, byDoor := range []bool{false, true} {
		j := newJob(t)
		env := j.env("a", j.door().Addr())
		socket := j.runs(env)
		cfg := line.ClientConfig{Worker: env, Socket: socket}
		if byDoor {
			cfg.Socket = nil
		}
		c := j.client(cfg)
		if w, err := c.Look(t.Context()); err != nil || w.Generation != 0 {
			t.Errorf("%+v, %v", w, err)
		}
		go func() {
			if r := <-j.joins; r.Commits != 3 {
				t.Errorf("%+v", r)
			}
			j.publish(4, "a", "b")
		}()
		p, err := c.Join(t.Context(), line.Joining{Commits: 3, Cause: strings.Repeat("x", 1<<20)})
		if err != nil || p.Generation != 4 || p.Size != 2 || p.Rank != 0 {
			t.Fatalf("%+v, %v", p, err)
		}
		if w, err := p.World(); err != nil || w.DataAddrs()[1][0] != "b:1" {
			t.Errorf("%+v, %v", w, err)
		}
		for c.Latest().Seq != 8 {
			_, more := c.Loss()
			j.push.Push([]string{"a"}, notify.Update{Seq: 8, Generation: 4})
			<-more
		}
		j.push.PushLoss([]string{"a"}, notify.Loss{Generation: 4, Ranks: []int{1}})
		for l, more := c.Loss(); l.Generation != 4; l, more = c.Loss() {
			<-more
		}
		if err := errors.Join(c.Report(t.Context(), line.Committed, 4, 7), c.ReportFailure(t.Context(), "bad")); err != nil {
			t.Error(err)
		}
		if r := <-j.reports; r != (reported{"a", line.Committed, 4, 7}) {
			t.Errorf("%+v", r)
		}
		if text := <-j.failures; text != "a: bad" {
			t.Error(text)
		}
		if err := c.Beat(t.Context(), line.Beat{Generation: 4, Phase: line.Training}); err != nil {
			t.Error(err)
		}
		if b := <-j.beats; b.Phase != line.Training || b.Generation != 4 {
			t.Errorf("%+v", b)
		}
		j.lines.Tell([]string{"a"}, nil, []byte(`{"is":"stacks","id":3,"most_bytes":65536}`), nil)
		s := <-j.located
		if w, err := stacks.Parse(s.Worker); err != nil || len(w.Goroutines) == 0 {
			t.Errorf("%s, %v", s.Worker, err)
		}
		if !c.Connected(t.Context()) {
			t.Error("the driver is there")
		}
		j.end()
		if c.Connected(t.Context()) {
			t.Error("the driver is gone")
		}
		c.Kill()
		if _, err := c.Join(t.Context(), line.Joining{After: 4}); err == nil {
			t.Error("a client that was killed has joined")
		}
	}
}

// TestWorldsOfClient: a client that has the members of a world gets the next world as a difference.
func TestWorldsOfClient(t *testing.T) {
	j := newJob(t)
	env := j.env("a", "127.0.0.1:1")
	c := j.client(line.ClientConfig{Worker: env, Socket: j.runs(env)})
	many := []string{"a"}
	for i := range 50 {
		many = append(many, "b"+string(rune('a'+i)))
	}
	for g := range uint64(30) {
		go func() {
			<-j.joins
			j.publish(g+1, many[:len(many)-int(g)]...)
		}()
		p, err := c.Join(t.Context(), line.Joining{After: g})
		if err != nil {
			t.Fatal(err)
		}
		if w, err := p.World(); err != nil || w.Size() != len(many)-int(g) || w.DataAddrs()[w.Size()-1][0] != many[w.Size()-1]+":1" {
			t.Fatalf("generation %d: %+v, %v", g+1, w, err)
		}
	}
}

// TestWidenOfClient: a client that listens only on loopback opens other addresses, once.
func TestWidenOfClient(t *testing.T) {
	j := newJob(t)
	env := j.env("a", "127.0.0.1:1")
	c := j.client(line.ClientConfig{Worker: env, Socket: j.runs(env), Widen: func() ([]string, error) { return []string{"10.0.0.1:5"}, nil }})
	j.driver().Widen()
	go func() {
		if r := <-j.joins; len(r.DataAddrs) != 1 || r.DataAddrs[0] != "10.0.0.1:5" || r.CanWiden {
			t.Errorf("%+v", r)
		}
		j.driver().Dismiss("a", line.ErrLast)
	}()
	if _, err := c.Join(t.Context(), line.Joining{DataAddrs: []string{"127.0.0.1:5"}}); !errors.Is(err, line.ErrLast) {
		t.Error(err)
	}
}

// TestUnreachable: the error reports that the launcher is gone, or why it refused the client.
func TestUnreachable(t *testing.T) {
	j := newJob(t)
	c := j.client(line.ClientConfig{Worker: j.env("a", "127.0.0.1:1"), Patience: time.Nanosecond})
	if _, err := c.Join(t.Context(), line.Joining{}); err == nil || !strings.Contains(err.Error(), "at 127.0.0.1:1, could not be reached") {
		t.Error(err)
	}
	stranger := j.client(line.ClientConfig{Worker: j.env("nobody", j.door().Addr())})
	if err := stranger.Report(t.Context(), line.Done, 1, 1); err == nil || !strings.Contains(err.Error(), "the worker does not run") {
		t.Error(err)
	}
}

// TestStrangers: a process without a certificate of a worker of the job gets no answer at the
// launcher's listener.
func TestStrangers(t *testing.T) {
	j, other := newJob(t), newJob(t)
	at := j.door().Addr()
	env := j.env("a", at)
	j.runs(env)
	foreign, err := other.authority.Issue(subject("a", 0))
	if err != nil {
		t.Fatal(err)
	}
	agent, err := j.authority.Issue(identity.Subject{Role: identity.Agent, Host: "h"})
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]*tls.Config{
		"none": {InsecureSkipVerify: true}, //nolint:gosec // a stranger's
		"another job": func() *tls.Config {
			c := foreign.ClientTLS(identity.Subject{Role: identity.Agent})
			c.InsecureSkipVerify, c.VerifyConnection = true, nil
			return c
		}(),
		"an agent": agent.ClientTLS(identity.Subject{Role: identity.Agent}),
	} {
		cfg.NextProtos = []string{line.Protocol}
		conn, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		secured := tls.Client(conn, cfg)
		_, _ = secured.Write([]byte(`{"do":"hello","version":1}` + "\n"))
		_ = conn.SetReadDeadline(sandbox.Limit())
		if text, err := io.ReadAll(secured); len(text) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %q, %v", name, text, err)
		}
		conn.Close()
	}
}

// TestTicketOfNobody: a worker's certificate without a ticket, or with a ticket that no running
// worker has, does not make a process one of the running workers.
func TestTicketOfNobody(t *testing.T) {
	j := newJob(t)
	at := j.door().Addr()
	j.runs(j.env("a", at))
	bare := j.env("b", at) // its credentials have no ticket
	all, err := j.authority.Issue(identity.Subject{Role: identity.Worker})
	if err != nil {
		t.Fatal(err)
	}
	bare.Credentials = all.Encode()
	j.runs(bare)
	for name, say := range map[string][]byte{"none": make([]byte, 32), "another": identity.TicketOf(all.ForWorker().Encode())} {
		conn, err := all.Dial(t.Context(), identity.Subject{Role: identity.Agent}, at, line.Protocol)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(append(say, `{"do":"hello","version":1,"full":true}`+"\n"...))
		_ = conn.SetReadDeadline(sandbox.Limit())
		if text, err := io.ReadAll(conn); !strings.Contains(string(text), "the worker does not run") {
			t.Errorf("%s: %q, %v", name, text, err)
		}
		conn.Close()
	}
}

// TestTicketOfEnded: the ticket of a worker that has ended is refused at the launcher's listener:
// with it a process neither counts as a worker nor reaches the driver.
func TestTicketOfEnded(t *testing.T) {
	j := newJob(t)
	env := j.env("a", j.door().Addr())
	socket, far := net.Pipe()
	talk := j.lines.Talk(env.Environ())
	var talking sync.WaitGroup
	talking.Go(func() { talk(t.Context(), os.Getpid(), far)() })
	creds, err := identity.Decode(env.Credentials)
	if err != nil {
		t.Fatal(err)
	}
	dial := func(protocol string) net.Conn {
		t.Helper()
		conn, err := creds.DialDoor(t.Context(), env.LauncherAddr, protocol)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_ = conn.SetReadDeadline(sandbox.Limit())
		return conn
	}
	hello := func() string {
		t.Helper()
		conn := dial(line.Protocol)
		defer conn.Close()
		if _, err := conn.Write([]byte(`{"do":"hello","version":1,"full":true}` + "\n")); err != nil {
			t.Fatal(err)
		}
		text, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	if text := hello(); strings.Contains(text, "error") {
		t.Fatalf("while the worker runs: %q", text)
	}
	socket.Close()
	talking.Wait()
	if text := hello(); !strings.Contains(text, "the worker does not run") {
		t.Errorf("%q", text)
	}
	for _, protocol := range []string{line.TasksProtocol, line.StoreProtocol} {
		if text, err := io.ReadAll(dial(protocol)); len(text) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %q, %v", protocol, text, err)
		}
	}
}

// TestEarlyAtDoor: a worker's process can open a line at the door before its launcher knows that it
// runs, and is answered then. It is refused if it could not be started.
func TestEarlyAtDoor(t *testing.T) {
	for _, starts := range []bool{true, false} {
		j := newJob(t)
		env := j.env("a", j.door().Addr())
		talk := j.lines.Talk(env.Environ())
		creds, err := identity.Decode(env.Credentials)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := creds.DialDoor(t.Context(), env.LauncherAddr, line.Protocol)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte(`{"do":"hello","version":1,"full":true}` + "\n")); err != nil {
			t.Fatal(err)
		}
		socket, far := net.Pipe()
		var talking sync.WaitGroup
		if starts {
			talking.Go(func() { talk(t.Context(), os.Getpid(), far)() })
		} else {
			j.lines.Forget("a")
		}
		_ = conn.SetReadDeadline(sandbox.Limit())
		text, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || strings.Contains(text, "the worker does not run") == starts {
			t.Errorf("it starts: %v; the answer is %q, %v", starts, text, err)
		}
		socket.Close()
		talking.Wait()
	}
}

// TestFloodOfDoor: processes of the host that connect and send nothing use no more descriptors than
// permitted, and a proven worker stays connected.
func TestFloodOfDoor(t *testing.T) {
	j := newJob(t)
	d := j.door()
	env := j.env("a", d.Addr())
	j.runs(env)
	c := j.client(line.ClientConfig{Worker: env})
	look := func() {
		t.Helper()
		if _, err := c.Look(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	look()
	var strangers []net.Conn
	for range 2*identity.Door.Unproven + 100 {
		conn, err := net.Dial("tcp", d.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		strangers = append(strangers, conn)
		if n := d.ln.Unproven(); n > identity.Door.Unproven {
			t.Fatalf("%d connections are unproven", n)
		}
	}
	for _, conn := range strangers[:100] {
		_ = conn.SetReadDeadline(sandbox.Limit())
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("a stranger that came first stays")
		}
	}
	look()
}
