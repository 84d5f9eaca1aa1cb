package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Jobs on ssh hosts: names of this machine that exist only in ssh's configuration.

// server starts an ssh server that ends with the test.
func server(t *testing.T) *SSHD {
	t.Helper()
	return StartSSHD(t, address())
}

// client returns the ssh command that reaches the hosts.
func client(t *testing.T, hosts ...Host) string {
	t.Helper()
	command, err := Client(t.TempDir(), hosts...)
	if err != nil {
		t.Fatal(err)
	}
	return command
}

// cached returns the programs in the cache of a server's user.
func cached(t *testing.T, s *SSHD) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.Cache, "hvdrun", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// installed returns the path of an hvdrun on the machine of a server, so that none is copied there.
func installed(t *testing.T, s *SSHD) string {
	t.Helper()
	path := filepath.Join(s.Dir, "hvdrun")
	if err := os.Link(binaries.Hvdrun, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestSSH: a job on two unprepared hosts and this machine. The program is copied to each host once;
// a host is added later; a worker there is killed and its slot returns; at the end no process or
// file remains on any host.
func TestSSH(t *testing.T) {
	s := server(t)
	command := client(t, Host{Name: "far-a", Server: s}, Host{Name: "far-b", Server: s})
	res := run(t, Job{
		Flags: flags("-np", "2", "--min-np", "1", "--ssh-command", command, "--drain-timeout", "5", "--start-timeout", "5m"),
		Stages: []Stage{
			{Hosts: on(hostA, 1, "far-a", 1)},
			{Step: 10, Hosts: on(hostA, 1, "far-a", 1, "far-b", 2)},
		},
		Trainer: []string{"-hold", "10"},
	}, []steplog.World{
		{From: 1, To: 10, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 11, To: 20, Generation: 2, Size: 4, Zero: "localhost:0", First: 0},
	})
	programs := cached(t, s)
	if len(programs) != 1 || !strings.HasPrefix(filepath.Base(programs[0]), "hvdrun-") {
		t.Fatalf("in the cache: %q", programs)
	}
	if fi, err := os.Stat(programs[0]); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	if n := follow.Count(res.Events, "worker_started"); n != 4 {
		t.Errorf("%d workers were started, want 4", n)
	}
}

// TestSSHShowsNoSecret: while a job runs, no argument of its processes on either side contains a
// secret, nor does the environment of its ssh and its agents.
func TestSSHShowsNoSecret(t *testing.T) {
	t.Parallel()
	s := server(t)
	r := start(t, Job{
		Flags: []string{"-np", "2", "-H", "far-a:2", "--ssh-command", client(t, Host{Name: "far-a", Server: s}),
			"--remote-hvdrun", installed(t, s)},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms"},
	})
	if err := r.AwaitLines(t.Context(), func(lines []steplog.Line) bool { return len(lines) > 10 }); err != nil {
		t.Fatal(err)
	}
	secret := ""
	agents := 0
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		environ, _ := os.ReadFile(dir + "/environ")
		if strings.Contains(string(environ), r.Tag) {
			for entry := range strings.SplitSeq(string(environ), "\x00") {
				if value, ok := strings.CutPrefix(entry, "HVD_CREDENTIALS="); ok {
					secret = value
				}
			}
		}
	}
	if len(secret) < 100 {
		t.Fatalf("a worker's credentials are %q", secret)
	}
	tail := secret[len(secret)-40:] // the end of the keys
	for _, dir := range dirs {
		cmdline, _ := os.ReadFile(dir + "/cmdline")
		if strings.Contains(string(cmdline), tail) || strings.Contains(string(cmdline), "HVD_CREDENTIALS") {
			t.Errorf("%s shows it: %q", dir, cmdline)
		}
		if strings.HasSuffix(string(cmdline), "agent\x00--job\x00") {
			agents++
			if environ, _ := os.ReadFile(dir + "/environ"); strings.Contains(string(environ), tail) {
				t.Errorf("the environment of %s shows it", dir)
			}
		}
	}
	if agents == 0 {
		t.Error("there is no agent")
	}
	if err := syscall.Kill(r.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	res := finish(t, r, 128+int(syscall.SIGTERM), 100000)
	if strings.Contains(res.Output, tail) {
		t.Error("the log shows it")
	}
}

// TestSSHSays: a single line names an unusable host and the reason.
func TestSSHSays(t *testing.T) {
	s := server(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	full := server(t)
	if err := os.WriteFile(full.Cache, nil, 0o600); err != nil { // a file instead of a directory
		t.Fatal(err)
	}
	unknown := server(t)
	hosts := []Host{
		{Name: "no-key", Server: s, More: []string{"IdentityFile " + s.Dir + "/other"}},
		{Name: "no-name", Server: s, More: []string{"HostName no-such-host.invalid"}},
		{Name: "no-server", Server: s, More: []string{"Port 1"}},
		{Name: "full", Server: full},
	}
	for _, c := range []struct {
		host, want string
		flags      []string
	}{
		{"no-key", "host no-key: authentication failed: ", nil},
		{"no-name", "host no-name: name lookup failed: ", nil},
		{"no-server", "host no-server: connection failed: ", nil},
		{"full", "host full: directory failed: ", nil},
		{"stranger", "host stranger: host key failed: ", nil},
		{"far-a", "host far-a: command failed: ", []string{"--remote-hvdrun", file}},
	} {
		t.Run(c.host, func(t *testing.T) {
			t.Parallel()
			all := append(slices.Clip(hosts), Host{Name: "far-a", Server: s})
			dir := t.TempDir()
			command, err := Client(dir, all...)
			if err != nil {
				t.Fatal(err)
			}
			if c.host == "stranger" {
				text := fmt.Sprintf("Host stranger\n  HostName %s\n  Port %d\n  StrictHostKeyChecking yes\n  UserKnownHostsFile %s/known\n", unknown.addr, sshdPort, dir)
				if err := os.WriteFile(filepath.Join(dir, "ssh_config"), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			res := finish(t, start(t, Job{
				Flags:   append([]string{"-np", "1", "-H", c.host + ":1", "--ssh-command", command, "--start-timeout", "1s"}, c.flags...),
				Command: []string{"true"},
			}), 1, 0)
			said := ""
			for line := range strings.Lines(res.Output) {
				if strings.Contains(line, c.want) {
					said = line
				}
			}
			says(t, res, "hvdrun: 1 of 1 hosts cannot be used")
			if said == "" {
				t.Errorf("the output does not say %q:\n%s", c.want, res.Output)
			}
			t.Log(said)
		})
	}
}

// TestSSHDriverKilled: agents on other machines end their workers if no driver returns.
func TestSSHDriverKilled(t *testing.T) {
	t.Parallel()
	s := server(t)
	program := installed(t, s)
	r := start(t, Job{
		Flags: flags("-np", "2", "-H", "far-a:2", "--orphan-timeout", "10s", "--drain-timeout", "2s",
			"--ssh-command", client(t, Host{Name: "far-a", Server: s}), "--remote-hvdrun", program),
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-orphan"},
	})
	if err := r.AwaitLines(t.Context(), func(lines []steplog.Line) bool { return len(lines) > 10 }); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-r.Ended()
	if left := r.AwaitGone(0); len(left) > 0 {
		t.Errorf("after hvdrun was killed there are still %q", left)
	}
	if _, err := r.Wait(); err != nil {
		t.Error(err)
	}
	if !follow.Await(t, func() bool { return len(follow.Processes(program)) == 0 }) {
		t.Fatalf("the agent is left: %v", follow.Processes(program))
	}
}

// TestCheck: the table lists the usable hosts, and one line for each problem of the others.
func TestCheck(t *testing.T) {
	t.Parallel()
	s := server(t)
	command := client(t, Host{Name: "far-a", Server: s}, Host{Name: "far-b", Server: s},
		Host{Name: "no-key", Server: s, More: []string{"IdentityFile " + s.Dir + "/other"}})
	check := func(hosts string, more ...string) (string, int) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), binaries.Hvdrun, append([]string{"check", "-H", hosts, "--ssh-command", command}, more...)...)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		t.Logf("%s\n%s", hosts, out)
		return string(out), cmd.ProcessState.ExitCode()
	}
	out, status := check("localhost:2,far-a:4,far-b:4")
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	for _, line := range []string{
		`localhost +2 +yes +\d+\.\d\ds +[+-]\d+\.\dms +\S+ +\d+ +0 +- +2 of 2`,
		`far-a +4 +no +\d+\.\d\ds +[+-]\d+\.\dms +\S+ +\d+ +0 +- +2 of 2`,
		`far-b +4 +no +\d+\.\d\ds +[+-]\d+\.\dms +\S+ +\d+ +0 +- +2 of 2`,
	} {
		if !regexp.MustCompile(`(?m)^` + line + `$`).MatchString(out) {
			t.Errorf("no line %q", line)
		}
	}
	// A file in the cache with the program's name is not run unless it is the program.
	programs := cached(t, s)
	if len(programs) != 1 {
		t.Fatalf("in the cache: %q", programs)
	}
	genuine, err := os.ReadFile(programs[0])
	if err != nil {
		t.Fatal(err)
	}
	forged := append([]byte("#!/bin/sh\ntouch "+s.Dir+"/forged\nexit\n"), genuine...)[:len(genuine)]
	if err := errors.Join(os.Remove(programs[0]), sandbox.WriteProgram(programs[0], forged)); err != nil {
		t.Fatal(err)
	}
	out, status = check("far-a:4,no-key:1,stranger:1")
	if now, err := os.ReadFile(programs[0]); err != nil || !bytes.Equal(now, genuine) {
		t.Errorf("the forged program stays in the cache: %v", err)
	}
	if _, err := os.Stat(s.Dir + "/forged"); err == nil {
		t.Error("the forged program has run")
	}
	if status != 1 {
		t.Errorf("exit status %d", status)
	}
	for _, line := range []string{
		`far-a +4 +no .* 0 of 2`,
		`no-key +1 +no +none +- +- +- +- +- +-`,
		`host no-key: authentication failed: .*: Permission denied \(publickey\); .ssh-copy-id .*`,
		`host stranger: name lookup failed: ssh: Could not resolve hostname stranger: .*`,
		`hvdrun: 2 of 3 hosts have problems`,
	} {
		if !regexp.MustCompile(`(?m)^` + line + `$`).MatchString(out) {
			t.Errorf("no line %q", line)
		}
	}
	if !follow.Await(t, func() bool { return len(follow.Processes(cached(t, s)...)) == 0 }) {
		t.Fatal("agents are left")
	}
}

// TestSSHWithoutOne: an elastic job reports an unusable host and continues without it.
func TestSSHWithoutOne(t *testing.T) {
	s := server(t)
	res := run(t, Job{
		Flags: flags("-np", "2", "--min-np", "1", "-H", "far-a:2,no-key:2", "--ssh-command", client(t, Host{Name: "far-a", Server: s},
			Host{Name: "no-key", Server: s, More: []string{"IdentityFile " + s.Dir + "/other"}}), "--remote-hvdrun", installed(t, s)),
	}, []steplog.World{
		{From: 1, To: 20, Generation: 1, Size: 2, Zero: "far-a:0", First: 0},
	})
	says(t, res, "host no-key: authentication failed: ")
}

// TestSSHResume: workers on other machines continue without a driver, and the next driver takes
// them over.
func TestSSHResume(t *testing.T) {
	t.Parallel()
	s := server(t)
	const steps = 60
	r := start(t, Job{
		Flags: []string{"-np", "2", "--min-np", "1", "-H", "localhost:1,far-a:1", "--orphan-timeout", "10m",
			"--ssh-command", client(t, Host{Name: "far-a", Server: s}), "--remote-hvdrun", installed(t, s)},
		Trainer: []string{"-steps", fmt.Sprint(steps), "-step-time", "1ms", "-log-all", "-gate", "20=without", "-gate", "40=resumed"},
	})
	awaitStep(t, r, 20)
	r.KillDriver()
	mark(t, r, "without")
	awaitGrowth(t, r, 40)
	r = resume(t, r)
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "resumed") == 1 }); err != nil {
		t.Fatal(err)
	}
	mark(t, r, "resumed")
	res := finish(t, r, 0, steps)
	if n := follow.Count(res.Events, "resumed"); n != 1 {
		t.Errorf("%d events of a driver that takes over", n)
	}
	if worlds, started := follow.Count(res.Events, "world_published"), follow.Count(res.Events, "worker_started"); worlds != 1 || started != 2 {
		t.Errorf("%d worlds of %d workers, want one of 2", worlds, started)
	}
}
