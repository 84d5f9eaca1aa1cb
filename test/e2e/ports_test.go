package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestTakenPorts: every command that listens on a fixed port, or meets others there, names the port
// if another program uses it. The other program accepts connections and does not answer.
func TestTakenPorts(t *testing.T) {
	t.Parallel()
	other, err := net.Listen("tcp", net.JoinHostPort(address(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	at := other.Addr().String()
	host, port, _ := net.SplitHostPort(at)
	dir := t.TempDir()
	key, cluster, job := filepath.Join(dir, "key"), filepath.Join(dir, "cluster"), filepath.Join(dir, "job")
	for _, args := range [][]string{{"agent", "--generate-key", key}, {"cluster", "init", cluster}} {
		if out, err := exec.Command(binaries.Hvdrun, args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	running, log := background(t, "-np", "1", "--job-dir", job, "sleep", "1000000")
	t.Cleanup(func() { // together with its agent, which would wait for another driver
		_ = running.Process.Signal(syscall.SIGTERM)
		_ = running.Wait()
	})
	if !follow.Await(t, func() bool { _, err := os.Stat(filepath.Join(job, "control")); return err == nil }) {
		t.Fatalf("no job: %s", follow.Tail(log, 1<<12))
	}
	agent := []string{"agent", "--name", "x", "--key-file", key}
	torchrun := []string{"torchrun", "--nproc-per-node", "1", "--no-python"}
	const inUse, taken = "address already in use", "is in use by another program of this machine, process "
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"the page of a job":          {[]string{"-np", "1", "--dashboard-listen", at, "true"}, inUse},
		"metrics of a job":           {[]string{"-np", "1", "--metrics-listen", at, "true"}, inUse},
		"the gossip of a driver":     {[]string{"-np", "1", "--gossip-join", "192.0.2.1:7946", "--gossip-key-file", key, "--gossip-bind", at, "true"}, inUse},
		"the gossip of an agent":     {append(agent, "--bind", at), inUse},
		"an agent's port of drivers": {append(agent, "--bind", host+":0", "--launch-port", port), inUse},
		"metrics of an agent":        {append(agent, "--bind", host+":0", "--metrics-listen", at), inUse},
		"the registrar":              {[]string{"cluster", "serve", "--listen", at, cluster}, inUse},
		"a page":                     {[]string{"dashboard", "--listen", at, job}, inUse},
		"clients of tasks":           {[]string{"tasks", "gateway", "--listen", at, "--invitation", filepath.Join(dir, "invitation"), job}, inUse},
		"torchrun's node 0":          {append(torchrun, "--nnodes", "2", "--node-rank", "0", "--master-addr", host, "--master-port", port, "true"), inUse},
		"torchrun's node 1":          {append(torchrun, "--nnodes", "2", "--node-rank", "1", "--master-addr", host, "--master-port", port, "true"), taken},
		"torchrun's store":           {append(torchrun, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", at, "true"), taken},
		"torchrun's store, as host":  {append(torchrun, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", at, "--rdzv-conf", "is_host=true", "true"), inUse},
		"torchrun's etcd":            {append(torchrun, "--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", at, "true"), "is not reached"},
		"torchrun's health":          {append(torchrun, "--standalone", "--health-check-addr", host, "--health-check-port", port, "true"), inUse},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, log := background(t, c.args...)
			said := func() bool {
				text, err := os.ReadFile(log)
				return err == nil && strings.Contains(string(text), c.says) && strings.Contains(string(text), at)
			}
			if !follow.Await(t, said) {
				t.Errorf("%v: %s", c.args, follow.Tail(log, 1<<12))
			}
		})
	}
}
