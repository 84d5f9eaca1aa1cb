// Package launchtest is the conformance kit of launch.Launcher: Run tests what the driver relies
// on, however the Launcher starts workers.
//
// It starts small shell scripts and needs sh, setsid and sleep where the launcher runs them, which
// must share the file system of the test.
package launchtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// Run runs the kit. newLauncher is called once for each test.
func Run(t *testing.T, newLauncher func(t *testing.T) launch.Launcher) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, launch.Launcher)
	}{
		{"EXE01_OutputIsSeparateAndExact", separateOutput},
		{"EXE02_ExitCode", exitCode},
		{"ExitZero", exitZero},
		{"Signal", signal},
		{"StartErrors", startErrors},
		{"ContextEndedBefore", endedBefore},
		{"StartedOnce", startedOnce},
		{"EnvironmentAndArguments", environment},
		{"Directory", directory},
		{"CommandInDirectory", inDirectory},
		{"StdinIsEmpty", stdin},
		{"OutputIsDrained", drained},
		{"WriterFails", writerFails},
		{"NoCore", noCore},
		{"CoreLimit", withCore},
		{"HurryEndsTheGrace", hurry},
		{"MoreTime", more},
		{"Look", look},
		{"LeftBehind", leftBehind},
		{"Many", many},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, newLauncher(t)) })
	}
	for _, e := range ends {
		t.Run(e.name, func(t *testing.T) { e.run(t, newLauncher(t)) })
	}
}

// script returns the Spec of a shell script with the arguments $1, $2, ….
func script(text string, args ...string) *launch.Spec {
	incarnation := rand.Text()
	return &launch.Spec{
		Incarnation: incarnation,
		Slot:        plan.SlotID{Host: "localhost"},
		Command:     append([]string{"sh", "-c", text, "sh"}, args...),
		Env:         []string{"PATH=" + os.Getenv("PATH"), "HVD_INCARNATION=" + incarnation},
	}
}

// runShort runs what ends by itself.
func runShort(t *testing.T, l launch.Launcher, s *launch.Spec) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	s.Stdout, s.Stderr = &out, &errOut
	err = l.Run(t.Context(), s, nil)
	return out.String(), errOut.String(), err
}

func wantExit(t *testing.T, err error, want launch.ExitError) {
	t.Helper()
	var exit *launch.ExitError
	if !errors.As(err, &exit) || *exit != want {
		t.Fatalf("Run returned %v (%T), want %v", err, err, &want)
	}
}

func separateOutput(t *testing.T, l launch.Launcher) {
	stdout, stderr, err := runShort(t, l, script(`printf 'a\nb\rc'; printf 'x\n\377y' >&2`))
	if err != nil || stdout != "a\nb\rc" || stderr != "x\n\xffy" {
		t.Fatalf("stdout %q, stderr %q, error %v", stdout, stderr, err)
	}
}

func exitCode(t *testing.T, l launch.Launcher) {
	s := script("")
	s.Command = []string{"false"}
	_, _, err := runShort(t, l, s)
	wantExit(t, err, launch.ExitError{Code: 1})
	_, _, err = runShort(t, l, script("exit 255"))
	wantExit(t, err, launch.ExitError{Code: 255})
	_, _, err = runShort(t, l, script(`printf 'old\nno data' >&2; exit 3`))
	wantExit(t, err, launch.ExitError{Code: 3, Said: "no data"})
}

func exitZero(t *testing.T, l launch.Launcher) {
	if _, _, err := runShort(t, l, script("exit 0")); err != nil {
		t.Fatalf("Run returned %v", err)
	}
}

func signal(t *testing.T, l launch.Launcher) {
	_, _, err := runShort(t, l, script("kill -KILL $$"))
	wantExit(t, err, killed)
}

