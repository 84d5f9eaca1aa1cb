package proc

import (
	"context"
	"errors"
	"os/exec"
	"syscall"
	"testing"
)

// TestRefOfAnothersChild: a process that another has started is identified by its start time: a
// later process with the same number is a different one.
func TestRefOfAnothersChild(t *testing.T) {
	cmd := exec.Command("sh", "-c", "echo; read line", "sh", "1000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cmd.StdinPipe(); err != nil { // stdin stays open
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// Start returns before the kernel has the arguments of the process.
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		cmd.Wait()
	}()
	t.Cleanup(func() { cmd.Process.Kill(); <-ended })
	pid := cmd.Process.Pid
	other := &Ref{pid: pid}
	if other.Ended() == nil {
		t.Error("a later process with the number counts as the one that is meant")
	}
	if Find(pid, "agent", "--job").Ended() == nil {
		t.Error("a process with other arguments counts as the one that is meant")
	}
	if err := Find(pid, "1000").Ended(); err != nil {
		t.Error(err)
	}
	if other.birth, _, err = Born(pid); err != nil || other.Ended() != nil {
		t.Fatalf("it is there: %v, %v", err, other.Ended())
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for _, r := range []*Ref{other, RefOf(pid, ended)} {
		if err := r.Await(over); !errors.Is(err, context.Canceled) {
			t.Errorf("waiting for a process that runs: %v", err)
		}
	}
	RefOf(pid, ended).Signal(syscall.SIGKILL)
	for _, r := range []*Ref{other, RefOf(pid, ended)} {
		if err := r.Await(t.Context()); err != nil {
			t.Error(err)
		}
	}
	<-ended
	if other.Ended() == nil {
		t.Error("it has ended")
	}
}

// TestStopped: a stopped process is distinguished from a running one and from one that does not
// exist.
func TestStopped(t *testing.T) {
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
		if err := cmd.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		var status syscall.WaitStatus
		if _, err := syscall.Wait4(cmd.Process.Pid, &status, syscall.WUNTRACED|syscall.WCONTINUED, nil); err != nil {
			t.Fatal(err)
		}
		if Stopped(cmd.Process.Pid) != (signal == syscall.SIGSTOP) {
			t.Errorf("after %v", signal)
		}
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if Stopped(cmd.Process.Pid) {
		t.Error("a process that has ended is stopped")
	}
}
