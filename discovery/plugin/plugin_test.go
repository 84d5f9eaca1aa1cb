package plugin_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// newPlugin returns this binary as a plugin, which is closed at the end of the test, and its log.
func newPlugin(t testing.TB, mode string, settings map[string]string, change ...func(*plugin.Config)) (*plugin.Plugin, *logtest.Hook) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	log, hook := logtest.NewNullLogger()
	log.SetLevel(logrus.DebugLevel)
	cfg := plugin.Config{Path: self, Settings: settings, Log: log, EndTimeout: time.Minute,
		Env: []string{modeVariable + "=" + mode, "GORACE=atexit_sleep_ms=0"}}
	for _, c := range change {
		c(&cfg)
	}
	p := plugin.New(cfg)
	t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, plugin.ErrKilled) {
			t.Error(err)
		}
	})
	return p, hook
}

// text formats hosts as parse reads them.
func text(hosts []plan.Host) string {
	var words []string
	for _, h := range hosts {
		word := h.String()
		if h.Draining {
			word += "!"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

func discover(t *testing.T, p *plugin.Plugin) (string, error) {
	t.Helper()
	ctx, cancel := context.WithDeadline(t.Context(), sandbox.Limit())
	defer cancel()
	hosts, err := p.Discover(ctx)
	return text(hosts), err
}

// watched is a running Watch.
type watched struct {
	lists chan string
	ended chan error
	stop  context.CancelFunc
}

func watch(t *testing.T, w discovery.Watcher) *watched {
	ctx, cancel := context.WithCancel(t.Context())
	r := &watched{lists: make(chan string, 100), ended: make(chan error, 1), stop: cancel}
	go func() { r.ended <- w.Watch(ctx, func(hosts []plan.Host) { r.lists <- text(hosts) }) }()
	t.Cleanup(cancel)
	return r
}

func receive[T any](t testing.TB, from <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-sandbox.Expired():
		t.Fatalf("%s: nothing", what)
	}
	panic("unreachable")
}

// newFifo creates a named pipe.
func newFifo(t testing.TB) string {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// held creates a named pipe for plugins to hold open; gone waits until none does.
func held(t testing.TB) (entry string, gone func()) {
	path := newFifo(t)
	pipe, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pipe.Close() })
	return heldVariable + "=" + path, func() {
		t.Helper()
		_ = pipe.SetReadDeadline(sandbox.Limit())
		if _, err := io.ReadAll(pipe); err != nil {
			t.Fatalf("a process is left: %v", err)
		}
	}
}

func TestDiscoverer(t *testing.T) {
	for _, mode := range []string{"good", "quiet"} {
		t.Run(mode, func(t *testing.T) {
			discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
				p, _ := newPlugin(t, mode, map[string]string{"hosts": text(hosts)})
				return p
			})
		})
	}
}

func TestDraining(t *testing.T) {
	const want = "a:2 b:1! c:0!"
	p, _ := newPlugin(t, "good", map[string]string{"hosts": want})
	if got, err := discover(t, p); got != want || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

func TestNoWatch(t *testing.T) {
	for _, mode := range []string{"quiet", "raw"} {
		p, _ := newPlugin(t, mode, nil)
		if err := p.Watch(t.Context(), func([]plan.Host) { t.Error("found") }); !errors.Is(err, discovery.ErrNoWatch) {
			t.Errorf("%s: %v", mode, err)
		}
	}
}

// TestStartErrors: one line says what is wrong with a plugin.
func TestStartErrors(t *testing.T) {
	for _, c := range []struct{ mode, want string }{
		{"version", "it speaks version 2 of the discovery protocol, and this hvdrun version 1"},
		{"cookie", "it is not a discovery plugin, or not one of hvdrun: it exited with status 1: This binary is a plugin."},
		{"garbage", `it is not a discovery plugin: it printed "localhost:2"`},
		{"flood", `it is not a discovery plugin: it printed "xxxxx`},
		{"exit", "it is not a discovery plugin, or not one of hvdrun: it exited with status 3: no such cluster"},
		{"empty", "it is not a discovery plugin, or not one of hvdrun: it exited with status 0"},
		{"plain", "it serves without TLS"},
		{"far", "it must serve on a unix socket or a port of 127.0.0.1"},
		{"netrpc", "it does not serve gRPC"},
		{"nobody", "connection error: "},
	} {
		t.Run(c.mode, func(t *testing.T) {
			t.Parallel()
			entry, gone := held(t)
			p, _ := newPlugin(t, c.mode, nil, func(cfg *plugin.Config) { cfg.Env = append(cfg.Env, entry) })
			_, err := discover(t, p)
			if err == nil || !strings.HasPrefix(err.Error(), "discovery/plugin: plugin.test: ") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %s", err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one line: %q", err)
			}
			gone()
		})
	}
	t.Run("versions", func(t *testing.T) {
		p, _ := newPlugin(t, "version", nil)
		_, err := discover(t, p)
		var ve *plugin.VersionError
		if !errors.As(err, &ve) || *ve != (plugin.VersionError{Plugin: 2, Host: 1}) {
			t.Error(err)
		}
	})
	t.Run("no file", func(t *testing.T) {
		p := plugin.New(plugin.Config{Path: "./no-such-plugin"})
		defer p.Close()
		if _, err := discover(t, p); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "could not be started") {
			t.Error(err)
		}
	})
}