func startErrors(t *testing.T, l launch.Launcher) {
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	missing := script("")
	missing.Command = []string{"no-such-program"}
	notExecutable := script("")
	notExecutable.Command = []string{plain}
	nothing := script("")
	nothing.Command = nil
	badDir := script("")
	badDir.Dir = filepath.Join(dir, "none")
	for name, s := range map[string]*launch.Spec{
		"missing": missing, "not executable": notExecutable, "nothing": nothing, "directory": badDir,
	} {
		err := l.Run(t.Context(), s, func(int) { t.Errorf("%s: was started", name) })
		var start *launch.StartError
		if !errors.As(err, &start) {
			t.Errorf("%s: Run returned %v (%T), want a *StartError", name, err, err)
			continue
		}
		text := err.Error()
		if len(s.Command) > 0 && !strings.Contains(text, s.Command[0]) || strings.Contains(text, "\n") {
			t.Errorf("%s: message %q", name, text)
		}
	}
}

func endedBefore(t *testing.T, l launch.Launcher) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("no longer wanted")
	cancel(cause)
	err := l.Run(ctx, script("exit 0"), func(int) { t.Error("was started") })
	var start *launch.StartError
	if !errors.As(err, &start) || !errors.Is(err, cause) {
		t.Fatalf("Run returned %v", err)
	}
}

func startedOnce(t *testing.T, l launch.Launcher) {
	var pids []int
	var out bytes.Buffer
	s := script("echo hello")
	s.Stdout = &out
	if err := l.Run(t.Context(), s, func(pid int) { pids = append(pids, pid) }); err != nil {
		t.Fatal(err)
	}
	if len(pids) != 1 || pids[0] <= 0 || out.String() != "hello\n" {
		t.Fatalf("started with %v, output %q", pids, out.String())
	}
}

func environment(t *testing.T, l launch.Launcher) {
	s := script(`printf '%s|' "$A" "$TWICE" "${HOME-unset}" "$HVD_INCARNATION" "$@"`, "a b", `$HOME "'\`, "")
	s.Env = append(s.Env, "A=x y\n\"$'", "TWICE=1", "TWICE=2")
	stdout, _, err := runShort(t, l, s)
	want := "x y\n\"$'|2|unset|" + s.Incarnation + `|a b|$HOME "'\||`
	if err != nil || stdout != want {
		t.Fatalf("output %q, want %q, error %v", stdout, want, err)
	}
}

func directory(t *testing.T, l launch.Launcher) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "prog"), []byte("#!/bin/sh\npwd -P\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	s := script("")
	s.Command = []string{"./prog"}
	s.Dir = dir
	if stdout, _, err := runShort(t, l, s); err != nil || stdout != dir+"\n" {
		t.Fatalf("output %q, want %q, error %v", stdout, dir, err)
	}
}

// A program that PATH lacks is found in the working directory; a program in PATH takes precedence.
func inDirectory(t *testing.T, l launch.Launcher) {
	dir := t.TempDir()
	for _, name := range []string{"train-of-this-folder", "true"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\necho here\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"train-of-this-folder": "here\n", "true": ""} {
		s := script("") // an incarnation runs once
		s.Command, s.Dir = []string{name}, dir
		if stdout, _, err := runShort(t, l, s); err != nil || stdout != want {
			t.Errorf("%s: output %q, error %v", name, stdout, err)
		}
	}
}

func stdin(t *testing.T, l launch.Launcher) {
	if stdout, _, err := runShort(t, l, script("cat; echo end")); err != nil || stdout != "end\n" {
		t.Fatalf("output %q, error %v", stdout, err)
	}
}

