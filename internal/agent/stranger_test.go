package agent

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// unheard checks that the host has never accepted a driver.
func (h *host) unheard(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.sessions) > 0 || len(h.taken) > 0 {
		t.Errorf("%d sessions, %d workers", len(h.sessions), len(h.taken))
	}
}

// attach returns the first message of a driver.
func attach() *agentpb.ToAgent {
	return &agentpb.ToAgent{What: &agentpb.ToAgent_Attach{Attach: &agentpb.Attach{Lines: line.Version,
		Session: bytes.Repeat([]byte{1}, sessionLen), LeaseMs: 10_000,
	}}}
}

func TestStrangersAreRefused(t *testing.T) {
	other := bytes.Clone(testKey)
	other[0] ^= 1
	job, err := identity.NewAuthority("r")
	if err != nil {
		t.Fatal(err)
	}
	jobs, err := job.Issue(identity.Subject{Role: identity.Driver})
	if err != nil {
		t.Fatal(err)
	}
	driver := identity.Subject{RunID: "r", Role: identity.Driver}
	for name, creds := range map[string]*identity.Credentials{
		"wrong key":               credentials(t, other, "blue", driver),
		"driver of another label": credentials(t, testKey, "red", driver),
		"driver of a job":         jobs,
		"another agent":           credentials(t, testKey, "blue", identity.Subject{Role: identity.Agent, Host: "b"}),
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, 1)
			conn, err := wire.NewClient(h.addr, creds.ClientTLS(identity.Subject{Role: identity.Agent, Host: "a"}))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			ctx, cancel := context.WithDeadline(t.Context(), sandbox.Limit())
			defer cancel()
			stream, err := agentpb.NewAgentClient(conn).Session(ctx)
			if err == nil {
				stream.Send(attach())
				_, err = stream.Recv()
			}
			if status.Code(err) != codes.Unavailable || ctx.Err() != nil {
				t.Errorf("got %v", err)
			}
			h.unheard(t)
		})
	}
	t.Run("the launcher says so", func(t *testing.T) {
		h := newHost(t, 1)
		s, _ := script(t, 0, "exit 0")
		for lease := 100 * time.Millisecond; ; lease *= 2 {
			err := agents(t, credentials(t, other, "blue", driver), h.addr, lease).Run(t.Context(), s, nil)
			if err != nil && strings.HasSuffix(err.Error(), context.Canceled.Error()) {
				continue // the lease ended before the agent answered
			}
			wantRefused(t, err, "certificate")
			break
		}
		h.unheard(t)
	})
}

// tap is a connection that records what is written to it.
type tap struct {
	net.Conn
	mu   sync.Mutex
	said bytes.Buffer
}

func (c *tap) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.said.Write(b)
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// TestReplayIsRefused: a driver's own messages, repeated by somebody else, get no access: neither
// its hello nor everything that followed.
func TestReplayIsRefused(t *testing.T) {
	h := newHost(t, 1)
	raw, err := net.Dial("tcp", h.addr)
	if err != nil {
		t.Fatal(err)
	}
	c := &tap{Conn: raw}
	conf := driverOf(t, "replayed").ClientTLS(identity.Subject{Role: identity.Agent, Host: "a"})
	conf.NextProtos = []string{"h2"}
	p := speak(t, tls.Client(c, conf))
	p.call()
	b, err := proto.Marshal(attach())
	if err != nil {
		t.Fatal(err)
	}
	p.message(uint32(len(b)), b)
	if n := len(p.await(func(f http2.Frame) bool { _, ok := f.(*http2.DataFrame); return ok }).(*http2.DataFrame).Data()); n < 5 {
		t.Fatalf("an answer of %d bytes", n)
	}
	raw.Close()
	h.close(errEnd)
	idle(t, h)
	c.mu.Lock()
	said := bytes.Clone(c.said.Bytes())
	c.mu.Unlock()

	h = newHost(t, 1)
	for _, words := range [][]byte{said, said[:300], said[300:]} {
		again, err := net.Dial("tcp", h.addr)
		if err != nil {
			t.Fatal(err)
		}
		again.SetDeadline(sandbox.Limit())
		again.Write(words)
		again.(*net.TCPConn).CloseWrite()
		answer, err := io.ReadAll(again)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Error("the agent goes on listening")
		}
		// An attacker gets only the server's first flight, and everything secret in it is
		// encrypted.
		if len(answer) > 4096 {
			t.Errorf("%d bytes were answered", len(answer))
		}
		again.Close()
		h.unheard(t)
	}
}