func TestStartTimeout(t *testing.T) {
	for limit, said := 500*time.Millisecond, false; !said; limit *= 2 { // until the process prints something in that time
		entry, gone := held(t)
		p, _ := newPlugin(t, "silent", nil, func(cfg *plugin.Config) {
			cfg.Env = append(cfg.Env, entry)
			cfg.StartTimeout = limit
		})
		_, err := discover(t, p)
		want := fmt.Sprintf("it has not started in %v", limit)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatal(err)
		}
		said = strings.Contains(err.Error(), want+": waiting for a licence")
		gone()
	}
}

func TestSettings(t *testing.T) {
	for _, c := range []struct {
		mode, key, value, want string
	}{
		{"good", "hosts", "a:x", `setting "hosts": plan: item 1`},
		{"good", "colour", "red", `setting "colour": not known; known are hosts, feed, fault, crash`},
		{"hang", "colour", "red", `setting "colour": not known; this source has no settings`},
		{"raw", "colour", "red", `setting "colour": not known; this source has no settings`},
	} {
		p, _ := newPlugin(t, c.mode, map[string]string{c.key: c.value})
		_, err := discover(t, p)
		if err == nil || !strings.HasPrefix(err.Error(), "discovery/plugin: plugin.test: "+c.want) {
			t.Errorf("%s: %v", c.mode, err)
		}
	}
}

// TestVariablesOfAnotherPlugin: the variables that go-plugin sets for a plugin do not come from
// this process's environment, where a Kubernetes Service or another launcher can have set them.
func TestVariablesOfAnotherPlugin(t *testing.T) {
	for name, value := range map[string]string{
		"PLUGIN_MIN_PORT": "tcp://10.0.0.1:80", "PLUGIN_PROTOCOL_VERSIONS": "99", "PLUGIN_CLIENT_CERT": "none",
		"PLUGIN_UNIX_SOCKET_DIR": "/dev/null/sockets", "PLUGIN_UNIX_SOCKET_GROUP": "nobody-at-all", "PLUGIN_MULTIPLEX_GRPC": "true",
	} {
		t.Setenv(name, value)
	}
	p, _ := newPlugin(t, "good", map[string]string{"hosts": "a:1"})
	if got, err := discover(t, p); err != nil || got != "a:1" {
		t.Errorf("%s, %v", got, err)
	}
}

func TestAnswersOfThePlugin(t *testing.T) {
	for _, c := range []struct{ fault, discover, watch string }{
		{"error", "discovery/plugin: plugin.test: the racks cannot be counted", "the racks cannot be watched"},
		{"twice", "discovery/plugin: plugin.test: the list of hosts is invalid: plan: host 2", "the list of hosts is invalid: plan: host 2"},
		{"end", "", "it has stopped watching"},
	} {
		p, _ := newPlugin(t, "good", map[string]string{"hosts": "a:1", "fault": c.fault})
		if _, err := discover(t, p); err == nil && c.discover != "" || err != nil && !strings.HasPrefix(err.Error(), c.discover) {
			t.Errorf("%s: %v", c.fault, err)
		}
		w := watch(t, p)
		if err := receive(t, w.ended, "end"); err == nil || !strings.Contains(err.Error(), c.watch) {
			t.Errorf("%s: %v", c.fault, err)
		}
	}
}

