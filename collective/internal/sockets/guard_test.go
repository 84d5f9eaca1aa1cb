package sockets

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/routes"
)

// failure is a set of groups that have failed with a notice; nil: they have not.
type failure struct{ n *frame.Notice }

func (f failure) Path(uint64) (*Path, bool) { return nil, false }
func (f failure) Paths() []*Path            { return nil }
func (f failure) Demand(uint64) error       { return errors.New("there is no other group") }
func (f failure) Failure() *frame.Notice    { return f.n }
func (f failure) FailAll(frame.Notice)      {}

// TestLostRoutes: a connection to a living rank that ended has a broken route only if the group
// failed because of that rank or of this one. If another rank died, the peer has closed it.
func TestLostRoutes(t *testing.T) {
	var at [2]netip.Addr
	for i, text := range []string{"192.0.2.1", "198.51.100.1"} {
		at[i] = netip.MustParseAddr(text)
	}
	ranks := [][]string{{"192.0.2.1:5", "198.51.100.1:5"}, {"192.0.2.2:5", "198.51.100.2:5"}, {"192.0.2.3:5", "198.51.100.3:5"}}
	died := func(dead ...int) *frame.Notice { n := frame.Gone(io.EOF, dead...); return &n }
	for name, c := range map[string]struct {
		failed        *frame.Notice
		world         [][]string // the next one
		broken, hurry bool
	}{
		"no failure":       {nil, ranks, false, false},
		"the peer is lost": {died(0), ranks, true, true},
		"this rank is":     {died(1), ranks, true, true},
		"another rank is":  {died(2), ranks[:2], false, false},
		"the peer is dead": {died(0), ranks[1:], false, false},
	} {
		e := &Endpoint{}
		f := &Generation{Peers: Peers{Number: 1, Size: 3, Self: 1, Addrs: ranks, Hosts: []string{"a", "b", "c"}}, groups: failure{c.failed}}
		e.current = f
		e.routes.Learn(time.Now(), "a", at[:], []routes.Route{{Addr: at[0], Rate: 2e9}, {Addr: at[1], Rate: 1e6}})
		f.lost = []lostConn{{rank: 0, addr: at[0]}}
		if got := e.survived(c.world); got != c.hurry {
			t.Errorf("%s: survived is %v", name, got)
		}
		choice, known := e.routes.Choose("a", at[:])
		if !known || (choice.Routes[0].Addr != at[0]) != c.broken {
			t.Errorf("%s: the next world uses %+v first", name, choice.Routes)
		}
	}
}

// TestResetAfterFailure: a connection that the peer has reset counts as lost, unless the group has
// failed before: then the peer has closed it.
func TestResetAfterFailure(t *testing.T) {
	for _, failed := range []bool{false, true} {
		p := alone(0)
		p.group.(*group).over = failed
		l := p.links[1]
		l.data, l.wire.fd = reset(t), -1
		data, closed := l.noteEnded()
		if lost := len(p.gen.lost) == 1; lost == failed || (len(data) == 1) == failed || len(closed) > 0 {
			t.Errorf("the group has failed: %v; lost are %v; reported are %v and %v", failed, p.gen.lost, data, closed)
		}
	}
}

// reset returns a connection that its peer has reset.
func reset(t *testing.T) *conn {
	t.Helper()
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	own, err := net.Dial("tcp", at.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	peer, err := at.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := own.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	if err := peer.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	if _, err := own.Read(make([]byte, 1)); err == nil {
		t.Fatal("the connection is not reset")
	}
	return &conn{Conn: own, raw: own}
}
