package client

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// exited returns the error of a process that exited with this status.
func exited(t *testing.T, status int) error {
	t.Helper()
	if status == 0 {
		return nil
	}
	err := exec.Command("sh", "-c", fmt.Sprintf("exit %d", status)).Run()
	if err == nil {
		t.Fatal("no error")
	}
	return err
}

func TestWords(t *testing.T) {
	options := "-T -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
	for _, c := range []struct {
		ssh  *SSH
		want string
	}{
		{&SSH{}, "ssh " + options},
		{&SSH{Command: []string{"ssh", "-F", "config"}, Port: 2222, IdentityFile: "key"}, "ssh -F config " + options + " -p 2222 -i key"},
	} {
		if got := strings.Join(c.ssh.Words(), " "); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

func TestDiagnose(t *testing.T) {
	for _, c := range []struct {
		stderr string
		noise  string
		status int
		want   string
	}{
		{"ssh: Could not resolve hostname b: Name or service not known\r\n", "", 255,
			"host b: name lookup failed: ssh: Could not resolve hostname b: Name or service not known"},
		{"ssh: connect to host b port 22: Connection refused\r\n", "", 255,
			"host b: connection failed: ssh: connect to host b port 22: Connection refused"},
		{"ssh: connect to host b port 22: Connection timed out\r\n", "", 255,
			"host b: connection failed: ssh: connect to host b port 22: Connection timed out"},
		{"ssh: connect to host b port 22: No route to host\r\n", "", 255,
			"host b: connection failed: ssh: connect to host b port 22: No route to host"},
		{"Welcome.\nu@b: Permission denied (publickey,password).\r\n", "", 255,
			"host b: authentication failed: u@b: Permission denied (publickey,password)."},
		{"Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\r\nDisconnected from 10.0.0.1 port 22\r\n", "", 255,
			"host b: authentication failed: Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures"},
		{"No ED25519 host key is known for b and you have requested strict checking.\r\nHost key verification failed.\r\n", "", 255,
			"host b: host key failed: No ED25519 host key is known for b and you have requested strict checking."},
		{"@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@@@@@@\nlong story\nHost key verification failed.\r\n", "", 255,
			"host b: host key failed: the host's key differs from the known one"},
		{"kex_exchange_identification: Connection closed by remote host\r\n", "", 255,
			"host b: connection failed: kex_exchange_identification: Connection closed by remote host"},
		{"Timeout, server b not responding.\r\n", "", 255, "host b: connection failed: Timeout, server b not responding."},
		{"something new\r\n", "", 255, "host b: connection failed: something new"},
		{"", "", 255, "host b: connection failed: ssh failed without a message"},
		{"hvdrun: 1: exec: /opt/hvdrun: not found\n", "", 127, "host b: command failed: hvdrun: 1: exec: /opt/hvdrun: not found"},
		{"SIGQUIT: quit\nPC=0x46e2a1 m=0 sigcode=0\n\ngoroutine 1 [running]:\n" + strings.Repeat("rip    0x46e2a1\n", 1000) + "gs     0x0\n", "", 2,
			"host b: command failed: SIGQUIT: quit"},
		{"", "This account is currently not available.", 1,
			`host b: command failed: no answer came, only "This account is currently not available."`},
		{"", "", 1, "host b: command failed: no answer came: exit status 1"},
		{"", "", 0, "host b: command failed: no answer came: EOF"},
	} {
		err := diagnose("b", written(c.stderr), c.noise, exited(t, c.status), io.EOF)
		var host *HostError
		if err.Error() != c.want || !errors.As(err, &host) || strings.ContainsAny(err.Error(), "\r\n") {
			t.Errorf("%q: %q; want %q", c.stderr, err, c.want)
		}
	}
}

func written(text string) *tail {
	t := &tail{}
	t.Write([]byte(text))
	return t
}

// TestAdvice: if a host denies access or is unknown, the error contains the remedy.
func TestAdvice(t *testing.T) {
	for _, c := range []struct {
		port         int
		stderr, want string
	}{
		{0, "u@b: Permission denied (publickey).\r\n", "host b: authentication failed: u@b: Permission denied (publickey); " +
			"`ssh-copy-id b` brings a key there, and --ssh-identity-file (-i) names another"},
		{2222, "u@b: Permission denied (publickey).\r\n", "host b: authentication failed: u@b: Permission denied (publickey); " +
			"`ssh-copy-id -p 2222 b` brings a key there, and --ssh-identity-file (-i) names another"},
		{2222, "Host key verification failed.\r\n",
			"host b: host key failed: Host key verification failed; `ssh -p 2222 b` asks once whether to trust it"},
		{0, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\nHost key verification failed.\r\n",
			"host b: host key failed: the host's key differs from the known one; if that is right, `ssh-keygen -R b` forgets the old one"},
		{22, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\nHost key verification failed.\r\n",
			"host b: host key failed: the host's key differs from the known one; if that is right, `ssh-keygen -R [b]:22` forgets the old one"},
		{0, "Received disconnect: Too many authentication failures\r\n",
			"host b: authentication failed: Received disconnect: Too many authentication failures; --ssh-identity-file (-i) names the key"},
		{0, "ssh: connect to host b port 22: Connection refused\r\n", "host b: connection failed: ssh: connect to host b port 22: Connection refused"},
	} {
		if got := (&SSH{Port: c.port}).advise(diagnose("b", written(c.stderr), "", exited(t, 255), io.EOF)).Error(); got != c.want {
			t.Errorf("%q\n%s, want\n%s", c.stderr, got, c.want)
		}
	}
}

// TestPasses: a connection that is dropped before authentication is always retried. A host that
// cannot be reached yet is retried only if the job cannot continue without it.
func TestPasses(t *testing.T) {
	for _, c := range []struct {
		stderr         string
		always, awaits bool
	}{
		{"kex_exchange_identification: Connection closed by remote host", true, true},
		{"Connection closed by 10.0.0.1 port 22", true, true},
		{"kex_exchange_identification: read: Connection reset by peer", true, true},
		{"ssh: Could not resolve hostname b: Name or service not known", false, true},
		{"ssh: connect to host b port 22: Connection refused", false, true},
		{"ssh: connect to host b port 22: No route to host", false, true},
		{"u@b: Permission denied (publickey,password).", false, false},
		{"Host key verification failed.", false, false},
	} {
		err := diagnose("b", written(c.stderr), "", exited(t, 255), io.EOF)
		if always, awaits := passes(err, false), passes(err, true); always != c.always || awaits != c.awaits {
			t.Errorf("%q: %v and %v", c.stderr, always, awaits)
		}
	}
}

// droppingStarter starts no agent: it records how many calls run at a time, and its connection is
// dropped drops times.
type droppingStarter struct {
	drops     int
	now, most atomic.Int32
	calls     atomic.Int32
}

func (s *droppingStarter) Start(_ context.Context, host string, _ Hello) (Ready, error) {
	s.most.Store(max(s.most.Load(), s.now.Add(1)))
	defer s.now.Add(-1)
	if int(s.calls.Add(1)) <= s.drops {
		return Ready{}, diagnose(host, written("kex_exchange_identification: Connection reset by peer"), "", errDropping, io.EOF)
	}
	return Ready{}, &HostError{host, stageAuth, errors.New("it came this far")}
}

var errDropping = exec.Command("sh", "-c", "exit 255").Run()

// TestManyHostsAtOnce: few connections are made at a time, and dropped ones are made again.
func TestManyHostsAtOnce(t *testing.T) {
	authority, err := identity.NewAuthority("many")
	if err != nil {
		t.Fatal(err)
	}
	s := &droppingStarter{drops: 7}
	a := New(Config{Authority: authority, Starter: s, Log: quietLog()})
	defer a.Close()
	var hosts []string
	for i := range 24 {
		hosts = append(hosts, fmt.Sprint("n", i))
	}
	for host, err := range a.Prepare(t.Context(), hosts) {
		if !strings.Contains(err.Error(), "it came this far") {
			t.Errorf("%s: %v", host, err)
		}
	}
	if calls, most := s.calls.Load(), s.most.Load(); calls != 24+7 || most > 8 {
		t.Errorf("%d connections, up to %d at once", calls, most)
	}
}

func quietLog() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func TestFits(t *testing.T) {
	own := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}
	for arch, machine := range own {
		err := fits("Linux " + machine + "\n")
		if (err == nil) != (arch == runtime.GOARCH) {
			t.Errorf("%s: %v", machine, err)
		}
		if err != nil && !strings.Contains(err.Error(), "a Linux "+machine) {
			t.Errorf("%s: %v", machine, err)
		}
	}
	for _, machine := range []string{"", "Linux", "Darwin arm64", "Linux riscv64", "FreeBSD amd64"} {
		if fits(machine) == nil {
			t.Errorf("%q fits", machine)
		}
	}
	if err := fits(" \n"); !strings.Contains(err.Error(), "no program uname") { // from a shell that does not find uname
		t.Error(err)
	}
}

// TestScriptsNeedNoPath: a user's start-up files can leave PATH empty; the scripts work, and the
// program that they start gets the same PATH.
func TestScriptsNeedNoPath(t *testing.T) {
	for _, path := range []string{"", "/nonexistent"} {
		home := t.TempDir()
		run := func(script string, in []byte, args ...string) (answer string) {
			cmd := exec.Command("/bin/sh", append([]string{"-c", script, "hvdrun"}, args...)...)
			cmd.Env, cmd.Stdin, cmd.Stderr = []string{"HOME=" + home, "PATH=" + path}, bytes.NewReader(in), t.Output()
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			answer, _, _ = readAnswer(out)
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			return answer
		}
		program := []byte("#!/bin/sh\necho \"hvdrun-agent-ready $PATH.\"\n")
		sum := sha256.Sum256(program)
		args := []string{"hvdrun-test", hex.EncodeToString(sum[:])}
		if answer := run(startScript, nil, args...); fits(strings.TrimPrefix(answer, lacksMark)) != nil {
			t.Fatalf("PATH=%s: %q", path, answer)
		}
		if answer := run(copyScript, program, args...); answer != copiedMark {
			t.Fatalf("PATH=%s: %q", path, answer)
		}
		if answer := run(startScript, nil, args...); answer != readyMark+path+"." {
			t.Errorf("PATH=%s: %q", path, answer)
		}
	}
}

// TestMisfit: if a copied program cannot be run, it needs another C library: the error adds this
// remedy to the text of the shell.
func TestMisfit(t *testing.T) {
	for said, want := range map[string]bool{
		"hvdrun: exec: line 0: /root/.cache/hvdrun/hvdrun-8938: not found":                                           true,
		"hvdrun: 1: exec: /home/a/.cache/hvdrun/hvdrun-8938: No such file or directory":                              true,
		"/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by /a/.cache/hvdrun/hvdrun-8938)": true,
		"sha256sum: not found": false,
		"no port is free":      false,
	} {
		err := misfit(&HostError{"b", stageCommand, errors.New(said)}, "hvdrun-8938")
		if got := strings.Contains(err.Error(), "--remote-hvdrun"); got != want || !strings.Contains(err.Error(), said) {
			t.Errorf("%q: %v", said, err)
		}
	}
}

// remote returns an SSH with a command instead of ssh: it runs its last argument in a shell of this
// machine, as on a host with another home folder.
func remote(t *testing.T, text string) *SSH {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ssh")
	script := "#!/bin/sh\nfor last; do :; done\nexport HOME='" + t.TempDir() + "'\nunset XDG_CACHE_HOME\n" + text + "\n"
	if err := sandbox.WriteProgram(path, []byte(script)); err != nil {
		t.Fatal(err)
	}
	return &SSH{Command: []string{path}}
}

// TestHostsThatAreNone: names of hosts come from others: no name may be taken for an option of ssh.
func TestHostsThatAreNone(t *testing.T) {
	s := remote(t, "echo started >&2; exit 1")
	for _, host := range []string{"", "-oProxyCommand=x", "a b", "a\nb", "a'b"} {
		_, err := s.Start(t.Context(), host, Hello{})
		var at *HostError
		if !errors.As(err, &at) || at.Stage != stageLookup || strings.Contains(err.Error(), "started") {
			t.Errorf("%q: %v", host, err)
		}
	}
}

// TestCopyIsChecked: a copy that does not arrive completely is not kept.
func TestCopyIsChecked(t *testing.T) {
	s := remote(t, `case "$last" in *umask*) head -c 1000 | eval "$last" ;; *) eval "$last" ;; esac`)
	_, err := s.Start(t.Context(), "b", Hello{})
	var at *HostError
	if !errors.As(err, &at) || at.Stage != stageCopy || !strings.Contains(err.Error(), "its checksum is") {
		t.Errorf("Start returned %v", err)
	}
}

// TestAnswers: text that a login shell prints before the answer has no effect, and an ssh that
// hangs is given up.
func TestAnswers(t *testing.T) {
	ready := `hvdrun-agent-ready {"Version":2,"PID":7,"Port":99,"Addresses":["10.0.0.1"]}`
	s := remote(t, `[ "$last" != b ] || { echo hostname c.example; exit; }; cat >/dev/null; echo Welcome; head -c 100000 /dev/zero; printf "\\033]0;me@b\\007"; echo '`+ready+`'`)
	s.Hvdrun = "/opt/hvdrun"
	got, err := s.Start(t.Context(), "b", Hello{})
	if err != nil || got.PID != 7 || strings.Join(got.Endpoints(), " ") != "c.example:99 10.0.0.1:99" {
		t.Errorf("%+v, %v", got, err)
	}
	for answer, want := range map[string]string{
		`hvdrun-agent-ready {"Version":2,"Error":"no port is free"}`: "host b: command failed: no port is free",
		`hvdrun-agent-ready {"Version":3,"Build":"v2","Port":1}`:     "host b: command failed: the host's hvdrun (v2) speaks version 3",
		`hvdrun-agent-ready {"Version":2,"Port":70000}`:              "host b: command failed: an answer with port 70000",
		`hvdrun-agent-ready {`:                                       "host b: command failed: the answer is not JSON",
		`hvdrun-copied`:                                              "host b: command failed: its answer is not that of an agent",
		`unknown command: agent`:                                     "host b: command failed: no answer came, only",
	} {
		s := remote(t, "cat >/dev/null; echo '"+answer+"'")
		s.Hvdrun = "/opt/hvdrun"
		if _, err := s.Start(t.Context(), "b", Hello{}); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v", answer, err)
		}
	}
	hangs := remote(t, "exec sleep 600")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, errors.New("no longer wanted"))
	defer cancel()
	if _, err := hangs.Start(ctx, "b", Hello{}); err == nil || !strings.Contains(err.Error(), "no longer wanted") {
		t.Errorf("one that hangs: %v", err)
	}
}