// TestLists: invalid lists of a plugin are refused, and the plugin stays alive.
func TestLists(t *testing.T) {
	for _, c := range []struct{ list, want string }{
		{"large", "larger than max"},
		{"long", "the list has 65537 hosts; at most 65536 are allowed"},
		{"a", "the list of hosts is invalid: plan: host 1"},
		{"-x", "the list of hosts is invalid: plan: host 1"},
	} {
		p, _ := newPlugin(t, "raw", nil, func(cfg *plugin.Config) { cfg.Env = append(cfg.Env, "PLUGIN_TEST_LIST="+c.list) })
		for range 2 {
			if _, err := discover(t, p); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v; want %s", c.list, err, c.want)
			}
		}
	}
}

func TestHangingPluginIsKilled(t *testing.T) {
	for _, ask := range []func(*plugin.Plugin) error{
		func(p *plugin.Plugin) error { _, err := p.Discover(t.Context()); return err },
		func(p *plugin.Plugin) error { return p.Watch(t.Context(), func([]plan.Host) {}) },
	} {
		entry, gone := held(t)
		p, _ := newPlugin(t, "hang", nil, func(cfg *plugin.Config) {
			cfg.Env = append(cfg.Env, entry)
			cfg.CallTimeout = 100 * time.Millisecond
		})
		if err := ask(p); err == nil || !strings.Contains(err.Error(), "it has not answered in 100ms, and was killed") {
			t.Error(err)
		}
		gone()
	}
}

// TestCallerGivesUp: if the caller's context ends, the plugin is not blamed.
func TestCallerGivesUp(t *testing.T) {
	p, hook := newPlugin(t, "hang", nil)
	why := errors.New("enough")
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, why)
	defer cancel()
	if _, err := p.Discover(ctx); !errors.Is(err, why) {
		t.Error(err)
	}
	for _, e := range hook.AllEntries() {
		if e.Level <= logrus.WarnLevel {
			t.Error(e.Message)
		}
	}
}

func logged(hook *logtest.Hook, text string) (lines []string) {
	for _, e := range hook.AllEntries() {
		if strings.Contains(e.Message, text) {
			lines = append(lines, fmt.Sprintf("%s %s %v", e.Level, e.Message, e.Data["plugin"]))
		}
	}
	return lines
}

