package carry

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
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
	mu      sync.Mutex
	answers []func(Reply)
	givenUp int
}

func (w *waits) begin(_ identity.Subject, _ []byte, answer func(Reply)) func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answers = append(w.answers, answer)
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.givenUp++
	}
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
		if !a.begin(&carrypb.CarriedCall{Number: number, Incarnation: inc, Method: method, Request: []byte(request)}) {
			t.Errorf("call %d exists", number)
		}
		a.running.Wait()
	}
	begin(1, "a", "/wait", "")
	begin(2, "b", "/echo", "x")
	begin(3, "stranger", "/echo", "x")
	begin(4, "a", "/other", "")
	begin(5, "a", "/wait", "")
	begin(6, "a", "/wait", "")
	if a.begin(&carrypb.CarriedCall{Number: 1, Incarnation: "b", Method: "/wait"}) {
		t.Error("a second call 1 has begun")
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
		a.begin(&carrypb.CarriedCall{Number: uint64(i), Method: "/wait"})
	}
	a.running.Wait()
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

// TestGivenUpMeanwhile: a call that is given up, or whose stream ends, while its method begins is
// given up once that has returned.
func TestGivenUpMeanwhile(t *testing.T) {
	for name, give := range map[string]func(*agentCalls){
		"given up": func(a *agentCalls) { a.giveUp(1) },
		"ended":    func(a *agentCalls) { a.end() },
	} {
		begun, begins, given := make(chan bool), make(chan bool), 0
		a := newTestCalls(map[string]Method{"/slow": func(identity.Subject, []byte, func(Reply)) func() {
			begins <- true
			<-begun
			return func() { given++ }
		}})
		a.begin(&carrypb.CarriedCall{Number: 1, Method: "/slow"})
		<-begins
		ended := make(chan bool)
		go func() {
			defer close(ended)
			give(a)
			a.running.Wait()
		}()
		for waits := true; waits; {
			a.mu.Lock()
			_, waits = a.waiting[1]
			a.mu.Unlock()
			runtime.Gosched()
		}
		close(begun)
		<-ended
		if given != 1 {
			t.Errorf("%s: given up %d times", name, given)
		}
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

// TestSlowMethod: a call whose method blocks holds up no other, and the number of such calls is
// bounded.
func TestSlowMethod(t *testing.T) {
	begins, release := make(chan bool, 2*mostBeginning), make(chan bool)
	a := newTestCalls(map[string]Method{
		"/slow": func(_ identity.Subject, _ []byte, answer func(Reply)) func() {
			begins <- true
			<-release
			answer(text("late"))
			return nil
		},
		"/fast": func(_ identity.Subject, _ []byte, answer func(Reply)) func() {
			answer(text("soon"))
			return nil
		},
	})
	replies := make(chan string, 4*mostBeginning)
	said := a.agentOf(t, func(m *carrypb.CarriedReplies) error {
		for _, r := range m.GetReplies() {
			replies <- string(r.GetOwn())
		}
		return nil
	})
	said <- &carrypb.CarriedCalls{Calls: []*carrypb.CarriedCall{{Number: 1, Method: "/slow"}, {Number: 2, Method: "/fast"}}}
	if got := <-replies; got != "soon" {
		t.Errorf("%q", got)
	}
	many := &carrypb.CarriedCalls{}
	for i := range 2 * mostBeginning {
		many.Calls = append(many.Calls, &carrypb.CarriedCall{Number: uint64(3 + i), Method: "/slow"})
	}
	said <- many
	for range mostBeginning {
		<-begins
	}
	a.mu.Lock()
	beginning := a.beginning
	a.mu.Unlock()
	if beginning > mostBeginning || len(begins) > 0 {
		t.Errorf("%d calls begin, and %d more", beginning, len(begins))
	}
	close(release)
	for range 2*mostBeginning + 1 {
		<-replies
	}
}

// TestDeafAgent: while an agent does not read, the replies to no more calls accumulate than are
// bounded.
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
	const count = 20 * mostBeginning
	calls := &carrypb.CarriedCalls{}
	for i := range count {
		calls.Calls = append(calls.Calls, &carrypb.CarriedCall{Number: uint64(i), Method: "/echo"})
	}
	said <- calls
	for read := 0; read < count; {
		now := <-reads
		if read += now; now > 2*mostBeginning {
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
