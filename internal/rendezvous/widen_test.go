package rendezvous

import (
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

// narrow is a worker that listens on loopback alone until it is asked for more.
func (j *job) narrow(inc string, wide ...string) *Client {
	j.t.Helper()
	c, err := NewClient(ClientConfig{
		Addr: j.addr, Credentials: j.credentials(slotOf(inc)), Widen: func() ([]string, error) { return wide, nil },
	})
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { c.Close() })
	return c
}

// TestWiden: workers that listen on loopback alone, those that wait included, join again with other
// addresses once a worker of another machine takes part; others are not asked. A world that was
// published with the old addresses has the new ones.
func TestWiden(t *testing.T) {
	j := newJob(t)
	loopback := func(port string) Joining {
		return Joining{DataAddrs: []string{"127.0.0.1:" + port}, NotifyAddr: "127.0.0.1:9"}
	}
	waits := join(j.narrow("a", "10.0.0.1:4"), loopback("1"))
	if got := take(t, "the join of a", j.heard.joins); got.from.Incarnation != "a" {
		t.Fatal(got)
	}
	j.server.Widen()
	again := take(t, "the second join of a", j.heard.joins)
	if again.from.Incarnation != "a" || !slices.Equal(again.j.DataAddrs, []string{"10.0.0.1:4"}) {
		t.Fatalf("a joined again as %+v", again)
	}
	late := join(j.narrow("b", "10.0.0.1:5"), loopback("2"))
	if got := take(t, "the join of b", j.heard.joins); !slices.Equal(got.j.DataAddrs, []string{"10.0.0.1:5"}) {
		t.Errorf("b joined as %+v", got)
	}
	old := join(j.client("c"), loopback("3")) // it cannot listen elsewhere
	take(t, "the join of c", j.heard.joins)
	j.publish(1, 0, 0, "a", "b", "c")
	for rank, ch := range []<-chan result{waits, late, old} {
		w := j.world("the first world", ch, 1, rank)
		addrs := w.DataAddrs()
		if !slices.Equal(addrs[0], []string{"10.0.0.1:4"}) || !slices.Equal(addrs[1], []string{"10.0.0.1:5"}) {
			t.Errorf("rank %d: the addresses are %v", rank, addrs)
		}
	}
}

// TestWorldWaitsForWideMembers: a world of which a member was asked to listen elsewhere is
// published when that has joined again, with what it says then; a newer world takes its place.
func TestWorldWaitsForWideMembers(t *testing.T) {
	j := newJob(t)
	arrive := func(inc, addr string, can bool) <-chan answer {
		return j.arrive(inc, &rendezvouspb.JoinRequest{DataAddresses: []string{addr}, NotifyAddress: "127.0.0.1:9", CanWiden: can})
	}
	j.server.Widen()
	far := arrive("far", "10.0.0.2:1", true)
	if a := take(t, "answer", arrive("near", "[::1]:1", true)); !a.reply.GetWiden() {
		t.Fatalf("near is told %v", a)
	}
	j.publish(1, 0, 0, "far", "near")
	select {
	case a := <-far:
		t.Fatalf("far has a world of which a member is not ready: %v", a.reply)
	default:
	}
	j.publish(2, 0, 0, "far", "near")
	if a := take(t, "answer", arrive("near", "10.0.0.1:1", false)); a.reply.GetWorld().GetGeneration() != 2 {
		t.Fatalf("near is told %v", a)
	}
	a := take(t, "answer", far)
	place, err := placeFromWire(a.reply.GetWorld(), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	world, err := place.World()
	if err != nil {
		t.Fatal(err)
	}
	if got := world.DataAddrs()[1]; world.Generation != 2 || !slices.Equal(got, []string{"10.0.0.1:1"}) {
		t.Errorf("generation %d, near at %v", world.Generation, got)
	}
}

// TestWideMemberEnds: a worker that has ended is forgotten, but a held world is not published
// with the loopback address of a member that has ended.
func TestWideMemberEnds(t *testing.T) {
	j := newJob(t)
	arrive := func(inc, addr string) <-chan answer {
		return j.arrive(inc, &rendezvouspb.JoinRequest{DataAddresses: []string{addr}, NotifyAddress: "127.0.0.1:9", CanWiden: true})
	}
	j.server.Widen()
	for _, inc := range []string{"near", "other", "gone"} {
		if a := take(t, "answer", arrive(inc, "[::1]:1")); !a.reply.GetWiden() {
			t.Fatalf("%s is told %v", inc, a)
		}
	}
	j.publish(1, 0, 0, "near", "other")
	j.server.Expel("gone")
	j.server.Expel("other")
	near := arrive("near", "10.0.0.1:1")
	select {
	case a := <-near:
		t.Fatalf("near has a world with a member that has ended: %v", a.reply)
	default:
	}
	j.publish(2, 0, 0, "near")
	if a := take(t, "answer", near); a.reply.GetWorld().GetGeneration() != 2 {
		t.Errorf("near is told %v", a)
	}
	j.server.mu.Lock()
	defer j.server.mu.Unlock()
	if _, known := j.server.asked["gone"]; known {
		t.Error("a worker that has ended is not forgotten")
	}
}
