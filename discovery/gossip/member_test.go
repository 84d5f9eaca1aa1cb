package gossip

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// The last probes of a closed member end by themselves, after seconds on a busy machine.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

var testKey = []byte("0123456789abcdef0123456789abcdef")

func quiet() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

// logBook is a log that a test can read.
type logBook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBook) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBook) count(text string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.text.String(), text)
}

func (b *logBook) logger() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(b)
	log.SetFormatter(&logrus.TextFormatter{DisableColors: true, DisableQuote: true})
	return log
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithDeadline(context.Background(), sandbox.Limit())
	t.Cleanup(cancel)
	return ctx
}

// began is the start of the first agent of a test; others start whole seconds later.
var began = time.Unix(1800000000, 0)

// calm slows probes down, so that a member on a busy machine does not count as dead.
func calm(cfg Config) Config {
	cfg.ProbeInterval, cfg.ProbeTimeout, cfg.Patience = 500*time.Millisecond, 240*time.Millisecond, 10*time.Second
	return cfg
}

// brisk restores the usual timing of probes.
func brisk(cfg Config) Config {
	cfg.ProbeInterval, cfg.ProbeTimeout, cfg.Patience = 0, 0, 0
	return cfg
}

// bubble runs a test in virtual time, over a network in memory.
func bubble(t *testing.T, test func(t *testing.T, n *memNet)) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { <-time.After(time.Minute) }) // memberlist's last probes end within this time
		test(t, newMemNet())
	})
}

// agentConfig returns the configuration of an agent on the loopback network that started this many
// seconds after the first.
func agentConfig(name string, seconds int, seeds ...string) Config {
	return calm(Config{Meta: &Meta{Name: name, Slots: 2, Start: began.Add(time.Duration(seconds) * time.Second), LaunchAddr: ":7947"},
		BindAddr: "127.0.0.1:0", Join: seeds, Key: testKey, Label: "test", Log: quiet(), RejoinInterval: time.Second})
}

// quietAddr returns an address at which no other process listens, and this one not yet.
func quietAddr(t *testing.T) string {
	t.Helper()
	network, err := sandbox.Net()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(network, "1:", DefaultPort)
}

// at returns the configuration with this address.
func at(addr string, cfg Config) Config {
	cfg.BindAddr = addr
	return cfg
}

func mustJoin(t *testing.T, cfg Config) *Member {
	t.Helper()
	m, err := Join(within(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// follower is a running Watch.
type follower struct {
	t     *testing.T
	lists chan []plan.Host
	ended chan error
	seen  []string // all lists so far
}

// follow watches a source. It closes the source at the end of the test.
func follow(t *testing.T, s *Source) *follower {
	t.Helper()
	f := &follower{t: t, lists: make(chan []plan.Host, 1000), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { f.ended <- s.Watch(ctx, func(hosts []plan.Host) { f.lists <- hosts }) }()
	t.Cleanup(func() {
		cancel()
		<-f.ended
		close(f.ended)
		s.Close()
	})
	return f
}

// text formats hosts as "a:2 b:2 (draining)".
func text(hosts []plan.Host) string {
	var words []string
	for _, h := range hosts {
		words = append(words, h.String())
		if h.Draining {
			words = append(words, "(draining)")
		}
	}
	return strings.Join(words, " ")
}

// until waits for a list. It returns the time of the list and the lists before it.
func (f *follower) until(want string) (at time.Time, before []string) {
	f.t.Helper()
	deadline := sandbox.Expired()
	for {
		select {
		case hosts := <-f.lists:
			got := text(hosts)
			f.seen = append(f.seen, got)
			if got == want {
				return time.Now(), before
			}
			before = append(before, got)
		case err := <-f.ended:
			f.ended <- err
			f.t.Fatalf("the watch ended: %v; want %q, saw %q", err, want, f.seen)
		case <-deadline:
			f.t.Fatalf("never saw %q, only %q", want, f.seen)
		}
	}
}

func observerConfig(seeds ...string) Config {
	return calm(Config{BindAddr: "127.0.0.1:0", Join: seeds, Key: testKey, Label: "test", Log: quiet(),
		RejoinInterval: time.Second})
}

func TestConformance(t *testing.T) {
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		cfg, err := observerConfig().withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		s := NewSource(cfg)
		s.member = newMember(cfg) // it has no peers
		for i, h := range hosts {
			s.member.roster.here(h.Name+"~1", h.Name, &Meta{Name: h.Name, Slots: h.Slots, Start: began.Add(time.Duration(i)), Incarnation: "1"})
		}
		return s
	})
}

func TestHostsOldestFirst(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 20))
	mustJoin(t, agentConfig("b", 10, a.Addr()))
	s := NewSource(observerConfig(a.Addr()))
	f := follow(t, s)
	f.until("b:2 a:2")
	mustJoin(t, agentConfig("c", 15, a.Addr()))
	f.until("b:2 c:2 a:2")
	hosts, err := s.Discover(within(t))
	if err != nil || text(hosts) != "b:2 c:2 a:2" {
		t.Errorf("Discover: %v, %v", hosts, err)
	}
	meta, ok := s.Agent("c")
	if !ok || meta.LaunchAddr != "127.0.0.1:7947" {
		t.Errorf("Agent: %+v, %v", meta, ok)
	}
	if _, ok := s.Agent("d"); ok {
		t.Error("found the agent of a host that is not there")
	}
}

