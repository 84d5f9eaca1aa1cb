package agent

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// playServer runs a server in its own process: it prints its address, and serves until its stdin is
// closed.
func playServer() {
	ln, err := identity.Drivers.Listen(os.Getenv("AGENT_TEST_SERVER"))
	if err != nil {
		panic(err)
	}
	authority, err := identity.ForCluster(testKey, "blue")
	if err != nil {
		panic(err)
	}
	creds, err := authority.Issue(identity.Subject{Role: identity.Agent, Host: "a"})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		os.Stdin.Read(make([]byte, 1))
		cancel()
	}()
	fmt.Println(ln.Addr())
	if err := newServer("a", 2, quiet()).serve(ctx, ln, creds); err != nil {
		panic(err)
	}
}

// serverProcess starts a process of playServer that listens on addr, and returns it with its
// address.
func serverProcess(t *testing.T, addr string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "AGENT_TEST_SERVER="+addr, "AGENT_TEST_KEY="+string(testKey))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return cmd, strings.TrimSpace(line)
}

// TestAgentKilled: a killed agent leaves no process behind, not even those that have left the
// worker's group. One that is started in its place counts as another agent, and serves the driver
// again.
func TestAgentKilled(t *testing.T) {
	network, err := sandbox.Net() // nobody else takes the port between the two
	if err != nil {
		t.Fatal(err)
	}
	cmd, addr := serverProcess(t, network+"1:0")
	l := agents(t, driverOf(t, "killed"), addr, longLease)
	s, pipe := script(t, 0, sleeper)
	r := start(t, l, s)
	r.awaitOutput("ready")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	gone(t, pipe)
	cmd.Process.Wait()
	serverProcess(t, addr)
	wantLost(t, r.wait(), "does not know the session")
	s.Incarnation += "-2"
	again := start(t, l, s)
	again.awaitOutput("ready")
	again.cancel()
	again.wait()
}