func TestCrash(t *testing.T) {
	crash := filepath.Join(t.TempDir(), "crash")
	p, hook := newPlugin(t, "good", map[string]string{"hosts": "a:1", "crash": crash})
	if got, err := discover(t, p); got != "a:1" || err != nil {
		t.Fatal(got, err)
	}
	if err := os.WriteFile(crash, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := discover(t, p); err == nil || !strings.Contains(err.Error(), "exited with status 2: panic: boom") {
		t.Error(err)
	}
	const want = "warning discovery/plugin: plugin.test: exited with status 2: panic: boom"
	if got := logged(hook, "it is started again after 100ms"); len(got) != 1 || !strings.HasPrefix(got[0], want) {
		t.Errorf("%q", got)
	}
	if got := logged(hook, "says: panic: boom"); len(got) == 0 || !strings.HasPrefix(got[0], "info ") {
		t.Errorf("%q", got)
	}
	if err := os.Remove(crash); err != nil {
		t.Fatal(err)
	}
	if got, err := discover(t, p); got != "a:1" || err != nil {
		t.Error("after the crash:", got, err)
	}
	// A failed start is retried too.
	if err := os.WriteFile(crash, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := discover(t, p); err == nil || !strings.Contains(err.Error(), "status 2: panic: ") {
			t.Error(err)
		}
	}
	if err := os.Remove(crash); err != nil {
		t.Fatal(err)
	}
	if got, err := discover(t, p); got != "a:1" || err != nil {
		t.Error("after starts that failed:", got, err)
	}
}

// children returns the ids of this process's children.
func children(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(paths) == 0 {
		t.Fatal("no /proc:", err)
	}
	var ids []string
	for _, path := range paths {
		line, _ := os.ReadFile(path)
		ids = append(ids, strings.Fields(string(line))...)
	}
	return ids
}

// signalChildren sends a signal to all children of this process, which are plugins. After SIGSTOP
// it blocks until they are stopped.
func signalChildren(t *testing.T, sig syscall.Signal) {
	t.Helper()
	ids := children(t)
	if len(ids) == 0 {
		t.Fatal("there is no plugin")
	}
	for _, id := range ids {
		pid, err := strconv.Atoi(id)
		if err != nil {
			t.Fatal(err)
		}
		if sig == syscall.SIGSTOP {
			err = sandbox.Suspend(pid)
		} else {
			err = syscall.Kill(pid, sig)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// TestKilledInMidWatch: a plugin that is killed during a watch is reported as a failure, the list
// stays, and the watch continues with the next process.
func TestKilledInMidWatch(t *testing.T) {
	feed := newFifo(t)
	p, hook := newPlugin(t, "good", map[string]string{"hosts": "a:1", "feed": feed})
	lists, failures := make(chan string, 10), make(chan error, 10)
	poll := &discovery.Poll{Source: p, Interval: time.Millisecond, Log: quietLog(),
		Failed: func(err error, _ time.Duration) { failures <- err }}
	ctx, cancel := context.WithCancel(t.Context())
	var polling sync.WaitGroup
	polling.Go(func() { _ = poll.Run(ctx, func(hosts []plan.Host) { lists <- text(hosts) }) })
	defer polling.Wait()
	defer cancel()
	if got := receive(t, lists, "first list"); got != "a:1" {
		t.Fatal(got)
	}
	push(t, feed, "a:1 b:2")
	if got := receive(t, lists, "push"); got != "a:1 b:2" {
		t.Fatal(got)
	}
	signalChildren(t, syscall.SIGKILL)
	if err := receive(t, failures, "failure"); !strings.Contains(err.Error(), "was killed by signal 9 (killed)") {
		t.Error(err)
	}
	if got := receive(t, lists, "first list of the next process"); got != "a:1" {
		t.Fatal(got)
	}
	push(t, feed, "a:1 c:1")
	if got := receive(t, lists, "push of the next process"); got != "a:1 c:1" {
		t.Fatal(got)
	}
	if n := len(failures); n > 0 {
		t.Errorf("%d more failures", n)
	}
	if got := logged(hook, "it is started again after 100ms"); len(got) != 1 {
		t.Errorf("%q", got)
	}
}

func push(t testing.TB, feed, list string) {
	t.Helper()
	f, err := os.OpenFile(feed, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.WriteString(f, list+"\n"); err != nil {
		t.Fatal(err)
	}
}

func quietLog() logrus.FieldLogger {
	log, _ := logtest.NewNullLogger()
	return log
}

// TestStoppedInMidWatch: a plugin that stops during a watch is noticed without a call. On a busy
// machine it can count as stopped before it is.
func TestStoppedInMidWatch(t *testing.T) {
	entry, gone := held(t)
	feed := newFifo(t)
	p, _ := newPlugin(t, "good", map[string]string{"feed": feed}, func(cfg *plugin.Config) {
		cfg.Env = append(cfg.Env, entry)
		cfg.CallTimeout = 2 * time.Second
	})
	w := watch(t, p)
	var err error
	select {
	case <-w.lists:
		push(t, feed, stopWord)
		err = receive(t, w.ended, "end")
	case err = <-w.ended:
	}
	if err == nil || !strings.Contains(err.Error(), "it has not answered in 2s, and was killed") {
		t.Error(err)
	}
	gone()
}

// TestCloseOfStoppedPlugin: Close kills a stopped process, which does not answer.
func TestCloseOfStoppedPlugin(t *testing.T) {
	entry, gone := held(t)
	p, _ := newPlugin(t, "good", nil, func(cfg *plugin.Config) {
		cfg.Env, cfg.EndTimeout = append(cfg.Env, entry), time.Millisecond
	})
	if _, err := discover(t, p); err != nil {
		t.Fatal(err)
	}
	signalChildren(t, syscall.SIGSTOP)
	if err := p.Close(); !errors.Is(err, plugin.ErrKilled) {
		t.Errorf("Close returned %v", err)
	}
	gone()
}

func TestClose(t *testing.T) {
	for _, mode := range []string{"good", "raw", "deaf", "family"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			entry, gone := held(t)
			p, hook := newPlugin(t, mode, nil, func(cfg *plugin.Config) {
				cfg.Env = append(cfg.Env, entry)
				if mode == "deaf" {
					cfg.EndTimeout = time.Millisecond
				}
			})
			w := watch(t, p)
			if mode != "raw" {
				receive(t, w.lists, "first list")
			} else if _, err := discover(t, p); err != nil {
				t.Fatal(err)
			}
			if err := p.Close(); errors.Is(err, plugin.ErrKilled) != (mode == "deaf") {
				t.Errorf("Close returned %v", err)
			}
			gone()
			if err := receive(t, w.ended, "end"); err == nil {
				t.Error("the watch ended without an error")
			}
			if _, err := p.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "it was closed") {
				t.Error(err)
			}
			if lines := logged(hook, "started again"); len(lines) > 0 {
				t.Errorf("%q", lines)
			}
		})
	}
}

func TestCloseUnused(t *testing.T) {
	p, _ := newPlugin(t, "good", nil)
	for range 2 {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	if ids := children(t); len(ids) > 0 {
		t.Errorf("started: %v", ids)
	}
}

// TestTemporaryFiles: the files by which both ends meet are removed, whether the path of their
// folder is short or long.
func TestTemporaryFiles(t *testing.T) {
	for _, dir := range []string{"short", strings.Repeat("l", 100)} {
		temp := filepath.Join(t.TempDir(), dir)
		if err := os.Mkdir(temp, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Setenv("TMPDIR", temp)
		p, _ := newPlugin(t, "good", map[string]string{"hosts": "a:1"})
		if got, err := discover(t, p); got != "a:1" || err != nil {
			t.Error(got, err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
			t.Error(left, err)
		}
	}
}

// TestHostIsKilled: when the host is killed, its plugin ends too.
func TestHostIsKilled(t *testing.T) {
	for _, child := range []string{"good", "deaf"} {
		t.Run(child, func(t *testing.T) {
			t.Parallel()
			entry, gone := held(t)
			host := exec.Command(os.Args[0])
			host.Env = append(os.Environ(), modeVariable+"=host", "PLUGIN_TEST_CHILD="+child, entry)
			host.Stderr = os.Stderr
			stdout, err := host.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := host.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = host.Process.Kill(); _ = host.Wait() })
			if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "watching\n" {
				t.Fatal(line, err)
			}
			if err := host.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			gone()
		})
	}
}

func TestOutputIsLogged(t *testing.T) {
	p, hook := newPlugin(t, "good", map[string]string{"fault": "print"})
	if _, err := discover(t, p); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"a line on stdout", "a line on stderr"} {
		awaitLogged(t, hook, line, "info discovery/plugin: says: "+line+" plugin.test")
	}
}

// awaitLogged waits until a line is logged.
func awaitLogged(t *testing.T, hook *logtest.Hook, part, want string) {
	t.Helper()
	for deadline := sandbox.Limit(); ; {
		if got := logged(hook, part); slices.Contains(got, want) {
			return
		} else if time.Now().After(deadline) {
			t.Fatalf("logged %q, want %q", got, want)
		}
		<-time.After(time.Millisecond)
	}
}

// TestConcurrency: callers of all kinds share a plugin that is killed repeatedly.
func TestConcurrency(t *testing.T) {
	p, _ := newPlugin(t, "good", map[string]string{"hosts": "a:1"})
	if _, err := discover(t, p); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for ctx.Err() == nil {
				hosts, err := p.Discover(ctx)
				if err == nil && text(hosts) != "a:1" {
					t.Errorf("found %v", hosts)
				}
			}
		})
		callers.Go(func() {
			for ctx.Err() == nil {
				_ = p.Watch(ctx, func(hosts []plan.Host) {
					if text(hosts) != "a:1" {
						t.Errorf("found %v", hosts)
					}
				})
			}
		})
	}
	for range 2 {
		signalChildren(t, syscall.SIGKILL)
		if got, err := discover(t, p); err == nil && got != "a:1" {
			t.Error(got)
		}
		for { // until it is up again
			if _, err := discover(t, p); err == nil {
				break
			}
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	cancel()
	callers.Wait()
}

func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		p, _ := newPlugin(b, "good", map[string]string{"hosts": "a:1"})
		if _, err := p.Discover(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		p.Close()
		b.StartTimer()
	}
}

func BenchmarkDiscover(b *testing.B) {
	p, _ := newPlugin(b, "good", map[string]string{"hosts": "a:1"})
	for b.Loop() {
		if _, err := p.Discover(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPush measures the time from a plugin's push, including one read of a pipe, until Poll
// has passed the list on.
func BenchmarkPush(b *testing.B) {
	feed := newFifo(b)
	p, _ := newPlugin(b, "good", map[string]string{"hosts": "a:1", "feed": feed})
	found := make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(b.Context())
	var polling sync.WaitGroup
	polling.Go(func() {
		_ = (&discovery.Poll{Source: p, Log: quietLog()}).Run(ctx, func([]plan.Host) { found <- struct{}{} })
	})
	receive(b, found, "first list")
	lists := []string{"a:2", "a:1"}
	for i := 0; b.Loop(); i++ {
		push(b, feed, lists[i%2])
		receive(b, found, "push")
	}
	cancel()
	polling.Wait()
}