// TestAgentLooksOnce: Agent looks at the whole cluster only after a change, or while a missing
// agent may still come back.
func TestAgentLooksOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg, err := observerConfig().withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		m := newMember(cfg) // it has no peers
		m.sign()
		s := NewSource(cfg)
		s.member = m
		here := func(name string) *memberlist.Node {
			encoded, err := Meta{Name: name, Slots: 1, Start: began}.encode()
			if err != nil {
				t.Fatal(err)
			}
			n := &memberlist.Node{Name: name + "~1", Addr: net.IPv4(10, 9, 0, 1), Meta: encoded}
			(&delegate{m}).NotifyJoin(n)
			return n
		}
		asks := func(name string, there bool, looks uint64) {
			t.Helper()
			before := m.roster.looks
			for range 3 {
				if _, ok := s.Agent(name); ok != there {
					t.Errorf("the agent of %s is there: %v", name, ok)
				}
			}
			if n := m.roster.looks - before; n != looks {
				t.Errorf("%d looks for 3 questions for %s, want %d", n, name, looks)
			}
		}
		here("a")
		asks("a", true, 1)
		asks("b", false, 0)
		b := here("b")
		asks("b", true, 1)
		(&delegate{m}).NotifyLeave(b)
		asks("b", true, 3)
		<-time.After(cfg.Patience)
		m.sign()
		asks("b", false, 1)
		asks("a", true, 0)
	})
}

func TestObserversTakeNoSlots(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	other := mustJoin(t, observerConfig(a.Addr()))
	f := follow(t, NewSource(observerConfig(other.Addr())))
	f.until("a:2")
}

func TestMetaIsUpdated(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	b := mustJoin(t, agentConfig("b", 1, a.Addr()))
	s := NewSource(observerConfig(a.Addr()))
	f := follow(t, s)
	f.until("a:2 b:2")
	meta, _ := b.Meta()
	meta.Slots, meta.BadSlots, meta.Name = 4, []int{1, 3}, "other"
	if err := b.SetMeta(within(t), meta); err != nil {
		t.Fatal(err)
	}
	f.until("a:2 b:4")
	if said, ok := s.Agent("b"); !ok || !slices.Equal(said.BadSlots, []int{1, 3}) { // the name is unchanged
		t.Errorf("Agent: %+v, %v", said, ok)
	}
	meta.BadSlots = []int{9}
	if err := b.SetMeta(within(t), meta); err == nil {
		t.Error("a slot that there is not is bad")
	}
	if err := mustJoin(t, observerConfig(a.Addr())).SetMeta(within(t), meta); err == nil {
		t.Error("an observer says something of a host")
	}
}