// peer speaks HTTP/2 directly, to send what no client sends.
type peer struct {
	t      *testing.T
	conn   *tls.Conn
	framer *http2.Framer
}

func speak(t *testing.T, conn *tls.Conn) *peer {
	t.Helper()
	conn.SetDeadline(sandbox.Limit())
	if err := conn.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	io.WriteString(conn, http2.ClientPreface)
	p := &peer{t, conn, http2.NewFramer(conn, conn)}
	if err := p.framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	return p
}

// call opens stream 1 to Agent.Session.
func (p *peer) call() {
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", agentpb.Agent_Session_FullMethodName}, {":authority", "agent"},
		{"content-type", "application/grpc"}, {"te", "trailers"},
	} {
		enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	err := p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true})
	if err != nil {
		p.t.Fatal(err)
	}
}

// message announces a message of size bytes, and sends its beginning.
func (p *peer) message(size uint32, beginning []byte) {
	p.t.Helper()
	if err := p.framer.WriteData(1, false, append(binary.BigEndian.AppendUint32([]byte{0}, size), beginning...)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) await(is func(http2.Frame) bool) http2.Frame {
	p.t.Helper()
	for {
		f, err := p.framer.ReadFrame()
		if err != nil {
			p.t.Fatal(err)
		}
		if is(f) {
			return f
		}
	}
}

// TestHugeMessageIsRefused: a driver of the cluster that announces a message of 1 GiB is refused
// before memory is allocated.
func TestHugeMessageIsRefused(t *testing.T) {
	h := newHost(t, 1)
	raw, err := net.Dial("tcp", h.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	conf := driverOf(t, "huge").ClientTLS(identity.Subject{Role: identity.Agent, Host: "a"})
	conf.NextProtos = []string{"h2"}
	p := speak(t, tls.Client(raw, conf))
	before := allocated()
	p.call()
	p.message(1<<30, make([]byte, 8<<10))
	headers := map[string]string{}
	dec := hpack.NewDecoder(4096, func(f hpack.HeaderField) { headers[f.Name] = f.Value })
	p.await(func(f http2.Frame) bool {
		if hf, ok := f.(*http2.HeadersFrame); ok {
			dec.Write(hf.HeaderBlockFragment())
			return hf.StreamEnded()
		}
		return false
	})
	if headers["grpc-status"] != "8" { // RESOURCE_EXHAUSTED
		t.Errorf("the call ended with %v", headers)
	}
	if took := allocated() - before; took > 32<<20 {
		t.Errorf("%d bytes were allocated", took)
	}
	h.unheard(t)
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// TestSilentStrangersKeepNobodyOut: strangers that open connections and send nothing do not keep a
// driver out.
func TestSilentStrangersKeepNobodyOut(t *testing.T) {
	h := newHost(t, 1)
	// On a busy machine this can take as long as a handshake may take; then the attempt shows
	// nothing, and is repeated.
	for try := 1; !pushOut(t, h); try++ {
		if try == 10 {
			t.Fatalf("of %d strangers those that came first are let wait", 3*identity.Drivers.Unproven)
		}
	}
	s, _ := script(t, 0, "exit 9")
	var exit *launch.ExitError
	err := agents(t, driverOf(t, "among"), h.addr, longLease).Run(t.Context(), s, nil)
	if !errors.As(err, &exit) || exit.Code != 9 {
		t.Errorf("Run returned %v", err)
	}
}

// pushOut connects many strangers that send nothing, and returns whether the first ones are
// disconnected at once, before the time limit of a handshake.
func pushOut(t *testing.T, h *host) bool {
	t.Helper()
	begun := time.Now()
	var conns []net.Conn
	for range 3 * identity.Drivers.Unproven {
		c, err := net.Dial("tcp", h.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	for _, c := range conns[:identity.Drivers.Unproven] {
		c.SetReadDeadline(sandbox.Limit())
		if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Fatalf("a stranger among %d is let wait: %v", len(conns), err)
		}
	}
	return time.Since(begun) < 4*time.Second // a handshake may take 5
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// FuzzStranger: whatever a peer without a certificate sends, it reaches no handler.
func FuzzStranger(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte(http2.ClientPreface))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{0x16, 3, 1, 0, 5, 1, 0, 0, 1, 3})
	h := newHost(f, 1)
	f.Fuzz(func(t *testing.T, said []byte) {
		c, err := net.Dial("tcp", h.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(sandbox.Limit())
		c.Write(said)
		c.(*net.TCPConn).CloseWrite()
		answer, err := io.ReadAll(c)
		if isTimeout(err) || len(answer) > 4096 {
			t.Errorf("%d bytes of answer, %v", len(answer), err)
		}
		h.unheard(t)
	})
}

// fakeLauncher runs nothing.
type fakeLauncher struct{}

func (fakeLauncher) Run(ctx context.Context, s *launch.Spec, started func(int)) error {
	started(1 << 30) // no process
	io.WriteString(s.Stdout, s.Incarnation)
	<-ctx.Done()
	return &launch.ExitError{Code: 1}
}

// FuzzDriver: whatever a driver with a certificate sends, the agent's state stays consistent.
func FuzzDriver(f *testing.F) {
	words := func(messages ...*agentpb.ToAgent) (all []byte) {
		for _, m := range messages {
			b, err := proto.Marshal(m)
			if err != nil {
				f.Fatal(err)
			}
			all = append(binary.BigEndian.AppendUint16(all, uint16(len(b))), b...)
		}
		return all
	}
	start := func(inc string, slot uint32) *agentpb.ToAgent {
		return &agentpb.ToAgent{What: &agentpb.ToAgent_Start{Start: &agentpb.Start{Incarnation: inc, Slot: slot}}}
	}
	beatOf := func(heard uint64) *agentpb.ToAgent {
		return &agentpb.ToAgent{What: &agentpb.ToAgent_Beat{Beat: &agentpb.Beat{Heard: heard}}}
	}
	beat := beatOf(1)
	f.Add(words(attach(), start("i", 0), start("i", 0), start("j", 0), start("k", 7), beat, beat))
	f.Add(words(attach(), start("i", 1), &agentpb.ToAgent{What: &agentpb.ToAgent_Stop{Stop: &agentpb.Stop{Incarnation: "i"}}}, beat,
		&agentpb.ToAgent{What: &agentpb.ToAgent_Taken{Taken: &agentpb.Taken{Incarnation: "i", Bytes: 1}}},
		&agentpb.ToAgent{What: &agentpb.ToAgent_End{End: &agentpb.End{}}}))
	f.Add(words(attach(), attach()))
	late := attach() // of a stream that another has replaced
	late.GetAttach().Resume, late.GetAttach().Heard = true, 1
	f.Add(words(attach(), start("i", 7), start("j", 7), start("k", 7), beatOf(2), late))
	f.Fuzz(func(t *testing.T, said []byte) {
		srv := newServer("a", 2, quiet())
		srv.launcher = fakeLauncher{}
		srv.guard = func(string, string) (io.Closer, error) { return io.NopCloser(nil), nil }
		var s *session
		l := &link{wake: wake.New(), gone: make(chan struct{})}
		for len(said) >= 2 {
			n := min(int(binary.BigEndian.Uint16(said)), len(said)-2)
			m := new(agentpb.ToAgent)
			if proto.Unmarshal(said[2:2+n], m) == nil {
				if s == nil || m.GetAttach() != nil {
					next := &link{wake: wake.New(), gone: make(chan struct{})}
					if got, _, err := srv.attach(grant{driver: identity.Subject{RunID: "run", Role: identity.Driver}}, audit.Who{}, m.GetAttach(), next, netip.Addr{}); err == nil {
						s, l = got, next
					}
				} else {
					s.handle(l, m)
				}
			}
			if s != nil {
				check(t, s, l)
			}
			said = said[2+n:]
		}
		srv.close(errEnd)
		srv.wg.Wait()
		if len(srv.sessions)+len(srv.taken) > 0 {
			t.Errorf("%d sessions and %d slots are left", len(srv.sessions), len(srv.taken))
		}
	})
}

// check checks the pending events of a session.
func check(t *testing.T, s *session, l *link) {
	events, _ := s.pending(l)
	for i, e := range events {
		if e.GetNumber() != l.next-uint64(len(events)-i) {
			t.Errorf("event %d of %d before %d has number %d", i, len(events), l.next, e.GetNumber())
		}
	}
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	for i, w := range s.srv.taken {
		if i < 0 || i >= s.srv.slots || w.id.Index != i {
			t.Errorf("slot %d is taken by worker of slot %d", i, w.id.Index)
		}
	}
}
