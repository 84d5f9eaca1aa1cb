//go:build netns

package netns

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
)

// card adds an interface to a host and connects it to the switch of that number, from 1.
func (n *network) card(host string, number int) string {
	n.t.Helper()
	space, hub := n.space(host), n.space("hub")
	bridge, port, name := fmt.Sprintf("bridge%d", number), fmt.Sprintf("to-%s%d", host, number), fmt.Sprintf("eth%d", number)
	if exec.Command("ip", "-n", hub, "link", "show", bridge).Run() != nil {
		n.ip("-n", hub, "link", "add", bridge, "type", "bridge")
		n.ip("-n", hub, "link", "set", bridge, "up")
	}
	index := 1
	for index <= len(n.hosts) && n.hosts[index-1] != host {
		index++
	}
	addr := fmt.Sprintf("10.77.%d.%d", number, index)
	n.ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", name, "netns", space)
	n.ip("-n", hub, "link", "set", port, "master", bridge, "up")
	n.ip("-n", space, "addr", "add", addr+"/24", "dev", name)
	n.ip("-n", space, "link", "set", name, "up")
	return addr
}

// limit bounds the rate at which a host sends over an interface.
func (n *network) limit(host, name, rate string) {
	n.t.Helper()
	n.ip("netns", "exec", n.space(host), "tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", rate, "burst", "32kb", "latency", "20ms")
}

// sent returns the number of bytes that a host has sent over an interface.
func (n *network) sent(host, name string) int64 {
	n.t.Helper()
	out, err := exec.Command("ip", "netns", "exec", n.space(host), "cat", "/sys/class/net/"+name+"/statistics/tx_bytes").Output()
	if err != nil {
		n.t.Fatal(err)
	}
	bytes, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
	if err != nil {
		n.t.Fatal(err)
	}
	return bytes
}

// pair starts a job on two hosts, a and b, whose workers exchange this number of weights at each
// step.
func (n *network) pair(addrs map[string]string, weights int, flags ...string) *job {
	n.t.Helper()
	key := filepath.Join(n.t.TempDir(), "key")
	n.agent("driver", "--generate-key", key).wait()
	seeds := addrs["a"] + "," + addrs["b"]
	for _, host := range []string{"a", "b"} {
		n.agent(host, "--key-file", key, "--label", "test", "--name", host, "--slots", "1", "--join", seeds, "--bind", addrs[host],
			"--log-level", "debug")
		n.listens(host, 7946)
	}
	return n.train([]string{"-steps", strconv.Itoa(endless), "-size", strconv.Itoa(weights)}, append(flags, "-np", "2",
		"--gossip-join", seeds, "--gossip-key-file", key, "--gossip-label", "test", "--gossip-bind", addrs["driver"]+":0")...)
}

// cards adds the hosts a, b and driver, each with a slow interface, and further interfaces with
// these rates to a and b. All are so slow that busy processors do not affect what is measured.
func (n *network) cards(slow string, rates ...string) map[string]string {
	n.t.Helper()
	addrs := map[string]string{}
	for _, h := range []string{"a", "b", "driver"} {
		addrs[h] = n.add(h)
	}
	for _, h := range []string{"a", "b"} {
		n.limit(h, "eth0", slow)
		for i, rate := range rates {
			n.card(h, i+1)
			n.limit(h, fmt.Sprintf("eth%d", i+1), rate)
		}
	}
	return addrs
}

// says waits until the log contains one of these texts.
func (j *job) says(texts ...string) {
	j.t.Helper()
	if !follow.Await(j.t, func() bool {
		out, err := os.ReadFile(j.OutputPath())
		return err == nil && slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(string(out), text) })
	}) {
		j.t.Fatalf("the log says none of %q", texts)
	}
}

// moved returns the number of bytes that a host sends over each interface during some steps.
func (j *job) moved(n *network, host string, names ...string) map[string]int64 {
	j.t.Helper()
	before := map[string]int64{}
	for _, name := range names {
		before[name] = n.sent(host, name)
	}
	j.steps(30)
	for _, name := range names {
		before[name] = n.sent(host, name) - before[name]
	}
	return before
}

