package proc

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// FuzzStat: whatever name a process gives itself, its fields are those of the kernel.
func FuzzStat(f *testing.F) {
	f.Add("sh")
	f.Add(") Z 1 1 1 (")
	f.Add("a\n1 (b) R 7")
	f.Fuzz(func(t *testing.T, name string) {
		rest := strings.Fields(strings.Repeat("8 ", statExitCode-statState))
		rest[statParent-statState-1] = "4711"
		fields := parseStat(fmt.Appendf(nil, "12 (%s) S %s\n", name, strings.Join(rest, " ")))
		if len(fields) != statExitCode+1 || fields[statState] != "S" || fields[statParent] != "4711" || fields[statStartTime] != "8" {
			t.Errorf("%q", fields)
		}
	})
}

// FuzzCgroupDir: whatever the names of cgroups and mount points are, the folder is below the mount
// point of a hierarchy.
func FuzzCgroupDir(f *testing.F) {
	f.Add("0::/user.slice/a", "/", "/sys/fs/cgroup")
	f.Add("0::/../x", "/..", "/sys/fs/cgroup")
	f.Add("1:name=systemd:/\n0::/a/../../b\n", "/a", `/sys/fs\040x`)
	f.Fuzz(func(t *testing.T, own, root, point string) {
		if strings.ContainsAny(root+point, " \t\n") || root == "" || !strings.HasPrefix(point, "/") {
			return // the kernel escapes these
		}
		dir := cgroupDir(own, "30 23 0:26 "+root+" "+point+" rw shared:4 - cgroup2 cgroup rw\n")
		if place := strings.TrimSuffix(filepath.Clean(unescape.Replace(point)), "/"); dir != "" && dir != filepath.Clean(place+"/") && !strings.HasPrefix(dir, place+"/") {
			t.Errorf("%q is not below %q", dir, place)
		}
	})
}

// TestEndedBy: a process that is being killed is distinguished from one that is alive, one that is
// stopped, and one that is gone.
func TestEndedBy(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	c, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	if by := endedBy(c.PID); by != 0 {
		t.Errorf("of a process that lives: %v", by)
	}
	c.Signal(syscall.SIGSTOP)
	for _, state, err := Born(c.PID); state != 'T'; _, state, err = Born(c.PID) {
		if err != nil {
			t.Fatal(err)
		}
	}
	if by := endedBy(c.PID); by != 0 {
		t.Errorf("of a process that is stopped: %v", by)
	}
	c.Signal(syscall.SIGKILL)
	if by := endedBy(c.PID); by != syscall.SIGKILL { // it exists until it is reaped
		t.Errorf("of a process that was killed: %v", by)
	}
	if _, err := c.Reap(); err != nil {
		t.Fatal(err)
	}
	if by := endedBy(c.PID); by != 0 {
		t.Errorf("of a process that is gone: %v", by)
	}
}

// TestLook: a requested look reports once that a process is being killed, and nothing otherwise.
func TestLook(t *testing.T) {
	child, look, told := looksAt(t, nil)
	look <- struct{}{}
	look <- struct{}{}
	if len(told) > 0 {
		t.Errorf("it was told of a process that lives: %v", <-told)
	}
	child.Signal(syscall.SIGKILL)
	for range 3 {
		look <- struct{}{}
	}
	if by := <-told; by != syscall.SIGKILL {
		t.Errorf("it was told of %v", by)
	}
}

// TestLookOnceClosed: a killed process that has closed its descriptors is reported once, although
// it still exists.
func TestLookOnceClosed(t *testing.T) {
	closed := make(chan struct{})
	child, look, told := looksAt(t, closed)
	child.Signal(syscall.SIGKILL)
	close(closed)
	if by := <-told; by != syscall.SIGKILL {
		t.Errorf("it was told of %v", by)
	}
	look <- struct{}{}
}

// looksAt watches a sleeping process whose end has not been noticed: told receives what is reported
// about it. The test fails if that is more than one report.
func looksAt(t *testing.T, closed <-chan struct{}) (child *Child, look chan<- struct{}, told <-chan syscall.Signal) {
	t.Helper()
	child, err := Start(exec.Command("sleep", "600"))
	if err != nil {
		t.Fatal(err)
	}
	there := &Child{PID: child.PID, ended: make(chan struct{})}
	tree := &Tree{Child: there, dump: watchDump(child.PID, 0)}
	looks, tells := make(chan struct{}), make(chan syscall.Signal, 2)
	ctx, cancel := context.WithCancel(context.Background())
	var waiting sync.WaitGroup
	waiting.Go(func() {
		tree.endsByItself(ctx, Stop{Look: looks, Closed: closed, Dying: func(_ string, by syscall.Signal) { tells <- by }})
	})
	t.Cleanup(func() {
		cancel()
		waiting.Wait()
		if len(tells) > 0 {
			t.Error("it was told of twice")
		}
		tree.dump.close()
		child.Signal(syscall.SIGKILL)
		child.Reap()
	})
	return child, looks, tells
}