func TestLeave(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	b := mustJoin(t, agentConfig("b", 1, a.Addr()))
	f := follow(t, NewSource(observerConfig(a.Addr())))
	f.until("a:2 b:2")
	meta, _ := b.Meta()
	meta.Draining = true
	if err := b.SetMeta(within(t), meta); err != nil {
		t.Fatal(err)
	}
	f.until("a:2 b:2 (draining)")
	if err := b.Leave(within(t)); err != nil {
		t.Error(err)
	}
	f.until("a:2")
	if err := b.SetMeta(within(t), meta); !errors.Is(err, errClosed) {
		t.Errorf("after it left: %v", err)
	}
	if err := b.Leave(within(t)); !errors.Is(err, errClosed) {
		t.Errorf("left twice: %v", err)
	}
}

// TestLeaveAlone: a member can leave if there is no other to receive its good-bye.
func TestLeaveAlone(t *testing.T) {
	if err := mustJoin(t, agentConfig("a", 0)).Leave(within(t)); err != nil {
		t.Error(err)
	}
}

// TestLeaveWithoutTime: a member that has no time to leave omits its good-bye, and updates at that
// moment break nothing.
func TestLeaveWithoutTime(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for i := range 40 {
		b := mustJoin(t, agentConfig(fmt.Sprint("b", i), i, a.Addr()))
		if err := b.Leave(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("left in good order, without any time for it: %v", err)
		}
	}
}

// TestRestart: an agent restarts at the same address before its death was noticed.
func TestRestart(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	b := mustJoin(t, at(quietAddr(t), agentConfig("b", 1, a.Addr())))
	mustJoin(t, agentConfig("c", 2, a.Addr()))
	s := NewSource(observerConfig(a.Addr()))
	f := follow(t, s)
	f.until("a:2 b:2 c:2")
	old, _ := s.Agent("b")
	b.Close()
	mustJoin(t, at(b.Addr(), agentConfig("b", 3, a.Addr())))
	_, before := f.until("a:2 c:2 b:2")
	if !slices.Equal(before, []string{"a:2 c:2"}) {
		t.Errorf("saw %q in between", before)
	}
	if young, ok := s.Agent("b"); !ok || young.Incarnation == old.Incarnation {
		t.Errorf("still the old agent: %+v", young)
	}
}

// TestPortInUse: the error of a member that cannot listen wraps the system's.
func TestPortInUse(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	cfg := agentConfig("b", 1)
	cfg.BindAddr = a.Addr()
	_, err := Join(within(t), cfg)
	if op, is := errors.AsType[*net.OpError](err); !is || op.Op != "listen" || !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("%v", err)
	}
}

// TestRestartUnwatched: a new Watch compares with the last list of the previous one.
func TestRestartUnwatched(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	b := mustJoin(t, at(quietAddr(t), agentConfig("b", 1, a.Addr())))
	s := NewSource(observerConfig(a.Addr()))
	defer s.Close()
	stop := errors.New("enough")
	session := func(want string) (lists []string) {
		ctx, cancel := context.WithCancelCause(within(t))
		defer cancel(nil)
		err := s.Watch(ctx, func(hosts []plan.Host) {
			if lists = append(lists, text(hosts)); text(hosts) == want {
				cancel(stop)
			}
		})
		if !errors.Is(err, stop) {
			t.Fatalf("%v; saw %q", err, lists)
		}
		return lists
	}
	session("a:2 b:2")
	b.Close()
	young := mustJoin(t, at(b.Addr(), agentConfig("b", 2, a.Addr())))
	for meta, _ := s.Agent("b"); meta.Incarnation != young.meta.Incarnation; meta, _ = s.Agent("b") {
		<-s.member.changes()
	}
	if lists := session("a:2 b:2"); !slices.Equal(lists, []string{"a:2", "a:2 b:2"}) {
		t.Errorf("the next session saw %q", lists)
	}
}

