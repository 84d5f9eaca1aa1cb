package launch_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/python"
)

// TestTalk: what a process has written to its socket is read before its end is reported, even if a
// child holds the socket open; cleanup is called before Run returns.
func TestTalk(t *testing.T) {
	var heard, steps []string
	spec := &launch.Spec{
		Incarnation: "talks",
		Command:     []string{"sh", "-c", `read answer <&3; sleep 1000 <&3 >/dev/null 2>&1 & echo "$answer, $HVD_WORKER_SOCKET" >&3; kill -9 $$`},
		Env:         []string{"PATH=/usr/bin:/bin", "HVD_INCARNATION=talks", plan.EnvWorkerSocket + "=7"},
		Talk: func(_ context.Context, pid int, conn net.Conn) func() {
			if pid <= 0 {
				t.Errorf("process %d", pid)
			}
			if at := conn.LocalAddr().String(); at != plan.SocketName("talks") {
				t.Errorf("the launcher's end is %q", at)
			}
			if _, err := conn.Write([]byte("hello\n")); err != nil {
				t.Error(err)
			}
			text, err := io.ReadAll(conn)
			if err != nil {
				t.Error(err)
			}
			heard = append(heard, string(text))
			if _, err := conn.Write([]byte("too late")); err == nil {
				t.Error("the end of the process that has ended can be written to")
			}
			steps = append(steps, "talked")
			return func() { steps = append(steps, "clean") }
		},
		Ended: func(error) { steps = append(steps, "ended") },
	}
	if err := (launch.Local{}).Run(t.Context(), spec, nil); err == nil {
		t.Error("the process was not killed")
	}
	if len(heard) != 1 || heard[0] != "hello, 3\n" {
		t.Errorf("heard %q", heard)
	}
	if got := strings.Join(steps, " "); got != "talked ended clean" {
		t.Error(got)
	}
}

// TestNoTalk: without Talk, a process inherits neither a socket nor its variable.
func TestNoTalk(t *testing.T) {
	var out bytes.Buffer
	err := launch.Local{}.Run(t.Context(), &launch.Spec{
		Command: []string{"sh", "-c", `echo "${HVD_WORKER_SOCKET-none}"; : 2>/dev/null >&3 && echo open`},
		Env:     []string{"PATH=/usr/bin:/bin", plan.EnvWorkerSocket + "=3"}, Stdout: &out,
	}, nil)
	if out.String() != "none\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}

// TestTalkOfNobody: Talk is not called for a process that could not be started.
func TestTalkOfNobody(t *testing.T) {
	err := launch.Local{}.Run(t.Context(), &launch.Spec{
		Command: []string{"/no/such"}, Talk: func(context.Context, int, net.Conn) func() {
			t.Error("Talk was called")
			return nil
		},
	}, nil)
	if err == nil {
		t.Error("it was started")
	}
}

// TestEachVariableOnce: a worker's environment has each variable once, because programs differ in
// which of two values they use.
func TestEachVariableOnce(t *testing.T) {
	home := t.TempDir()
	mine := []string{"PATH=/usr/bin:/bin", "HOME=" + home, "PYTHONPATH=/mine", "PYTHONPATH=/other",
		plan.EnvWorkerSocket + "=7", "HVD_INCARNATION=old", "HVD_INCARNATION=once"}
	var out bytes.Buffer
	err := launch.Local{}.Run(t.Context(), &launch.Spec{
		Incarnation: "once", Command: []string{"cat", "/proc/self/environ"}, Env: mine, Stdout: &out,
		Talk:    func(context.Context, int, net.Conn) func() { return nil },
		Prepare: func(env []string) []string { return python.Environ(env, "cat", false, nil) },
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]string)
	for entry := range strings.SplitSeq(strings.Trim(out.String(), "\x00"), "\x00") {
		name, value, _ := strings.Cut(entry, "=")
		if old, twice := seen[name]; twice {
			t.Errorf("%s is there twice: %s and %s", name, old, value)
		}
		seen[name] = value
	}
	for _, entry := range mine {
		if name, _, _ := strings.Cut(entry, "="); seen[name] == "" {
			t.Errorf("%s is not there", name)
		}
	}
	if seen["HVD_INCARNATION"] != "once" || !strings.HasPrefix(seen["PYTHONPATH"], "/other:"+home) {
		t.Error(seen)
	}
}
