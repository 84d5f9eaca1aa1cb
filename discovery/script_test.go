package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// helperScript makes this test's binary a process that only runs a script, for tests to kill.
const helperScript = "DISCOVERY_TEST_SCRIPT"

func TestMain(m *testing.M) {
	if command := os.Getenv(helperScript); command != "" {
		_, err := Script{Command: command}.Discover(context.Background())
		fmt.Fprintln(os.Stderr, "the script ended first:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func silent() logrus.FieldLogger {
	log, _ := logtest.NewNullLogger()
	return log
}

func discover(t *testing.T, command string) (list, error) {
	t.Helper()
	return Script{Command: command, Log: silent()}.Discover(t.Context())
}

func TestDSCScriptOutput(t *testing.T) {
	const d = 5
	for _, c := range []struct{ name, output, want string }{
		{"DSC-01", ``, ""},
		{"DSC-02", `host-1`, "host-1:5"},
		{"DSC-03", `host-1:2`, "host-1:2"},
		{"DSC-04", `host-1\nhost-5`, "host-1:5,host-5:5"},
		{"DSC-05", `host-1:2\nhost-4:3`, "host-1:2,host-4:3"},
		{"DSC-06", `\nhost-1:2\nhost-4:3`, "host-1:2,host-4:3"},
		{"DSC-07", `host-1:2\n\nhost-4:3`, "host-1:2,host-4:3"},
		{"DSC-08", `host-1:2\nhost-4:3\n`, "host-1:2,host-4:3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := Script{Command: "printf '" + c.output + "'", DefaultSlots: d, Log: silent()}
			got, err := s.Discover(t.Context())
			var want list
			if c.want != "" {
				want = hostList(c.want)
			}
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("got %v, %v; want %v", got, err, want)
			}
		})
	}
}

func TestScriptZeroValue(t *testing.T) {
	if got, err := discover(t, "echo a"); err != nil || !slices.Equal(got, hostList("a:1")) {
		t.Errorf("a line without slots: got %v, %v", got, err)
	}
	if _, err := (Script{}).Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "no script") {
		t.Errorf("no command: got %v", err)
	}
	if defaultScriptTimeout != 30*time.Second {
		t.Errorf("the default timeout is %v", defaultScriptTimeout)
	}
}

func TestScriptIsRunByAShell(t *testing.T) {
	t.Setenv("DISCOVERY_TEST_HOST", "from-env")
	got, err := discover(t, `if read line; then echo stdin:9; fi
		printf '%s\n' "$DISCOVERY_TEST_HOST:3" | cat; echo here:$((1+1))`)
	if err != nil || !slices.Equal(got, hostList("from-env:3,here:2")) {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestScriptHasItsEnv(t *testing.T) {
	t.Setenv("ROOM", "3")
	s := Script{Command: `echo "$NAME:$ROOM"`, Env: []string{"NAME=a"}}
	hosts, err := s.Discover(t.Context())
	if want := hostList("a:3"); err != nil || !slices.Equal(hosts, want) {
		t.Errorf("got %v, %v, want %v", hosts, err, want)
	}
}

func TestScriptErrors(t *testing.T) {
	for _, c := range []struct {
		name, command string
		says          []string
	}{
		{"exit status", "echo a; exit 3", []string{"exited with status 3"}},
		{"last line of stderr", "echo first >&2; echo the reason >&2; exit 1", []string{"exited with status 1", ": the reason"}},
		{"a crash", "printf 'panic: the reason\\n\\ngoroutine 1 [running]:\\nmain.main()\\n' >&2; exit 2", []string{": panic: the reason"}},
		{"signal", "kill -9 $$", []string{"was killed by signal 9 (killed)"}},
		{"no such command", "/nowhere/at-all", []string{"exited with status 127", "/nowhere/at-all"}},
		{"parse", "echo a:1; echo; echo b:x", []string{"line 3", `"b:x"`}},
		{"too much output", "yes a:1", []string{"more than 1048576 bytes"}},
		{"too much output by one", "head -c 1048577 /dev/zero | tr '\\0' '\\n'", []string{"more than 1048576 bytes"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := discover(t, c.command)
			if err == nil || got != nil || !strings.HasPrefix(err.Error(), "discovery: ") {
				t.Fatalf("got %v, %v", got, err)
			}
			for _, text := range c.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%v does not say %q", err, text)
				}
			}
		})
	}
	t.Run("parse errors are typed", func(t *testing.T) {
		_, err := discover(t, "echo a:1; echo b:x")
		var parse *plan.ParseError
		if !errors.As(err, &parse) || parse.Line != 2 {
			t.Errorf("got %v", err)
		}
	})
}