func TestConflict(t *testing.T) {
	bubble(t, func(t *testing.T, n *memNet) {
		port := func(cfg Config) Config {
			cfg.Transport = n.port()
			return cfg
		}
		var book logBook
		a := mustJoin(t, port(agentConfig("a", 0)))
		b := mustJoin(t, port(agentConfig("b", 1, a.Addr())))
		cfg := port(observerConfig(a.Addr()))
		cfg.Log = book.logger()
		f := follow(t, NewSource(cfg))
		f.until("a:2 b:2")
		_, err := Join(within(t), port(agentConfig("b", 2, a.Addr())))
		conflict, ok := errors.AsType[*conflictError](err)
		if !ok || conflict.Kept != b.Addr() || !strings.Contains(err.Error(), b.Addr()) || !strings.Contains(err.Error(), conflict.Refused) {
			t.Fatalf("the second agent of a host: %v", err)
		}
		if n := book.count(conflict.Error()); n != 1 {
			t.Errorf("the observer has said %d times: %v", n, err)
		}
		select {
		case hosts := <-f.lists:
			t.Errorf("the list became %q", text(hosts))
		default:
		}
	})
}

// TestRestartElsewhere: an agent that restarts at another address is listed once its predecessor is
// known to be dead.
func TestRestartElsewhere(t *testing.T) {
	a := mustJoin(t, brisk(agentConfig("a", 0)))
	b := mustJoin(t, brisk(agentConfig("b", 1, a.Addr())))
	mustJoin(t, brisk(agentConfig("c", 2, a.Addr())))
	f := follow(t, NewSource(brisk(observerConfig(a.Addr()))))
	f.until("a:2 b:2 c:2")
	b.Close()
	mustJoin(t, brisk(agentConfig("b", 3, a.Addr())))
	f.until("a:2 c:2")
	f.until("a:2 c:2 b:2")
}

func TestStrangersAreRefused(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	const nobody = "127.0.0.1:1"
	for what, c := range map[string]struct {
		change func(*Config)
		is     error
		says   []string
	}{
		"key":             {func(c *Config) { c.Key = bytes.Repeat([]byte{1}, keyLen) }, ErrKey, []string{a.Addr()}},
		"label":           {func(c *Config) { c.Label = "other" }, errLabel, []string{a.Addr()}},
		"no label":        {func(c *Config) { c.Label = "" }, errLabel, []string{a.Addr()}},
		"key, try on":     {func(c *Config) { c.Key, c.KeepTrying = bytes.Repeat([]byte{1}, keyLen), true }, ErrKey, []string{a.Addr()}},
		"nobody there":    {func(c *Config) { c.Join = []string{nobody, "no port:x"} }, nil, []string{nobody + ": ", "refused", "no port:x"}},
		"key of no bytes": {func(c *Config) { c.Key = nil }, nil, []string{"0 bytes"}},
	} {
		t.Run(what, func(t *testing.T) {
			cfg := observerConfig(a.Addr())
			c.change(&cfg)
			s := NewSource(cfg)
			defer s.Close()
			hosts, err := s.Discover(within(t))
			if err == nil {
				t.Fatalf("found %v", hosts)
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v, want %v", err, c.is)
			}
			for _, says := range append(c.says, "gossip: ") {
				if !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
					t.Errorf("does not say %q in one line: %v", says, err)
				}
			}
		})
	}
}

// TestSeedsComeLater: an agent that may wait joins once its seed is there.
func TestSeedsComeLater(t *testing.T) {
	seed := quietAddr(t)
	cfg := agentConfig("b", 1, seed)
	cfg.KeepTrying = true
	b := mustJoin(t, cfg)
	mustJoin(t, at(seed, agentConfig("a", 0)))
	f := follow(t, NewSource(observerConfig(b.Addr())))
	f.until("a:2 b:2")
}

