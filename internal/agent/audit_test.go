package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// recorded collects the records of a host's log, as JSON.
type recorded struct {
	mu    sync.Mutex
	buf   bytes.Buffer
	wrote wake.Flag
}

func (r *recorded) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wrote.Set()
	return r.buf.Write(b)
}

// await waits for the first record for which wanted returns true, and returns it.
func (r *recorded) await(t *testing.T, wanted func(audit.Record) bool) audit.Record {
	t.Helper()
	limit := sandbox.Expired()
	for {
		r.mu.Lock()
		text := r.buf.String()
		r.mu.Unlock()
		for line := range strings.Lines(text) {
			var entry struct{ Audit *audit.Record }
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			if entry.Audit != nil && wanted(*entry.Audit) {
				return *entry.Audit
			}
		}
		select {
		case <-r.wrote:
		case <-limit:
			t.Fatalf("there is no such record in\n%s", text)
		}
	}
}

// newRecordedHost is like newHost, with a log that the test can read.
func newRecordedHost(t *testing.T) (*host, *recorded) {
	t.Helper()
	r := &recorded{wrote: wake.New()}
	log := logrus.New()
	log.SetOutput(r)
	log.SetFormatter(&logrus.JSONFormatter{})
	h := newHost(t, 2)
	h.log, h.audit = log, newRecorder(log, logrus.InfoLevel)
	h.inspect = Facts{}.inspector(nil)
	return h, r
}

// asked are the requests that a driver can send to an agent, by the names of methods and of the
// kinds of messages in a session. Nil: the request has no effect.
var asked = map[protoreflect.Name]func(*driver){
	"attach": func(d *driver) { d.say(attach()) },
	"start": func(d *driver) {
		d.say(&agentpb.ToAgent{What: &agentpb.ToAgent_Start{Start: &agentpb.Start{
			Incarnation: "i", Slot: 1, Command: [][]byte{[]byte("/bin/sh"), []byte("-c"), []byte("exec sleep 600"), []byte("hush")},
			Environment: [][]byte{[]byte("SECRET=hush")}, Directory: []byte("/"), GraceMs: 10,
		}}})
	},
	"signal": func(d *driver) {
		d.say(&agentpb.ToAgent{What: &agentpb.ToAgent_Signal{Signal: &agentpb.Signal{Incarnation: "i", Signal: uint32(syscall.SIGUSR1)}}})
	},
	"stop": func(d *driver) {
		d.say(&agentpb.ToAgent{What: &agentpb.ToAgent_Stop{Stop: &agentpb.Stop{Incarnation: "i", Now: true}}})
	},
	"end":   func(d *driver) { d.say(&agentpb.ToAgent{What: &agentpb.ToAgent_End{End: &agentpb.End{Now: true}}}) },
	"taken": nil,
	"beat":  nil,
	"look":  nil,
	"tell":  nil,
	"Inspect": func(d *driver) {
		if _, err := d.Inspect(d.t.Context(), &agentpb.InspectRequest{}); err != nil {
			d.t.Error(err)
		}
	},
	"Probe": func(d *driver) {
		if _, err := d.Probe(d.t.Context(), &agentpb.ProbeRequest{Incarnation: "nobody"}); status.Code(err) != codes.NotFound {
			d.t.Error(err)
		}
	},
	"Session": nil, // its messages are recorded
}

// driver is a driver that can send any message.
type driver struct {
	agentpb.AgentClient
	t      *testing.T
	stream grpc.BidiStreamingClient[agentpb.ToAgent, agentpb.FromAgent]
}

func (d *driver) say(m *agentpb.ToAgent) {
	if err := d.stream.Send(m); err != nil {
		d.t.Error(err)
	}
}

