package carry

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/carrypb"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
)

// waits is a method of which the test answers the calls.
type waits struct {
	answers []func(Reply)
	givenUp int
}

func (w *waits) begin(_ identity.Subject, _ []byte, answer func(Reply)) func() {
	w.answers = append(w.answers, answer)
	return func() { w.givenUp++ }
}

// newTestCalls returns the calls of an agent whose workers are all but the stranger.
func newTestCalls(methods map[string]Method) *agentCalls {
	return newAgentCalls(ServerConfig{
		Worker: func(agent identity.Subject, inc string) (identity.Subject, error) {
			if inc == "stranger" {
				return agent, status.Error(codes.PermissionDenied, "no worker")
			}
			return identity.Subject{Role: identity.Worker, Host: agent.Host, Incarnation: inc}, nil
		},
		Methods: methods,
	}, identity.Subject{Role: identity.Agent, Host: "h"})
}

func text(s string) Reply { return Reply{Own: []byte(s)} }

// sent returns what is sent next: by number, the reply or its status.
func (a *agentCalls) sent() map[uint64]string {
	all := make(map[uint64]string)
	for _, m := range a.take() {
		for _, r := range m.GetReplies() {
			all[r.GetNumber()] = string(r.GetOwn()) + string(m.GetShared())
			if r.GetCode() != 0 {
				all[r.GetNumber()] = codes.Code(r.GetCode()).String()
			}
		}
	}
	return all
}

// TestCalls: each call is answered once, at once or later, and not once it was given up.
func TestCalls(t *testing.T) {
	w := &waits{}
	a := newTestCalls(map[string]Method{
		"/wait": w.begin,
		"/echo": func(from identity.Subject, request []byte, answer func(Reply)) func() {
			answer(text(from.Incarnation + " on " + from.Host + " says " + string(request)))
			return nil
		},
	})
	begin := func(number uint64, inc, method, request string) {
		t.Helper()
		if err := a.begin([]*carrypb.CarriedCall{{Number: number, Incarnation: inc, Method: method, Request: []byte(request)}}); err != nil {
			t.Error(err)
		}
	}
	begin(1, "a", "/wait", "")
	begin(2, "b", "/echo", "x")
	begin(3, "stranger", "/echo", "x")
	begin(4, "a", "/other", "")
	begin(5, "a", "/wait", "")
	begin(6, "a", "/wait", "")
	if err := a.begin([]*carrypb.CarriedCall{{Number: 1, Incarnation: "b", Method: "/wait"}}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a second call 1: %v", err)
	}
	a.giveUp(5)
	a.giveUp(99)
	for i, answer := range w.answers {
		answer(text(fmt.Sprint("answer ", i)))
	}
	w.answers[0](text("again"))
	want := map[uint64]string{1: "answer 0", 2: "b on h says x", 3: "PermissionDenied", 4: "Unimplemented", 6: "answer 2"}
	if got := a.sent(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	begin(7, "a", "/wait", "")
	a.end()
	for _, answer := range w.answers {
		answer(text("late"))
	}
	if got := a.sent(); len(got) > 0 || w.givenUp != 2 {
		t.Errorf("%v, and %d calls were given up", got, w.givenUp)
	}
}

// TestShared: what is the same for many is sent once in a message, and a message is not too long.
func TestShared(t *testing.T) {
	w := &waits{}
	a := newTestCalls(map[string]Method{"/wait": w.begin})
	const count = 3 * mostReplies / (1000 + replySize)
	for i := range count {
		if err := a.begin([]*carrypb.CarriedCall{{Number: uint64(i), Method: "/wait"}}); err != nil {
			t.Fatal(err)
		}
	}
	world, other, own := make([]byte, 1<<20), []byte("other"), make([]byte, 1000)
	w.answers[0](Reply{Shared: other})
	w.answers[1](Reply{Err: errors.New("failed"), Shared: other})
	for _, answer := range w.answers[2:] {
		answer(Reply{Own: own, Shared: world})
	}
	messages, replies := a.take(), 0
	for _, m := range messages {
		replies += len(m.GetReplies())
		if size := proto.Size(m); size > mostReplies+len(world)+1<<16 {
			t.Errorf("a message of %d bytes", size)
		}
	}
	if replies != count || len(messages) < 5 || len(messages) > 6 {
		t.Errorf("%d replies in %d messages", replies, len(messages))
	}
}

// agentOf serves an agent that reads what send gets, and says what the test sends.
func (a *agentCalls) agentOf(t *testing.T, send func(*carrypb.CarriedReplies) error) (said chan *carrypb.CarriedCalls) {
	said = make(chan *carrypb.CarriedCalls)
	ended, served := make(chan error), make(chan error)
	go func() { served <- a.serve(send, said, ended) }()
	t.Cleanup(func() {
		ended <- nil
		if err := <-served; err != nil {
			t.Error(err)
		}
		a.end()
	})
	return said
}

// TestDeafAgent: while an agent does not read, no more than a bounded number of its calls begin.
func TestDeafAgent(t *testing.T) {
	a := newTestCalls(map[string]Method{"/echo": func(_ identity.Subject, _ []byte, answer func(Reply)) func() {
		answer(text("here"))
		return nil
	}})
	reads := make(chan int)
	said := a.agentOf(t, func(m *carrypb.CarriedReplies) error {
		reads <- len(m.GetReplies())
		return nil
	})
	const count = 20 * mostAtOnce
	calls := &carrypb.CarriedCalls{}
	for i := range count {
		calls.Calls = append(calls.Calls, &carrypb.CarriedCall{Number: uint64(i), Method: "/echo"})
	}
	said <- calls
	for read := 0; read < count; {
		now := <-reads
		if read += now; now > mostAtOnce {
			t.Errorf("%d replies at a time", now)
		}
	}
}

// TestMethods: a request that cannot be decoded is refused; a reply is its message, encoded.
func TestMethods(t *testing.T) {
	twice := AtOnce(func(from identity.Subject, req *notifypb.HearRequest) (*notifypb.HostsUpdatedRequest, error) {
		if req.GetSeq() == 0 {
			return nil, status.Error(codes.NotFound, from.Incarnation)
		}
		return &notifypb.HostsUpdatedRequest{Seq: 2 * req.GetSeq()}, nil
	})
	call := func(request []byte) (reply Reply) {
		twice(identity.Subject{Incarnation: "a"}, request, func(r Reply) { reply = r })
		return reply
	}
	if r := call([]byte{0xff}); status.Code(r.Err) != codes.Internal {
		t.Error(r.Err)
	}
	if r := call(nil); status.Code(r.Err) != codes.NotFound || !strings.Contains(r.Err.Error(), "a") {
		t.Error(r.Err)
	}
	request, err := proto.Marshal(&notifypb.HearRequest{Seq: 4})
	if err != nil {
		t.Fatal(err)
	}
	var told notifypb.HostsUpdatedRequest
	if r := call(request); r.Err != nil || proto.Unmarshal(r.Own, &told) != nil || told.GetSeq() != 8 {
		t.Errorf("%v, %v", r, &told)
	}
}
