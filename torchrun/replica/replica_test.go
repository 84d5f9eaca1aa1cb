package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
)

var errRefused = errors.New("connection refused")

// cluster is a number of nodes whose connections the test controls.
type cluster struct {
	names []string
	nodes map[string]*Node

	mu    sync.Mutex
	down  map[string]bool // refuses connections
	ended map[string]bool // is known to have ended
	mute  map[string]bool // neither reaches others nor is reached
	conns map[net.Conn][2]string
	wg    sync.WaitGroup
}

func newCluster(t *testing.T, n int) *cluster {
	c := &cluster{nodes: map[string]*Node{}, down: map[string]bool{}, ended: map[string]bool{}, mute: map[string]bool{}, conns: map[net.Conn][2]string{}}
	for i := range n {
		name := fmt.Sprint("n", i)
		c.names = append(c.names, name)
		c.nodes[name] = new(Node)
	}
	t.Cleanup(func() {
		c.cut(func(a, b string) bool { return true })
		c.wg.Wait()
	})
	return c
}

// cut closes the connections between the selected pairs of nodes.
func (c *cluster) cut(which func(a, b string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn, ends := range c.conns {
		if which(ends[0], ends[1]) {
			conn.Close()
			delete(c.conns, conn)
		}
	}
}

func (c *cluster) kill(name string) {
	c.mu.Lock()
	c.down[name], c.ended[name] = true, !c.mute[name]
	c.mu.Unlock()
	c.cut(func(a, b string) bool { return a == name || b == name })
}

func (c *cluster) silence(name string, mute bool) {
	c.mu.Lock()
	c.mute[name] = mute
	c.mu.Unlock()
	if mute {
		c.cut(func(a, b string) bool { return a == name || b == name })
	}
}

func (c *cluster) config(own string) Config {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return Config{
		Own: c.nodes[own], Addr: own, Log: log,
		Evidence: func(addr string, err error) Evidence {
			c.mu.Lock()
			defer c.mu.Unlock()
			return Evidence{Refused: errors.Is(err, errRefused), Ended: c.ended[addr]}
		},
		Dial: func(ctx context.Context, addr string) (net.Conn, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			switch {
			case c.mute[own] || c.mute[addr]:
				return nil, errors.New("no answer")
			case c.down[addr]:
				return nil, errRefused
			}
			near, far := net.Pipe()
			c.conns[near] = [2]string{own, addr}
			c.wg.Go(func() {
				defer far.Close()
				_ = c.nodes[addr].Serve(far)
			})
			return near, nil
		},
	}
}

func (c *cluster) lead(t *testing.T, own string, members []string) (*Leader, Copy) {
	t.Helper()
	l, found, err := Lead(t.Context(), c.config(own), members)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l, found
}

func (n *Node) journal() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return journalOf(n.voter.Copy)
}

func journalOf(c Copy) string {
	var all []string
	for _, r := range c.Records {
		all = append(all, string(r))
	}
	return strings.Join(all, " ")
}

func records(all ...string) (r [][]byte) {
	for _, text := range all {
		r = append(r, []byte(text))
	}
	return r
}

// TestDeathBesideADeath: a leader that retries a dead member still notices the death of another
// one, whose connection was idle.
func TestDeathBesideADeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 3)
		l, _ := c.lead(t, "n0", c.names)
		if err := l.Sync(); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"n1", "n2"} {
			synctest.Wait()
			c.kill(name)
			<-time.After(10 * beat)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.tenure.Alone() {
			t.Errorf("n1 dead: %v, n2 dead: %v", l.tenure.Dead("n1"), l.tenure.Dead("n2"))
		}
	})
}

func TestLeaderIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 3)
		l, found := c.lead(t, "n0", c.names)
		if found.Term != 0 || len(found.Records) > 0 {
			t.Errorf("a job that has not begun has %+v", found)
		}
		l.Put("about", []byte("first"))
		l.Do(Change{Records: records("a", "b")})
		l.Do(Change{Replace: true, Records: records("ab")})
		l.Do(Change{Records: records("c")})
		if err := l.Sync(); err != nil {
			t.Fatal(err)
		}
		for name, n := range c.nodes {
			if n.journal() != "ab c" {
				t.Errorf("%s has %q", name, n.journal())
			}
		}
		// A member that comes later gets the whole copy and the files.
		c.nodes["n3"] = new(Node)
		c.names = append(c.names, "n3")
		l.SetMembers(c.names)
		l.Put("ended", []byte("0"))
		if text, err := c.nodes["n3"].Await(t.Context(), "ended"); err != nil || string(text) != "0" || c.nodes["n3"].journal() != "ab c" {
			t.Errorf("the fourth has %q and %q, %v", c.nodes["n3"].journal(), text, err)
		}
		c.kill("n0")
		l.Close()
		again, found := c.lead(t, "n2", c.names)
		if journalOf(found) != "ab c" || string(found.Files["about"]) != "first" {
			t.Errorf("the next leader found %+v", found)
		}
		c.kill("n1")
		c.kill("n3")
		if err := again.AwaitAlone(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestDeadAndSilentNodes: a leader does not wait for nodes that are known to be dead; of the others
// it needs more than half.
func TestDeadAndSilentNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 3)
		l, _ := c.lead(t, "n0", c.names)
		c.kill("n1")
		l.Do(Change{Records: records("a")})
		if err := l.Sync(); err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := l.AwaitAlone(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a leader of two is alone: %v", err)
		}
		c.silence("n2", true)
		l.Do(Change{Records: records("b")})
		done := make(chan error)
		go func() { done <- l.Sync() }()
		<-time.After(time.Minute)
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("a record counts that is on one of two nodes")
		default:
		}
		ctx, cancelLead := context.WithTimeout(t.Context(), time.Minute)
		defer cancelLead()
		if _, _, err := Lead(ctx, c.config("n2"), c.names); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("one of two leads: %v", err)
		}
		c.silence("n2", false)
		if err := <-done; err != nil && !errors.Is(err, ErrLost) { // it may have promised a later term to itself
			t.Error(err)
		}
		// Of two nodes one continues alone if the other is dead.
		c.kill("n0")
		l.Close()
		_, found := c.lead(t, "n2", c.names)
		if !strings.HasPrefix(journalOf(found), "a") {
			t.Errorf("it found %q", journalOf(found))
		}
	})
}

// TestLeaderIsFenced: no copy gets the writes of a leader after another one has begun to lead.
func TestLeaderIsFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 3)
		old, _ := c.lead(t, "n0", c.names)
		old.Do(Change{Records: records("a")})
		if err := old.Sync(); err != nil {
			t.Fatal(err)
		}
		c.silence("n0", true)
		now, found := c.lead(t, "n1", c.names)
		if journalOf(found) != "a" {
			t.Errorf("it found %q", journalOf(found))
		}
		old.Do(Change{Records: records("lost")})
		now.Do(Change{Records: records("b")})
		if err := now.Sync(); err != nil {
			t.Fatal(err)
		}
		c.silence("n0", false)
		if err := old.Sync(); !errors.Is(err, ErrLost) {
			t.Errorf("Sync of the one before: %v", err)
		}
		<-old.Lost()
		if err := now.Sync(); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Minute)
		for name, n := range c.nodes {
			if n.journal() != "a b" {
				t.Errorf("%s has %q", name, n.journal())
			}
		}
	})
}

// TestRandomLeaders makes nodes lead while random others are unreachable. Later leaders find each
// record that an earlier leader knew to be kept, in the same order.
func TestRandomLeaders(t *testing.T) {
	seeds := uint64(200)
	if testing.Short() {
		seeds = 40
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			c := newCluster(t, 5)
			var kept []string
			number := 0
			for range 12 {
				for _, name := range c.names {
					c.silence(name, false)
				}
				for _, i := range random.Perm(5)[:random.IntN(3)] {
					c.silence(c.names[i], true)
				}
				own := c.names[random.IntN(5)]
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				l, found, err := Lead(ctx, c.config(own), c.names)
				cancel()
				if err != nil {
					if !c.mute[own] {
						t.Fatalf("seed %d: %v", seed, err)
					}
					continue
				}
				journal := strings.Fields(journalOf(found))
				if !isWithin(kept, journal) {
					t.Fatalf("seed %d: a leader found %q, and %q was kept", seed, journal, kept)
				}
				for range random.IntN(5) {
					number++
					text := fmt.Sprint(number)
					l.Do(Change{Records: records(text)})
					if random.IntN(3) == 0 {
						c.silence(c.names[random.IntN(5)], true)
					}
					written := make(chan bool, 1)
					go func() { written <- l.Sync() == nil }()
					timeout := time.After(20 * time.Second)
					select {
					case ok := <-written:
						if ok {
							kept = append(kept, text)
						}
					case <-timeout:
						l.Close()
						<-written
					}
				}
				l.Close()
			}
		})
	}
}

// isWithin reports whether the text contains all words in this order.
func isWithin(words, text []string) bool {
	for _, w := range words {
		i := slices.Index(text, w)
		if i < 0 {
			return false
		}
		text = text[i+1:]
	}
	return true
}

// TestLyingNode: a length beyond the bound ends the connection before memory is allocated for it.
func TestLyingNode(t *testing.T) {
	near, far := net.Pipe()
	go func() {
		_, _ = far.Write([]byte{0xff, 0xff, 0xff, 0xff})
		far.Close()
	}()
	if err := new(Node).Serve(near); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("Serve: %v", err)
	}
}