func drained(t *testing.T, l launch.Launcher) {
	const size = 1 << 20
	stdout, _, err := runShort(t, l, script(fmt.Sprintf("head -c %d /dev/zero; exit 3", size)))
	wantExit(t, err, launch.ExitError{Code: 3})
	if len(stdout) != size {
		t.Fatalf("%d bytes of output, want %d", len(stdout), size)
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("no") }

// A worker must not block, nor die of SIGPIPE, because we cannot pass on what it prints.
func writerFails(t *testing.T, l launch.Launcher) {
	s := script("head -c 300000 /dev/zero && exit 4")
	s.Stdout = failingWriter{}
	wantExit(t, l.Run(t.Context(), s, nil), launch.ExitError{Code: 4})
}

// HeldPipe makes a named pipe for processes to hold open. await reads n "ready" lines that they
// write to it, and can be called again; gone waits until no process holds the pipe.
func HeldPipe(t *testing.T) (path string, await func(n int), gone func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "held")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := os.OpenFile(path, os.O_WRONLY, 0) // no end of file before the processes have come
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pipe.Close(); ours.Close() })
	await = func(n int) {
		t.Helper()
		if _, err := io.ReadFull(pipe, make([]byte, n*len("ready\n"))); err != nil {
			t.Fatalf("the processes are not ready: %v", err)
		}
		ours.Close()
	}
	gone = func() {
		t.Helper()
		if rest, err := io.ReadAll(pipe); err != nil || len(rest) > 0 {
			t.Fatalf("processes are left: %v (read %q)", err, rest)
		}
	}
	return path, await, gone
}

// end is a way in which a worker ends. Nothing of it may be left afterwards.
type end struct {
	name  string
	grace time.Duration
	// text is a script with a pipe, open as descriptor 9, to which ready processes of it write
	// "ready" lines.
	text  string
	ready int
	stop  bool // the context ends once the ready processes have written
	want  launch.ExitError
	// stdout is what the script prints.
	stdout string
}

const (
	outsiders = `
	setsid sh -c 'trap "" TERM; echo ready >&9; while :; do sleep 1; done' >/dev/null 2>&1 &
	env -i PATH="$PATH" setsid sh -c 'trap "" TERM; echo ready >&9; while :; do sleep 1; done' >/dev/null 2>&1 &
`
	unsigned = `(env -i /usr/bin/setsid /bin/sh -c 'trap "" TERM; echo ready >&9; while :; do /bin/sleep 1; done' >/dev/null 2>&1 &)
`
)

var (
	terminated = launch.ExitError{Code: 143, Signal: syscall.SIGTERM}
	killed     = launch.ExitError{Code: 137, Signal: syscall.SIGKILL}
)

