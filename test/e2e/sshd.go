package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
)

// SSHD is an ssh server of this user with the files that clients need.
type SSHD struct {
	// Dir contains the keys, the configurations and the server's log. Cache is the cache directory
	// of its users.
	Dir, Cache string
	// Port is the server's port.
	Port int

	addr string
	cmd  *exec.Cmd
	done chan error
}

// sshdPath is the path of sshd on Debian.
const sshdPath = "/usr/sbin/sshd"

// StartSSHD starts a server at the address, with its files in dir, which must be empty. The words
// of before precede its command, for example to enter a network namespace. The caller must call
// Stop.
func StartSSHD(ctx context.Context, dir, addr string, before ...string) (*SSHD, error) {
	s := &SSHD{Dir: dir, Cache: filepath.Join(dir, "cache"), addr: addr, done: make(chan error, 1)}
	for _, name := range []string{"host", "user", "other"} {
		out, err := exec.CommandContext(ctx, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, name)).CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("e2e: ssh-keygen: %w: %s", err, out)
		}
	}
	public, err := os.ReadFile(filepath.Join(dir, "user.pub"))
	if err != nil {
		return nil, fmt.Errorf("e2e: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "authorized"), public, 0o600); err != nil {
		return nil, fmt.Errorf("e2e: %w", err)
	}
	if os.Getuid() == 0 {
		if err := os.MkdirAll("/run/sshd", 0o755); err != nil { // sshd requires it
			return nil, fmt.Errorf("e2e: %w", err)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("e2e: %w", err)
	}
	s.Port = ln.Addr().(*net.TCPAddr).Port
	ln.Close()
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
`, s.Port, addr, dir, dir, s.Cache)
	path := filepath.Join(dir, "sshd_config")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return nil, fmt.Errorf("e2e: %w", err)
	}
	words := append(before[:len(before):len(before)], sshdPath, "-D", "-f", path, "-E", filepath.Join(dir, "log"))
	s.cmd = exec.Command(words[0], words[1:]...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("e2e: %w", err)
	}
	go func() { s.done <- s.cmd.Wait() }()
	return s, s.await(ctx)
}

// await blocks until the server listens.
func (s *SSHD) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, follow.Patience)
	defer cancel()
	for !strings.Contains(s.Log(), "Server listening") {
		select {
		case <-ctx.Done():
			s.Stop()
			return fmt.Errorf("e2e: sshd does not listen: %s", s.Log())
		case err := <-s.done:
			s.done <- err
			return fmt.Errorf("e2e: sshd: %w: %s", errors.Join(err), s.Log())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// Log returns the server's log.
func (s *SSHD) Log() string {
	b, _ := os.ReadFile(filepath.Join(s.Dir, "log"))
	return string(b)
}

// Stop ends the server and its connections.
func (s *SSHD) Stop() {
	_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
	s.done <- <-s.done
}

// Host is a host in the client's configuration.
type Host struct {
	// Name is the job's name for the host, Server its ssh server. More are further lines of the
	// configuration.
	Name   string
	Server *SSHD
	More   []string
}

// Client writes a configuration for ssh and its known hosts to a directory, and returns the
// arguments that make ssh use them.
func Client(dir string, hosts ...Host) (string, error) {
	var config, known strings.Builder
	for _, h := range hosts {
		key, err := os.ReadFile(filepath.Join(h.Server.Dir, "host.pub"))
		if err != nil {
			return "", fmt.Errorf("e2e: %w", err)
		}
		fmt.Fprintf(&known, "[%s]:%d %s", h.Server.addr, h.Server.Port, key)
		fmt.Fprintf(&config, "Host %s\n", h.Name)
		for _, line := range h.More { // ssh uses the first value of an option
			fmt.Fprintf(&config, "  %s\n", line)
		}
		fmt.Fprintf(&config, "  HostName %s\n  Port %d\n", h.Server.addr, h.Server.Port)
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