// TestSSHThatHangs: a caller that waits for a host whose ssh hangs returns when its context ends.
// ssh ends with the launcher, even if a child of ssh keeps its output open.
func TestSSHThatHangs(t *testing.T) {
	dir := t.TempDir()
	held, runs := filepath.Join(dir, "held"), filepath.Join(dir, "runs")
	for _, path := range []string{held, runs} {
		if err := syscall.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	child, err := os.OpenFile(held, os.O_RDWR, 0) // the child ends when it is closed
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	authority, err := identity.NewAuthority("r")
	if err != nil {
		t.Fatal(err)
	}
	ssh := remote(t, "exec 3<"+held+"\necho >"+runs+"\ncat <&3\n:")
	ssh.Hvdrun = "/opt/hvdrun"
	l := New(Config{Authority: authority, Starter: ssh})
	ctx, cancel := context.WithCancelCause(t.Context())
	failed := make(chan error)
	go func() {
		_, err := l.HostAddr(ctx, "b")
		failed <- err
	}()
	if _, err := os.ReadFile(runs); err != nil {
		t.Fatal(err)
	}
	unwanted := errors.New("no longer wanted")
	cancel(unwanted)
	if err := <-failed; err != unwanted {
		t.Errorf("HostAddr returned %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestReadAnswer: an answer is found whatever a shell prints before it, with or without a newline
// between the two.
func TestReadAnswer(t *testing.T) {
	answers := []string{readyMark + `{"Version":2,"Port":5}`, lacksMark + "Linux x86_64", copiedMark, failedMark + "copy"}
	for name, before := range map[string]string{
		"nothing": "", "a line": "Welcome\n", "CRLF": "Welcome\r\n\r\n", "a title": "\x1b]0;user@node1\a", "tput": "\x1b(B\x1b[m",
		"a prompt": "Loading modules... ", "CR": "a\rb", "half a mark": "hvdrun-", "half of another": "hvdrun-agent-readyhvdrun-failed",
		"a megabyte of lines":   strings.Repeat("############\n", 100_000),
		"a line of a megabyte":  strings.Repeat("#", 1<<20),
		"a line of the bound":   strings.Repeat("#", maxHello-1),
		"one more":              strings.Repeat("#", maxHello),
		"a mark over the bound": strings.Repeat("#", maxHello-5),
		"no UTF-8":              "\xff\xfe",
	} {
		for _, answer := range answers {
			for _, end := range []string{"\n", "\r\n", "\nbye\n"} {
				got, noise, err := readAnswer(strings.NewReader(before + answer + end))
				if got != answer || err != nil || len(noise) > 200 {
					t.Fatalf("%s: %q: %q, %q, %v", name, answer, got, noise, err)
				}
			}
		}
	}
	if got, noise, err := readAnswer(strings.NewReader("Welcome\nhvdrun-copied")); got != "" || noise != "hvdrun-copied" || err != io.EOF {
		t.Errorf("a line without an end: %q, %q, %v", got, noise, err)
	}
	long := readyMark + strings.Repeat("x", maxHello)
	if got, _, err := readAnswer(strings.NewReader(long + "\n" + copiedMark + "\n")); got != copiedMark || err != nil {
		t.Errorf("an answer that is too long, and another: %q, %v", got, err)
	}
	_, noise, err := readAnswer(endless{})
	if said := diagnose("b", written(""), noise, nil, err).Error(); !strings.Contains(said, "more than 16 MiB") || !strings.Contains(said, "start-up files") {
		t.Errorf("a shell that never ends to print: %s", said)
	}
}

// endless is an endless sequence of lines.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = "yes\n"[i%4]
	}
	return len(p), nil
}

// TestEchoedCommandIsNoAnswer: a shell that only prints the given command has not answered.
func TestEchoedCommandIsNoAnswer(t *testing.T) {
	for _, script := range []string{startScript, copyScript, installedScript} {
		if got, _, err := readAnswer(strings.NewReader("+ " + script + "\n")); got != "" {
			t.Errorf("%q is taken for an answer, %v", got, err)
		}
	}
}

// FuzzReadHello: whatever arrives on an agent's standard input is either a usable hello or refused.
func FuzzReadHello(f *testing.F) {
	line, err := Hello{RunID: "r", Host: "a", Credentials: "secret", Patience: time.Minute}.line()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(line)
	f.Add([]byte("{}\n"))
	f.Add([]byte(`{"Version":1`))
	f.Fuzz(func(t *testing.T, said []byte) {
		h, err := ReadHello(strings.NewReader(string(said)))
		if err != nil && h.Credentials != "" {
			t.Error("a hello that was refused was returned")
		}
		if err == nil && (h.Version != HelloVersion || h.Host == "" || h.RunID == "" || h.Patience <= 0) {
			t.Errorf("taken: %+v", h)
		}
	})
}

// FuzzReadAnswer: whatever a remote shell prints, an answer is bounded, and a started agent has a
// port.
func FuzzReadAnswer(f *testing.F) {
	f.Add([]byte("Welcome\n" + readyMark + `{"Version":2,"Port":5}` + "\n"))
	f.Add([]byte(lacksMark + "Linux x86_64\n"))
	f.Add([]byte(failedMark))
	f.Add([]byte("\x1b]0;me\a" + copiedMark + "\r\n"))
	f.Fuzz(func(t *testing.T, said []byte) {
		answer, noise, err := readAnswer(strings.NewReader(string(said)))
		if (answer == "") != (err != nil) || len(answer) > maxHello || len(noise) > 200 {
			t.Errorf("%q, %q, %v", answer, noise, err)
		}
		if ready, err := decodeReady(answer); err == nil && (ready.Port < 1 || ready.Port > 65535) {
			t.Errorf("%+v", ready)
		}
	})
}