func TestScriptMayPrintExactlyItsBound(t *testing.T) {
	got, err := discover(t, "echo a:1; head -c 1048572 /dev/zero | tr '\\0' '\\n'")
	if err != nil || !slices.Equal(got, hostList("a:1")) {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestScriptStderrGoesToTheLog(t *testing.T) {
	log, hook := logtest.NewNullLogger()
	long := strings.Repeat("x", 3*maxStderrLine)
	s := Script{Command: "echo one >&2; echo a:1; printf 'two\\n\\n" + long + "\\nno end' >&2", Log: log}
	if got, err := s.Discover(t.Context()); err != nil || len(got) != 1 {
		t.Fatalf("got %v, %v", got, err)
	}
	var said []string
	for _, e := range hook.AllEntries() {
		said = append(said, strings.TrimPrefix(e.Message, "discovery: script says: "))
	}
	if want := []string{"one", "two", long[:maxStderrLine], "no end"}; !slices.Equal(said, want) {
		t.Errorf("logged %q", said)
	}
}

// fifo creates a named pipe by which a test and a script wait for each other.
func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// openUp waits until a script has opened the FIFO and printed "up" to it.
func openUp(t *testing.T, fifo string) io.Reader {
	t.Helper()
	r, err := os.Open(fifo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	if _, err := io.ReadFull(r, make([]byte, len("up\n"))); err != nil {
		t.Fatal(err)
	}
	return r
}

// stubborn returns a script that ignores SIGTERM, with a child that does so too. Both hold the FIFO
// open for writing until they are gone; the child first prints "up".
func stubborn(fifo string) (command string) {
	return `trap '' TERM; exec 3>` + fifo + `; (echo up >&3; sleep 1000; :) & wait; echo a:1`
}

// expectGone checks that the script prints nothing more, and waits until all its processes are
// gone.
func expectGone(t *testing.T, r io.Reader) {
	t.Helper()
	rest, err := io.ReadAll(r)
	if err != nil || len(rest) > 0 {
		t.Errorf("read %q, %v; want the end", rest, err)
	}
}

func TestScriptTimeoutKillsTheGroup(t *testing.T) {
	fifo := fifo(t)
	for timeout := 250 * time.Millisecond; ; timeout *= 2 { // until it is long enough for the child to come up
		r, err := os.OpenFile(fifo, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got, err := Script{Command: stubborn(fifo), Timeout: timeout, Log: silent()}.Discover(t.Context())
		if err == nil || got != nil || !strings.Contains(err.Error(), "killed: it took longer than "+timeout.String()) {
			t.Fatalf("got %v, %v", got, err)
		}
		r.SetReadDeadline(sandbox.Limit())
		said, err := io.ReadAll(r) // the end comes only when no process holds the FIFO
		if err != nil {
			t.Fatalf("somebody is left: %v", err)
		}
		if string(said) == "up\n" {
			return
		}
	}
}

func TestScriptCancelKillsTheGroup(t *testing.T) {
	fifo := fifo(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	result := make(chan error, 1)
	go func() {
		_, err := Script{Command: stubborn(fifo), Log: silent()}.Discover(ctx)
		result <- err
	}()
	r := openUp(t, fifo)
	enough := errors.New("enough")
	cancel(enough)
	if err := <-result; !errors.Is(err, enough) {
		t.Errorf("got %v, want the cause", err)
	}
	expectGone(t, r)
}

func TestScriptLeavesNothingBehind(t *testing.T) {
	up, goOn := fifo(t), fifo(t)
	result := make(chan error, 1)
	go func() {
		got, err := discover(t, `(exec 3>`+up+`; echo up >&3; exec sleep 1000) & read line <`+goOn+`; echo a:1`)
		if err == nil && !slices.Equal(got, hostList("a:1")) {
			err = fmt.Errorf("got %v", got)
		}
		result <- err
	}()
	r := openUp(t, up)
	if err := os.WriteFile(goOn, []byte("go on\n"), 0); err != nil {
		t.Fatal(err)
	}
	// The child holds the script's stdout too, but is killed with the group.
	if err := <-result; err != nil {
		t.Error(err)
	}
	expectGone(t, r)
}

// TestScriptWhoseStdoutIsHeldFails: a process that has left the group can hold stdout and print
// more, so the output may be half a list.
func TestScriptWhoseStdoutIsHeldFails(t *testing.T) {
	up, goOn := fifo(t), fifo(t)
	got, err := discover(t, `setsid sh -c 'exec 3>`+up+`; echo up >&3; read line <`+goOn+`; echo b:1' &
		read line <`+up+`; echo a:1`)
	if err == nil || !strings.Contains(err.Error(), "left a process behind") {
		t.Errorf("got %v, %v (setsid, of util-linux, is needed)", got, err)
	}
	if err := os.WriteFile(goOn, []byte("go on\n"), 0); err != nil { // waits for its reader, and lets it end
		t.Fatal(err)
	}
}

// TestScriptSurvivesTheEndOfThreads: scripts are tied to the thread that forked them, which must
// not end before they do.
func TestScriptSurvivesTheEndOfThreads(t *testing.T) {
	stop := make(chan struct{})
	churned := make(chan struct{})
	go func() {
		defer close(churned)
		for {
			select {
			case <-stop:
				return
			default:
			}
			done := make(chan struct{})
			go func() { // a goroutine that ends while it is locked to a thread ends the thread
				runtime.LockOSThread()
				close(done)
			}()
			<-done
		}
	}()
	defer func() { close(stop); <-churned }()
	for range 20 {
		if got, err := discover(t, "for i in 1 2 3 4 5; do /bin/true; done; echo a:1"); err != nil || len(got) != 1 {
			t.Fatalf("got %v, %v", got, err)
		}
	}
}

func TestScriptDiesWithThisProcess(t *testing.T) {
	fifo := fifo(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), helperScript+"=exec 3>"+fifo+"; echo up >&3; exec sleep 1000")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := openUp(t, fifo)
	cmd.Process.Kill()
	cmd.Wait()
	expectGone(t, r)
	if stderr.Len() > 0 {
		t.Error(stderr.String())
	}
}

func TestScriptWithEndedContextIsNotRun(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	touched := filepath.Join(t.TempDir(), "touched")
	if _, err := (Script{Command: "touch " + touched}).Discover(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(touched); err == nil {
		t.Error("the script was run")
	}
}

func TestExampleScripts(t *testing.T) {
	dir := filepath.Join("..", "examples", "discover")
	if got, err := discover(t, dir+"/from-file.sh"); err != nil || !slices.Equal(got, hostList("localhost:2,127.0.0.1:2")) {
		t.Errorf("from-file.sh: got %v, %v", got, err)
	}
	hosts := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(hosts, []byte("b:1\na # two\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := discover(t, dir+"/from-file.sh "+hosts); err != nil || !slices.Equal(got, hostList("b:1,a:1")) {
		t.Errorf("from-file.sh of another file: got %v, %v", got, err)
	}
	if got, err := discover(t, dir+"/from-file.sh "+hosts+".gone"); err == nil {
		t.Errorf("from-file.sh of no file: got %v", got)
	}
	if got, err := discover(t, dir+"/discover.sh localhost:3 no-such-host.invalid:4 127.0.0.1"); err != nil ||
		!slices.Equal(got, hostList("localhost:3,127.0.0.1:1")) {
		t.Errorf("discover.sh: got %v, %v", got, err)
	}
	if got, err := discover(t, dir+"/discover.sh"); err == nil || !strings.Contains(err.Error(), "usage") {
		t.Errorf("discover.sh without candidates: got %v, %v", got, err)
	}
}

// TestRest: bytes in a pipe are read even after a deadline, and its end is noticed.
func TestRest(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	look := func(what string, most int, text string, over bool) {
		t.Helper()
		if err := r.SetReadDeadline(time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%s: read: %v", what, err)
		}
		if out, ended := rest(r, most); string(out) != text || ended != over {
			t.Errorf("%s: %q, ended %v", what, out, ended)
		}
	}
	look("nothing", 10, "", false)
	fmt.Fprint(w, "a:1\nb:2\n")
	look("too much", 4, "a:1\n", false)
	look("held", 10, "b:2\n", false)
	fmt.Fprint(w, "c:3\n")
	w.Close()
	look("over", 10, "c:3\n", true)
}
