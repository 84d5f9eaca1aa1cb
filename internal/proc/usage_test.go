package proc

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

func TestUsageOf(t *testing.T) {
	held := make([]byte, 64<<20)
	for i := 0; i < len(held); i += 4096 {
		held[i] = 1
	}
	u := UsageOf(os.Getpid())
	if u.Resident < 64<<20 || u.Limit == 0 || u.Used == 0 || u.Used > u.Limit {
		t.Errorf("%+v", u)
	}
	if held[4096] != 1 {
		t.Error("the memory is gone")
	}
	if u := UsageOf(1 << 30); u != (Usage{}) {
		t.Errorf("a process that is not there uses %+v", u)
	}
}

func TestParseUsage(t *testing.T) {
	stat := "42 (a) b) S 1 42 42 0 -1 4194560 100 0 0 0 150 50 20 5 20 0 4 0 1000 200000 300 18446744073709551615"
	processor, resident := parseUsage(parseStat([]byte(stat)))
	if processor != 2250*time.Millisecond || resident != 300*uint64(os.Getpagesize()) {
		t.Errorf("%v, %d bytes", processor, resident)
	}
}

// TestGroupMemory: the group with the least memory left counts, even if it is above that of the
// process, and a cache that the kernel can drop does not count as used.
func TestGroupMemory(t *testing.T) {
	for name, c := range map[string]struct {
		own, kind, options string
		files              memoryFiles
		unlimited          string
	}{
		"version 1": {"5:cpu,memory:/job/worker\n0::/\n", "cgroup", "rw,memory", memoryFiles1, "9223372036854771712"},
		"version 2": {"0::/job/worker\n", "cgroup2", "rw", memoryFiles2, "max"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			write := func(dir, file, text string) {
				t.Helper()
				if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, dir, file), []byte(text+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			for dir, of := range map[string][3]string{
				".": {"5000", c.unlimited, "anon 1"}, "job": {"900", "1000", c.files.inactive + " 100"}, "job/worker": {"300", c.unlimited, "anon 1"},
			} {
				write(dir, "cgroup.procs", "")
				write(dir, c.files.current, of[0])
				write(dir, c.files.limit, of[1])
				write(dir, c.files.stat, of[2])
			}
			mounts := "30 1 0:20 / /other rw - tmpfs tmpfs rw\n31 1 0:21 / " + root + " rw,nosuid shared:9 - " + c.kind + " cgroup " + c.options + "\n"
			if got := groupMemory(memoryGroup(c.own, mounts)); got != (memory{800, 1000}) {
				t.Errorf("%+v", got)
			}
			if got := groupMemory(memoryGroup("0::/\n", "")); got != (memory{}) {
				t.Errorf("without a mounted hierarchy: %+v", got)
			}
		})
	}
}

func TestTightest(t *testing.T) {
	machine := parseMeminfo("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    400 kB\n")
	if machine != (memory{600 * 1024, 1000 * 1024}) {
		t.Errorf("%+v", machine)
	}
	if used, limit := tightest(machine, memory{5, 10}, memory{7, 0}); used != 5 || limit != 10 {
		t.Errorf("%d of %d", used, limit)
	}
}

// TestUsageOfDescendants: what a grandchild uses is counted, a search serves for a while, and a
// process that has the number of a descendant that has ended is not one.
func TestUsageOfDescendants(t *testing.T) {
	cmd := exec.Command("sh", "-c", "(cat; true) | cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // all of them run
		t.Fatal(err)
	}
	var found tree
	now := time.Now()
	all := found.below(cmd.Process.Pid, now)
	names := 0
	for _, m := range all {
		if Program(m.pid) == Program(all[len(all)-1].pid) {
			names++
		}
	}
	if len(all) != 3 || names != 2 { // a shell and two cats
		t.Errorf("descendants %v", all)
	}
	var u, other Usage
	for _, m := range all {
		u.add(m.pid, m.birth)
		other.add(m.pid, m.birth+"0")
	}
	if u.Resident == 0 || other != (Usage{}) {
		t.Errorf("%+v, of other births %+v", u, other)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if again := found.below(cmd.Process.Pid, now.Add(searchPause-1)); len(again) != 3 {
		t.Errorf("descendants %v before the next search", again)
	}
	if after := found.below(cmd.Process.Pid, now.Add(searchPause)); len(after) != 0 {
		t.Errorf("descendants %v of an ended process", after)
	}
	circle := family{7: {{8, "1"}}, 8: {{9, "1"}}, 9: {{8, "2"}, {7, "2"}}}
	if round := circle.below(7); len(round) != 2 {
		t.Errorf("descendants %v", round)
	}
}

// BenchmarkUsageOf measures a process with as many threads as a program with PyTorch has.
func BenchmarkUsageOf(b *testing.B) {
	const inner = "PROC_TEST_THREADS"
	if os.Getenv(inner) != "" {
		for range 64 {
			go func() {
				runtime.LockOSThread()
				select {}
			}()
		}
		os.Stdout.WriteString("x")
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkUsageOf$")
	cmd.Env = append(os.Environ(), inner+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if u := UsageOf(cmd.Process.Pid); u.Resident == 0 {
			b.Fatal("it has ended")
		}
	}
	in.Close()
	io.Copy(io.Discard, out)
	if err := cmd.Wait(); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkFamilies measures the search for all descendants, which UsageOf makes once in
// searchPause.
func BenchmarkFamilies(b *testing.B) {
	var found family
	for b.Loop() {
		found = families()
	}
	n := 0
	for _, all := range found {
		n += len(all)
	}
	b.ReportMetric(float64(n), "processes")
}

// TestHasChildren: a process without children, such as most workers, need not search its threads
// for them.
func TestHasChildren(t *testing.T) {
	const inner = "PROC_TEST_CHILDREN"
	if os.Getenv(inner) == "" { // this process may have children of other tests
		cmd := exec.Command(os.Args[0], "-test.run=^TestHasChildren$")
		cmd.Env = append(os.Environ(), inner+"=1")
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		return
	}
	if hasChildren() {
		t.Error("before the first child")
	}
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if !hasChildren() {
		t.Error("with a child")
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if hasChildren() {
		t.Error("after the end of the child")
	}
}