// told is a log whose first line a test reads.
type told chan string

func (c told) Write(p []byte) (int, error) {
	select {
	case c <- string(p):
	default:
	}
	return len(p), nil
}

// TestObserverIsFirst: an observer with patience can start before its seed listens.
func TestObserverIsFirst(t *testing.T) {
	seed := quietAddr(t)
	cfg := observerConfig(seed)
	cfg.SeedPatience = time.Hour
	told := make(told, 1)
	log := logrus.New()
	log.SetOutput(told)
	cfg.Log = log
	f := follow(t, NewSource(cfg))
	if line := <-told; !strings.Contains(line, "no seed can be reached; trying for 1h0m0s") {
		t.Errorf("the first line of the log is %q", line)
	}
	mustJoin(t, at(seed, agentConfig("a", 2)))
	f.until("a:2")
}

// TestOwnSeed: an observer that is itself a seed begins with what the other seeds know, and starts
// alone if it finds no member.
func TestOwnSeed(t *testing.T) {
	own := quietAddr(t)
	a := mustJoin(t, agentConfig("a", 1))
	mustJoin(t, agentConfig("b", 2, a.Addr()))
	follow(t, NewSource(observerConfig(a.Addr()))).until("a:2 b:2")
	s := NewSource(at(own, observerConfig(own, a.Addr(), "127.0.0.1:1"))) // and a seed at which nobody listens
	f := follow(t, s)
	if _, before := f.until("a:2 b:2"); len(before) > 0 {
		t.Errorf("the first lists are %q", before)
	}
	if addrs := s.Addrs(); len(addrs) != 2 || addrs[0] != a.Addr() {
		t.Errorf("the agents are at %q, a at %s", addrs, a.Addr())
	}
	other := quietAddr(t)
	mustJoin(t, at(other, observerConfig("127.0.0.1:1", other)))
}

// TestOwnSeedNotFirst: an observer that is itself a seed of a cluster that had members does not
// take their silence for a cluster without hosts.
func TestOwnSeedNotFirst(t *testing.T) {
	bubble(t, func(t *testing.T, n *memNet) {
		join := func(name string, seeds ...string) *Member {
			cfg := agentConfig(name, 0, seeds...)
			cfg.Transport, cfg.KeepTrying = n.port(), true
			return mustJoin(t, cfg)
		}
		source := func(before *Member) (s *Source, addr string) {
			port := n.port()
			cfg := observerConfig(port.addr.String(), before.Addr())
			cfg.Transport, cfg.NotFirst, cfg.SeedPatience = port, true, time.Minute
			return NewSource(cfg), port.addr.String()
		}
		a := join("a")
		s, _ := source(a)
		n.isolate(a.Addr(), true)
		if hosts, err := s.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), a.Addr()) {
			t.Errorf("while a is silent: %q, %v", text(hosts), err)
		}
		s.Close()

		n.isolate(a.Addr(), false)
		s, _ = source(a)
		follow(t, s).until("a:2")

		// Another agent joins through the observer, which is its seed.
		n.isolate(a.Addr(), true)
		s, own := source(a)
		f := follow(t, s)
		join("b", own)
		if _, before := f.until("b:2"); len(before) > 0 {
			t.Errorf("lists %q before that", before)
		}
	})
}

// TestSilence: an observer that is cut off does not take all others for dead.
func TestSilence(t *testing.T) { bubble(t, testSilence) }

