package launch

import (
	"errors"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// child starts a program that lives until it is killed, as a job agent of this machine.
func child(t *testing.T) (v *vital, wait func()) {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		cmd.Wait()
	}()
	t.Cleanup(func() { cmd.Process.Kill(); <-gone })
	return &vital{pid: cmd.Process.Pid, gone: gone}, func() { <-gone }
}

// awaitStop blocks until a process is stopped, or goes on.
func awaitStop(t *testing.T, v *vital, want bool) {
	t.Helper()
	how := unix.WCONTINUED
	if want {
		how = unix.WSTOPPED
	}
	if err := unix.Waitid(unix.P_PID, v.pid, nil, how, nil); err != nil {
		t.Fatal(err)
	}
	if v.stopped() != want {
		t.Fatalf("process %d: stopped is %v", v.pid, !want)
	}
}

// An agent of this machine is alive as long as its process is, however long it is silent, and
// stopped or not. It is continued where something is wanted of it, and given up where it does
// nothing of that.
func TestSilenceOfALivingProcess(t *testing.T) {
	v, wait := child(t)
	log := logrus.New()
	log.SetOutput(io.Discard)
	s := newAgentSession(&Agents{Lease: time.Second, Log: log}, place{host: "a", there: v.there, vital: v})
	lease := int(s.a.Lease/s.lookEvery()) + 1
	look := func(n int) (err error) {
		for range n {
			err = errors.Join(err, s.silent())
		}
		return err
	}
	v.signal(syscall.SIGSTOP)
	awaitStop(t, v, true)
	if err := look(100 * lease); err != nil {
		t.Fatalf("nothing was wanted of it: %v", err)
	}
	s.contact, s.looks = time.Now().Add(-time.Hour), 0
	if why, _ := s.hopeless(errors.New("the stream broke")); why != nil || !v.stopped() {
		t.Fatalf("a stream that broke: %v", why)
	}
	s.finish()
	if err := look(lease); err != nil {
		t.Fatal(err)
	}
	awaitStop(t, v, false)
	err := look(patientLeases*lease - lease)
	if !errors.Is(err, errNoAnswer) {
		t.Fatalf("it does nothing: %v", err)
	}
	if why, over := s.hopeless(err); why == nil || over {
		t.Errorf("hopeless: %v, %v", why, over)
	}
	v.signal(syscall.SIGKILL)
	wait()
	if err := s.silent(); err == nil || !strings.Contains(err.Error(), "its process has ended") {
		t.Errorf("after its end: %v", err)
	}
}

// A process that was another driver's child is known by its birth: a later one with its number is
// none.
func TestVitalOfAnothersChild(t *testing.T) {
	v, wait := child(t)
	other := &vital{pid: v.pid}
	if other.there() == nil {
		t.Error("a process with the number counts as the agent")
	}
	if vitalOf(v.pid).there() == nil {
		t.Error("a process that is no agent counts as one")
	}
	var err error
	if other.birth, _, err = born(v.pid); err != nil || other.there() != nil {
		t.Fatalf("it is there: %v, %v", err, other.there())
	}
	v.signal(syscall.SIGKILL)
	wait()
	if other.there() == nil {
		t.Error("it has ended")
	}
}