func newDriver(t *testing.T, h *host, who identity.Subject) *driver {
	t.Helper()
	conn, err := wire.NewClient(h.addr, credentials(t, testKey, "blue", who).ClientTLS(identity.Subject{Role: identity.Agent, Host: "a"}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	d := &driver{AgentClient: agentpb.NewAgentClient(conn), t: t}
	if d.stream, err = d.Session(ctx); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestCallsAreRecorded: each method of the agent's service, and each kind of message in a session,
// leaves a record that names the driver by its certificate, or is on the list of calls without
// effect. No record contains arguments or environments.
func TestCallsAreRecorded(t *testing.T) {
	h, log := newRecordedHost(t)
	who := identity.Subject{RunID: "audited", Role: identity.Driver, User: "alice", UID: "1000"}
	if _, err := client.Reach(t.Context(), credentials(t, testKey, "blue", who), "a", []string{h.addr}); err != nil {
		t.Fatal(err)
	}
	d := newDriver(t, h, who)
	var names []protoreflect.Name
	kinds := (&agentpb.ToAgent{}).ProtoReflect().Descriptor().Oneofs().ByName("what").Fields()
	for i := range kinds.Len() {
		names = append(names, kinds.Get(i).Name()) // in the order of the file, which is a valid order to send them
	}
	methods := agentpb.File_agent_proto.Services().ByName("Agent").Methods()
	for i := range methods.Len() {
		names = append(names, methods.Get(i).Name())
	}
	for _, name := range names {
		ask, known := asked[name]
		if !known {
			t.Errorf("%s has no record, and is not on the list of calls that ask for nothing", name)
		}
		if ask == nil {
			continue
		}
		ask(d)
		r := log.await(t, func(r audit.Record) bool { return r.What == strings.ToLower(string(name)) })
		by := r.Who
		if by.Role != "driver" || by.Run != who.RunID || by.User != who.User || by.UID != who.UID || by.Serial == "" || by.From != "127.0.0.1" ||
			r.Host != "a" || r.Outcome != audit.Done && name != "Probe" || r.Time.IsZero() {
			t.Errorf("%s: %v", name, r)
		}
		if name == "start" && (*r.Slot != 1 || r.PID == 0 || r.Program != "/bin/sh" || r.Dir != "/") {
			t.Errorf("%s: %v", name, r)
		}
	}
	idle(t, h)
	log.mu.Lock()
	defer log.mu.Unlock()
	if strings.Contains(log.buf.String(), "hush") {
		t.Errorf("a secret is in the log:\n%s", &log.buf)
	}
	if strings.Contains(log.buf.String(), `"connect"`) {
		t.Errorf("a driver that looks where the agent is counts as a stranger:\n%s", &log.buf)
	}
}

// TestRefusalsAreRecorded: a stranger, a driver of another user, an invalid message and a worker
// without a slot leave records of who was refused, and why.
func TestRefusalsAreRecorded(t *testing.T) {
	h, log := newRecordedHost(t)
	run := func(user string) identity.Subject {
		return identity.Subject{RunID: "audited", Role: identity.Driver, User: user, UID: "1000"}
	}
	alice := newDriver(t, h, run("alice"))
	alice.say(attach())
	log.await(t, func(r audit.Record) bool { return r.What == "attach" })
	check := func(what, user, why string) {
		t.Helper()
		r := log.await(t, func(r audit.Record) bool { return r.What == what && r.IsRefusal() })
		if !strings.Contains(r.Outcome, why) || r.Who.User != user {
			t.Errorf("%s: %v", what, r)
		}
	}
	alice.say(&agentpb.ToAgent{What: &agentpb.ToAgent_Start{Start: &agentpb.Start{Incarnation: "i", Slot: 7}}})
	check("start", "alice", "slot 7 is out of range")
	alice.say(&agentpb.ToAgent{What: &agentpb.ToAgent_Beat{Beat: &agentpb.Beat{Heard: 1000}}})
	check("beat", "alice", "event 1000 was heard")
	newDriver(t, h, run("eve")).say(attach())
	check("attach", "eve", `is of user "alice"`)
	other := credentials(t, testKey, "blue", identity.Subject{Role: identity.Agent, Host: "b"})
	conn, err := wire.NewClient(h.addr, other.ClientTLS(identity.Subject{Role: identity.Agent, Host: "a"}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := agentpb.NewAgentClient(conn).Inspect(t.Context(), &agentpb.InspectRequest{}); err == nil {
		t.Error("another agent is let in")
	}
	check("connect", "", "the peer is a agent, not a driver")
}