func testSilence(t *testing.T, n *memNet) {
	agent := func(name string, seconds int, seeds ...string) *Member {
		cfg := brisk(agentConfig(name, seconds, seeds...))
		cfg.Transport = n.port()
		return mustJoin(t, cfg)
	}
	a := agent("a", 0)
	b := agent("b", 1, a.Addr())
	port := n.port()
	cfg := brisk(observerConfig(a.Addr()))
	cfg.Transport = port
	s := NewSource(cfg)
	defer s.Close()
	watch := func(until string) (lists []string, err error) {
		ctx, cancel := context.WithCancel(within(t))
		defer cancel()
		err = s.Watch(ctx, func(hosts []plan.Host) {
			lists = append(lists, text(hosts))
			if text(hosts) == until {
				cancel()
			}
			if until == "" {
				n.isolate(port.addr.String(), true)
			}
		})
		return lists, err
	}
	watch("a:2 b:2")
	lists, err := watch("")
	if !errors.Is(err, errSilent) || !slices.Equal(lists, []string{"a:2 b:2"}) {
		t.Errorf("cut off: %v, after %q", err, lists)
	}
	if hosts, err := s.Discover(within(t)); !errors.Is(err, errSilent) {
		t.Errorf("cut off, found %v, %v", hosts, err)
	}
	b.Close() // while the observer is cut off
	n.isolate(port.addr.String(), false)
	for {
		if lists, err = watch("a:2"); !errors.Is(err, errSilent) {
			break
		}
		<-s.member.changes()
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("back again: %v, after %q", err, lists)
	}
}

// TestPartitionHeals: two halves that have declared each other dead join again through their seeds.
func TestPartitionHeals(t *testing.T) {
	bubble(t, func(t *testing.T, n *memNet) {
		port := func(cfg Config) Config {
			cfg = brisk(cfg)
			cfg.Transport = n.port()
			return cfg
		}
		a := mustJoin(t, port(agentConfig("a", 0)))
		mustJoin(t, port(agentConfig("b", 1, a.Addr())))
		c := mustJoin(t, port(agentConfig("c", 2, a.Addr())))
		f := follow(t, NewSource(port(observerConfig(a.Addr()))))
		f.until("a:2 b:2 c:2")
		for _, length := range []time.Duration{0, 2 * deadTime} {
			n.isolate(c.Addr(), true)
			f.until("a:2 b:2")
			<-time.After(length) // in virtual time
			n.isolate(c.Addr(), false)
			f.until("a:2 b:2 c:2")
		}
	})
}

func TestNewerAgentsAreLeftOut(t *testing.T) {
	var book logBook
	a := mustJoin(t, agentConfig("a", 0))
	b := mustJoin(t, agentConfig("b", 1, a.Addr()))
	cfg := observerConfig(a.Addr())
	cfg.Log = book.logger()
	f := follow(t, NewSource(cfg))
	f.until("a:2 b:2")
	for range 2 {
		b.mu.Lock()
		b.encoded = []byte{MetaVersion + 1, byte(len(b.encoded)), 'x'}
		b.mu.Unlock()
		if err := b.list.UpdateNode(time.Hour); err != nil {
			t.Fatal(err)
		}
		f.until("a:2")
		meta, _ := b.Meta()
		if err := b.SetMeta(within(t), meta); err != nil {
			t.Fatal(err)
		}
		f.until("a:2 b:2")
	}
	if n := book.count("an agent is left out"); n != 1 {
		t.Errorf("said %d times", n)
	}
}

func TestEveryAddress(t *testing.T) {
	cfg := agentConfig("a", 0)
	cfg.BindAddr = "0.0.0.0:0"
	cfg.AdvertiseAddr = "127.0.0.2"
	a := mustJoin(t, cfg)
	if !strings.HasPrefix(a.Addr(), "127.0.0.2:") {
		t.Errorf("advertises %s", a.Addr())
	}
	cfg = observerConfig(a.Addr())
	cfg.BindAddr = ""
	o := mustJoin(t, cfg)
	if host, _, _ := net.SplitHostPort(o.Addr()); !net.ParseIP(host).IsLoopback() {
		t.Errorf("an observer that reaches its seed from loopback advertises %s", o.Addr())
	}
	if addr, err := advertised(within(t), nil); err != nil || net.ParseIP(addr) == nil {
		t.Errorf("without a seed: %q, %v", addr, err)
	}
}
