package proc

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// TestMemoryKills: the kernel's count since a worker began is reported, with the limit.
func TestMemoryKills(t *testing.T) {
	dir := t.TempDir()
	below := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(below, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	events := func(n string) { write("memory.events", "low 0\noom 7\noom_kill "+n+"\noom_group_kill 0\n") }
	for _, group := range []string{".", "a", "a/b"} {
		write(filepath.Join(group, "cgroup.procs"), "")
	}
	events("2")
	write("memory.max", "314572800\n")
	write("memory.current", "314000000\n")
	k := watchMemory(below) // the controller is enabled in the parent
	if why := k.why(); why != "" {
		t.Errorf("before anything is killed: %q", why)
	}
	events("3")
	if got, want := k.why(), "the kernel has killed processes for lack of memory in its cgroup (limit 300 MiB)"; got != want {
		t.Errorf("version 2: %q, want %q", got, want)
	}
	write("memory.max", "max\n")
	if got, want := k.why(), "the kernel has killed processes for lack of memory in its cgroup"; got != want {
		t.Errorf("without a limit: %q, want %q", got, want)
	}
	one := t.TempDir()
	k = memoryKills{dir: one, files: memoryFiles1}
	for name, text := range map[string]string{
		"cgroup.procs": "", "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
		"memory.usage_in_bytes": "1073000000\n", "memory.limit_in_bytes": "1073741824\n", "memory.stat": "cache 0\n",
	} {
		if err := os.WriteFile(filepath.Join(one, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	k.file = killsFile(one)
	if got, want := k.why(), "the kernel has killed processes for lack of memory in its cgroup (limit 1024 MiB)"; got != want {
		t.Errorf("version 1: %q, want %q", got, want)
	}
	if got := killsFile(""); got != "" {
		t.Errorf("without a cgroup: %q", got)
	}
}

// TestPass: a signal reaches the process that handles it, even behind a shell, and ends no process.
func TestPass(t *testing.T) {
	for _, c := range []struct {
		name, script string
		want         int
	}{
		{"the process", "trap 'echo got' USR1; echo ready; read x; :", 1},
		{"behind a shell", "sh -c 'trap \"echo got\" USR1; echo ready; read x; :'; :", 1},
		{"none", "echo ready; read x; echo got", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command("sh", "-c", c.script)
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := StartSession(cmd); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewReader(out)
			if line, err := lines.ReadString('\n'); line != "ready\n" {
				t.Fatalf("%q, %v", line, err)
			}
			if n := Pass(cmd.Process.Pid, syscall.SIGUSR1); n != c.want {
				t.Errorf("passed to %d processes, want %d", n, c.want)
			}
			in.Close() // read returns, and the shell handles its signal
			if line, err := lines.ReadString('\n'); line != "got\n" {
				t.Errorf("it says %q, %v", line, err)
			}
			if err := WaitSession(cmd); err != nil {
				t.Error(err)
			}
		})
	}
}