var ends = []end{
	{name: "EXE03_EndOfContextIsSIGTERM", grace: time.Hour, ready: 1, stop: true, want: terminated,
		text: `echo ready >&9; exec sleep 1000`},
	{name: "GraceLetsFinish", grace: time.Hour, ready: 1, stop: true, stdout: "saved\n",
		text: `trap 'echo saved; exit 0' TERM; echo ready >&9; while :; do sleep 0.01; done`},
	{name: "GraceRunsOut", grace: 50 * time.Millisecond, ready: 1, stop: true, want: killed,
		text: `trap '' TERM; echo ready >&9; while :; do sleep 1; done`},
	{name: "NoGrace", ready: 1, stop: true, want: killed,
		text: `trap 'exit 0' TERM; echo ready >&9; while :; do sleep 0.01; done`},
	// A child in the group holds the output open: it must neither live on nor delay the news.
	{name: "ExitKillsGroup", ready: 1, want: launch.ExitError{Code: 7}, stdout: "last words\n",
		text: `trap '' TERM; sleep 1000 & echo last words; echo ready >&9; exit 7`},
	// A child that left the group holds the output open. The worker exits when the child signals
	// that it runs.
	{name: "ExitFreesOutputHeldFromOutside", ready: 1, want: launch.ExitError{Code: 7},
		text: `trap 'exit 7' USR1
		setsid sh -c 'echo ready >&9; kill -USR1 "$1"; exec sleep 1000' sh $$ &
		wait`},
	// Children have left the group, one of them without the environment.
	{name: "StopKillsTree", ready: 3, stop: true, want: killed, text: outsiders + `echo ready >&9; wait`},
	// The same, when the worker itself obeys and they lose their parent.
	{name: "StopKillsTreeOfObedient", grace: time.Hour, ready: 3, stop: true, want: terminated, text: outsiders + `echo ready >&9; wait`},
	// A daemon no longer shares a group or a parent with the worker.
	{name: "StopKillsOrphanBySign", grace: time.Hour, ready: 2, stop: true, want: terminated,
		text: `(setsid sh -c 'echo ready >&9; exec sleep 1000' >/dev/null 2>&1 &); echo ready >&9; exec sleep 1000`},
	// The same for a daemon that executes another program again and again: at moments its
	// environment is empty.
	{name: "StopKillsOrphanThatIsRestless", grace: time.Hour, ready: 2, stop: true, want: terminated,
		text: `export AGAIN='exec sh -c "$AGAIN"'
		(setsid sh -c 'echo ready >&9; eval "$AGAIN"' >/dev/null 2>&1 &); echo ready >&9; exec sleep 1000`},
	// A daemon shares no group, parent, session or environment with the worker.
	{name: "StopKillsOrphanWithoutSign", grace: time.Hour, ready: 2, stop: true, want: terminated,
		text: unsigned + `echo ready >&9; exec sleep 1000`},
	// The same, when the worker ends by itself, once the daemon is there.
	{name: "ExitKillsOrphanWithoutSign", grace: time.Hour, ready: 1, want: launch.ExitError{Code: 7},
		text: `trap 'exit 7' USR1
		(env -i W=$$ setsid sh -c 'echo ready >&9; kill -USR1 "$W"; exec sleep 1000' >/dev/null 2>&1 &)
		while :; do sleep 0.01; done`},
}

func (e end) run(t *testing.T, l launch.Launcher) {
	path, await, gone := HeldPipe(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var stdout bytes.Buffer
	s := script(`exec 9>"$1"; `+e.text, path)
	s.Grace, s.Stdout = e.grace, &stdout
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx, s, nil) }()
	await(e.ready)
	if e.stop {
		cancel()
	}
	if err := <-ended; err != nil || e.want != (launch.ExitError{}) {
		wantExit(t, err, e.want)
	}
	if stdout.String() != e.stdout {
		t.Errorf("output %q, want %q", stdout.String(), e.stdout)
	}
	gone()
}

func noCore(t *testing.T, l launch.Launcher) {
	if stdout, _, err := runShort(t, l, script("ulimit -c")); err != nil || stdout != "0\n" {
		t.Fatalf("output %q, error %v", stdout, err)
	}
}

func withCore(t *testing.T, l launch.Launcher) {
	s := script("ulimit -c; ulimit -Hc")
	s.CoreLimit = launch.UnlimitedCore
	stdout, _, err := runShort(t, l, s)
	if words := strings.Fields(stdout); err != nil || len(words) != 2 || words[0] != words[1] {
		t.Fatalf("output %q, error %v: want the hard limit", stdout, err)
	}
}

func hurry(t *testing.T, l launch.Launcher) {
	s := script("trap '' TERM; echo ready; while :; do sleep 1; done")
	out, ours := pipe(t)
	quick := make(chan struct{})
	s.Grace, s.Hurry, s.Stdout = time.Hour, quick, ours
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx, s, nil) }()
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	cancel()
	close(quick)
	wantExit(t, <-ended, killed)
}

// pipe returns the two ends of a pipe, which it closes when the test ends.
func pipe(t *testing.T) (out, in *os.File) {
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close(); in.Close() })
	return out, in
}

