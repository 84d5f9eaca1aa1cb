package client

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// child starts a program that runs until it is killed, in the role of a job agent of this machine.
func child(t *testing.T) (v *proc.Ref, wait func()) {
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
	return proc.RefOf(cmd.Process.Pid, gone), func() { <-gone }
}

// awaitStop blocks until a process is stopped, or is continued if want is false.
func awaitStop(t *testing.T, v *proc.Ref, want bool) {
	t.Helper()
	how := unix.WCONTINUED
	if want {
		how = unix.WSTOPPED
	}
	if err := unix.Waitid(unix.P_PID, v.PID(), nil, how, nil); err != nil {
		t.Fatal(err)
	}
	if v.Stopped() != want {
		t.Fatalf("process %d: stopped is %v", v.PID(), !want)
	}
}

// TestSilenceOfALivingProcess: an agent of this machine is alive as long as its process exists,
// however long it is silent, and whether it is stopped or not. It is continued if the driver needs
// it, and given up if it leaves a request undone.
func TestSilenceOfALivingProcess(t *testing.T) {
	v, wait := child(t)
	log := logrus.New()
	log.SetOutput(io.Discard)
	s := newSession(New(Config{Lease: time.Second, Log: log}), place{host: "a", there: v.Ended, process: v})
	lease := int(s.a.cfg.Lease/s.lookEvery()) + 1
	look := func(n int) (err error) {
		for range n {
			err = errors.Join(err, s.silent())
		}
		return err
	}
	v.Signal(syscall.SIGSTOP)
	awaitStop(t, v, true)
	if err := look(100 * lease); err != nil {
		t.Fatalf("nothing was wanted of it: %v", err)
	}
	s.contact, s.looks = time.Now().Add(-time.Hour), 0
	if why, _ := s.hopeless(errors.New("the stream broke")); why != nil || !v.Stopped() {
		t.Fatalf("a stream that broke: %v", why)
	}
	s.request(func() { s.end = finished })
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
	v.Signal(syscall.SIGKILL)
	wait()
	if err := s.silent(); err == nil || !strings.Contains(err.Error(), "its process has ended") {
		t.Errorf("after its end: %v", err)
	}
}

// TestExecWithoutAnswer: an agent of this machine that does not answer is ended, and the driver
// waits no longer.
func TestExecWithoutAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hvdrun")
	if err := os.WriteFile(path, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := Exec{Hvdrun: path, patience: time.Millisecond}.Start(t.Context(), "a", Hello{})
	var failed *HostError
	if !errors.As(err, &failed) || !strings.Contains(err.Error(), "gave no answer for 1ms") {
		t.Errorf("Start returned %v", err)
	}
}
