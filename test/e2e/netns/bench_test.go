//go:build netns

package netns

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/e2e"
)

// sentBy returns the number of bytes that a host has sent over its link.
func (n *network) sentBy(host string) int {
	n.t.Helper()
	out, err := exec.Command("ip", "netns", "exec", n.space(host), "cat", "/sys/class/net/eth0/statistics/tx_bytes").Output()
	if err != nil {
		n.t.Fatal(err)
	}
	sent, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		n.t.Fatal(err)
	}
	return sent
}

// bench measures an AllReduce of 64 KiB by two ranks on each of the hosts a and b, and checks the
// number of bytes that hvdrun bench reports.
func (n *network) bench(flags ...string) {
	n.t.Helper()
	const size = 64 << 10
	tsv := filepath.Join(n.t.TempDir(), "rows.tsv")
	before := n.sentBy("b")
	args := append([]string{"bench", "--sizes", "64KiB", "--seconds", "0.05", "--rounds", "1", "--tsv", tsv}, flags...)
	cmd := exec.CommandContext(n.t.Context(), n.hvdrun("driver"), args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		n.t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	sent := n.sentBy("b") - before
	rows, err := os.ReadFile(tsv)
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(rows)) {
		cells := strings.Split(strings.TrimSpace(line), "\t")
		if cells[0] != "all" || cells[2] != "allreduce" {
			continue
		}
		samples, err1 := strconv.Atoi(cells[5])
		all, err2 := strconv.Atoi(cells[10])
		host, err3 := strconv.Atoi(cells[11])
		if err1 != nil || err2 != nil || err3 != nil || cells[3] != "4" || cells[4] != strconv.Itoa(size) {
			n.t.Fatalf("not the row of an AllReduce of 64 KiB by 4 ranks: %q", line)
		}
		// Each host sends half of the tensor twice, plus the headers of a few messages.
		if host < size || host > size+size/50 || all < 2*size || all > 2*host {
			n.t.Errorf("%d bytes on sockets, of a host %d", all, host)
		}
		if sent < samples*host {
			n.t.Errorf("the link of b has sent %d bytes, less than %d times %d", sent, samples, host)
		}
		return
	}
	n.t.Fatalf("no row of the AllReduce:\n%s", rows)
}

// TestBench measures ranks on hosts that ssh reaches, then on hosts with agents.
func TestBench(t *testing.T) {
	n := newNetwork(t)
	addrs := map[string]string{}
	for _, h := range []string{"a", "b", "driver"} {
		addrs[h] = n.add(h)
	}
	command, err := e2e.Client(t.TempDir(), n.sshd("a", addrs["a"]), n.sshd("b", addrs["b"]))
	if err != nil {
		t.Fatal(err)
	}
	n.bench("-H", "a:2,b:2", "--ssh-command", command, "--remote-hvdrun", binaries.Hvdrun)

	key := filepath.Join(t.TempDir(), "key")
	n.agent("driver", "--generate-key", key).wait()
	var agents []*agent
	for _, h := range []string{"a", "b"} {
		agents = append(agents, n.agent(h, "--key-file", key, "--name", h, "--slots", "2", "--join", addrs["a"],
			"--bind", addrs[h], "--log-level", "debug"))
		n.listens(h, 7946)
	}
	n.bench("-np", "4", "--gossip-join", addrs["a"]+","+addrs["b"], "--gossip-key-file", key,
		"--gossip-bind", addrs["driver"]+":0", "--ssh-command", "false")
	for _, a := range agents {
		a.ask()
		a.wait()
	}
}
