package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// SSHD is an ssh server that this user runs, with the files that clients need.
type SSHD struct {
	// Dir contains the keys, the configurations and the server's log. Cache is the cache directory
	// of its users.
	Dir, Cache string

	addr string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// sshdPath is the path of sshd on Debian.
const sshdPath = "/usr/sbin/sshd"

// sshdPort is the port of all servers; each has its own address.
const sshdPort = 2222

// StartSSHD starts a server at an address that no other server uses, and stops it when the test
// ends. The words of before precede its command, for example to enter a network namespace.
func StartSSHD(t *testing.T, addr string, before ...string) *SSHD {
	t.Helper()
	dir := t.TempDir()
	s := &SSHD{Dir: dir, Cache: filepath.Join(dir, "cache"), addr: addr, done: make(chan struct{})}
	if err := s.start(before); err != nil {
		t.Fatalf("e2e: sshd: %v", err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL) // together with its connections
		<-s.done
		if t.Failed() {
			t.Logf("the ssh server at %s\n%s", addr, s.log())
		}
	})
	ended := func() bool {
		select {
		case <-s.done:
			return true
		default:
			return false
		}
	}
	if !follow.Await(t, func() bool { return ended() || strings.Contains(s.log(), "Server listening") }) || ended() {
		t.Fatalf("e2e: sshd does not listen: %s", s.log())
	}
	return s
}

func (s *SSHD) start(before []string) error {
	for _, name := range []string{"host", "user", "other"} {
		out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(s.Dir, name)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ssh-keygen: %w: %s", err, out)
		}
	}
	public, err := os.ReadFile(filepath.Join(s.Dir, "user.pub"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(s.Dir, "authorized"), public, 0o600); err != nil {
		return err
	}
	if os.Getuid() == 0 {
		if err := os.MkdirAll("/run/sshd", 0o755); err != nil { // sshd requires it
			return err
		}
	}
	config := fmt.Sprintf(`Port %d
ListenAddress %s
HostKey %s/host
AuthorizedKeysFile %s/authorized
SetEnv XDG_CACHE_HOME=%s
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 64
LogLevel INFO
`, sshdPort, s.addr, s.Dir, s.Dir, s.Cache)
	path := filepath.Join(s.Dir, "sshd_config")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return err
	}
	words := append(before[:len(before):len(before)], sshdPath, "-D", "-f", path, "-E", filepath.Join(s.Dir, "log"))
	s.cmd = exec.Command(words[0], words[1:]...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return err
	}
	go func() {
		_ = s.cmd.Wait() // ProcessState has the status
		close(s.done)
	}()
	return nil
}

// log returns the server's log.
func (s *SSHD) log() string {
	b, _ := os.ReadFile(filepath.Join(s.Dir, "log"))
	return string(b)
}

// Host is a host in the client's configuration.
type Host struct {
	// Name is the job's name for the host, Server its ssh server. More are further lines of the
	// configuration.
	Name   string
	Server *SSHD
	More   []string
}

// Client writes an ssh configuration and a file of known hosts to a directory, and returns the ssh
// command with the arguments that select them.
func Client(dir string, hosts ...Host) (string, error) {
	var config, known strings.Builder
	for _, h := range hosts {
		key, err := os.ReadFile(filepath.Join(h.Server.Dir, "host.pub"))
		if err != nil {
			return "", fmt.Errorf("e2e: %w", err)
		}
		fmt.Fprintf(&known, "[%s]:%d %s", h.Server.addr, sshdPort, key)
		fmt.Fprintf(&config, "Host %s\n", h.Name)
		for _, line := range h.More { // ssh uses the first value of an option
			fmt.Fprintf(&config, "  %s\n", line)
		}
		fmt.Fprintf(&config, "  HostName %s\n  Port %d\n", h.Server.addr, sshdPort)
		if !strings.Contains(strings.Join(h.More, " "), "IdentityFile") { // ssh uses all of these
			fmt.Fprintf(&config, "  IdentityFile %s/user\n", h.Server.Dir)
		}
	}
	fmt.Fprintf(&config, "Host *\n  IdentitiesOnly yes\n  IdentityAgent none\n  StrictHostKeyChecking yes\n  UserKnownHostsFile %s/known\n", dir)
	if err := os.WriteFile(filepath.Join(dir, "known"), []byte(known.String()), 0o600); err != nil {
		return "", fmt.Errorf("e2e: %w", err)
	}
	path := filepath.Join(dir, "ssh_config")
	if err := os.WriteFile(path, []byte(config.String()), 0o600); err != nil {
		return "", fmt.Errorf("e2e: %w", err)
	}
	return "ssh -F " + path, nil
}