// leftBehind: Left may be called once for a program that ends with status 0 and leaves processes
// behind. It is not called for a program that fails, or that has waited for its children.
func leftBehind(t *testing.T, l launch.Launcher) {
	for text, leaves := range map[string]bool{
		"sleep 600 >/dev/null 2>&1 & sleep 600 >/dev/null 2>&1 & exit 0": true,
		"sleep 600 >/dev/null 2>&1 & exit 3":                             false,
		"true & wait":                                                    false,
	} {
		s := script(text)
		told := make(chan []string, 2)
		s.Left = func(processes []string) { told <- processes }
		err := l.Run(t.Context(), s, nil)
		if exit, failed := errors.AsType[*launch.ExitError](err); err != nil && (!failed || exit.Code != 3) {
			t.Fatal(err)
		}
		if len(told) == 0 {
			continue // it does not know
		}
		if left := <-told; len(told) > 0 || !leaves || len(left) != 2 || !strings.Contains(left[0], ", process ") {
			t.Errorf("%s: told of %q, and %d times more", text, left, len(told))
		}
	}
}

// look: a process that lives is not reported as dying. A process that is being killed may be
// reported, with the signal, and its end is reported as usual.
func look(t *testing.T, l launch.Launcher) {
	s := script("echo ready; while :; do sleep 1; done")
	out, ours := pipe(t)
	looks, started, told := make(chan struct{}), make(chan int, 1), make(chan syscall.Signal, 2)
	s.Look, s.Stdout = looks, ours
	s.Dying = func(_ string, by syscall.Signal) { told <- by }
	ended := make(chan error, 1)
	go func() { ended <- l.Run(t.Context(), s, func(pid int) { started <- pid }) }()
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case looks <- struct{}{}:
		case err := <-ended:
			t.Fatal(err)
		}
	}
	if len(told) > 0 {
		t.Errorf("a process that lives was told of as killed by %v", <-told)
	}
	_ = syscall.Kill(-<-started, syscall.SIGKILL)
	for {
		select {
		case looks <- struct{}{}:
			continue
		case err := <-ended:
			wantExit(t, err, killed)
		}
		break
	}
	if len(told) > 1 {
		t.Error("it was told of twice")
	}
	for range len(told) {
		if by := <-told; by != syscall.SIGKILL {
			t.Errorf("it was told of as killed by %v", by)
		}
	}
}

// more: a process whose grace period is restarted again and again is not killed before the last one
// ends. On a busy machine, a restart can come too late for a short period.
func more(t *testing.T, l launch.Launcher) {
	const shortest, longest = time.Second, 16 * time.Second
	for grace := shortest; !outlives(t, l, grace); grace *= 2 {
		if grace == longest {
			t.Fatalf("it was killed although its grace period of %v was restarted every 100 ms", grace)
		}
	}
}

// outlives returns whether a process outlives three grace periods that are restarted again and
// again. It is killed when the last one ends.
func outlives(t *testing.T, l launch.Launcher, grace time.Duration) bool {
	s := script(`trap '' TERM; while :; do echo a line; sleep 0.1; done`)
	out, ours := pipe(t)
	again := wake.New()
	s.Grace, s.More, s.Stdout = grace, again, ours
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx, s, nil); ours.Close() }()
	buf := make([]byte, 100)
	if _, err := out.Read(buf); err != nil {
		t.Fatal(err)
	}
	cancel()
	lives := true
	for begin := time.Now(); lives && time.Since(begin) < 3*grace; again.Set() {
		_, err := out.Read(buf)
		lives = err == nil
	}
	go io.Copy(io.Discard, out) // until its end
	wantExit(t, <-ended, killed)
	return lives
}

func many(t *testing.T, l launch.Launcher) {
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			var out bytes.Buffer
			s := script(`echo "$1"; exit "$1"`, fmt.Sprint(i+1))
			s.Stdout = &out
			var exit *launch.ExitError
			err := l.Run(t.Context(), s, nil)
			if !errors.As(err, &exit) || exit.Code != i+1 || out.String() != fmt.Sprintln(i+1) {
				t.Errorf("worker %d: output %q, error %v", i, out.String(), err)
			}
		})
	}
	wg.Wait()
}