// next waits for the first commit of the world after a generation, and checks that both workers are
// alive.
func (j *job) next(generation uint64, since time.Time) {
	j.t.Helper()
	world := j.world("a", "b")
	var commit follow.Event
	_ = j.AwaitEvents(j.t.Context(), func(all []follow.Event) bool { commit = all[j.seen-1]; return true })
	j.t.Logf("the next world is published after %v and commits after %v", world.Time.Sub(since), commit.Time.Sub(since))
	if world.Generation != generation+1 {
		j.t.Errorf("generation %d follows %d", world.Generation, generation)
	}
	if exits := j.exits(); exits > 0 {
		j.t.Errorf("%d workers have ended, and only a route was cut", exits)
	}
}

// TestRouteIsCut: the faster of two interfaces carries the data. It is cut in the middle of an
// operation: both workers survive and continue over the other interface after one reset.
func TestRouteIsCut(t *testing.T) {
	const weights = 30_000
	if testing.Short() {
		t.Skip("it takes long; make check-net runs it")
	}
	for _, c := range []struct {
		name string
		cut  func(n *network)
		says []string // one of these: after some cuts, either host can notice first
	}{
		{"the interface of one host", func(n *network) { n.ip("-n", n.space("b"), "link", "set", "eth1", "down") }, []string{"interface eth1 is down", "is acknowledged"}},
		{"the link of one host", func(n *network) { n.ip("-n", n.space("hub"), "link", "set", "to-a1", "down") }, []string{"is given up; the next world uses eth0"}},
		{"an address", func(n *network) { n.ip("-n", n.space("b"), "addr", "flush", "dev", "eth1") }, []string{"no interface has the address", "is acknowledged"}},
		{"between the switches", func(n *network) { n.ip("-n", n.space("hub"), "link", "set", "to-b1", "nomaster") }, []string{"is acknowledged"}},
		{"one connection", func(n *network) { n.ip("netns", "exec", n.space("b"), "ss", "-K", "dst", "10.77.1.1") }, []string{"which broke"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNetwork(t)
			addrs := n.cards("8mbit", "80mbit")
			j := n.pair(addrs, weights)
			first := j.world("a", "b")
			j.says("data to host a goes over eth1")
			j.says("data to host b goes over eth1")
			if by := j.moved(n, "a", "eth0", "eth1"); by["eth1"] < 5*by["eth0"] {
				t.Errorf("host a has sent %v bytes", by)
			}
			since := time.Now()
			c.cut(n)
			j.next(first.Generation, since)
			j.says(c.says...)
			if by := j.moved(n, "a", "eth0", "eth1"); by["eth0"] < 5*by["eth1"] {
				t.Errorf("after the cut host a has sent %v bytes", by)
			}
			j.endWith(weights)
		})
	}
}

// TestRails: two interfaces of equal speed share the data, encrypted or not, beside a slow one. If
// one of them is cut, the other carries all of it.
func TestRails(t *testing.T) {
	const weights = 250_000
	if testing.Short() {
		t.Skip("it takes long; make check-net runs it")
	}
	for _, c := range []struct {
		name  string
		flags []string
	}{{"plain", nil}, {"encrypted", []string{"--encrypt-data"}}} {
		t.Run(c.name, func(t *testing.T) {
			n := newNetwork(t)
			addrs := n.cards("8mbit", "40mbit", "40mbit")
			j := n.pair(addrs, weights, c.flags...)
			first := j.world("a", "b")
			by := j.moved(n, "a", "eth0", "eth1", "eth2")
			if one, two := by["eth1"], by["eth2"]; 2*one < two || 2*two < one || one < 3*by["eth0"] {
				t.Errorf("host a has sent %v bytes", by)
			}
			since := time.Now()
			n.ip("-n", n.space("a"), "link", "set", "eth2", "down")
			j.next(first.Generation, since)
			if by := j.moved(n, "a", "eth0", "eth1", "eth2"); by["eth1"] < 3*by["eth0"] || by["eth2"] > 0 {
				t.Errorf("after the cut host a has sent %v bytes", by)
			}
			j.endWith(weights)
		})
	}
}
