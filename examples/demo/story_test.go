package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestViewFollowsTheJob(t *testing.T) {
	v := new(view)
	for _, e := range readEvents(t, "testdata/events.jsonl") {
		if e.Generation == 5 && e.Name == "world_published" {
			break
		}
		v.see(observation{event: &e})
	}
	if v.trained(4, 1) {
		t.Error("an epoch was seen before any was printed")
	}
	v.see(observation{line: "[0]<stdout>:epoch 9  loss 0.2  size 3  generation 3"})
	if v.trained(4, 1) {
		t.Error("an epoch of an older generation was counted")
	}
	for _, line := range []string{
		"[0]<stdout>:epoch 10  loss 0.1  size 4  generation 4",
		"[0]<stdout>:held-out accuracy 0.9610",
		"[1]<stdout>:held-out accuracy 0.1",
		"[1]<stdout>:digest 00ff",
		"[0]<stderr>:digest 0000",
	} {
		v.see(observation{line: line})
	}
	if !v.trained(4, 1) || v.trained(4, 2) || v.trained(2, 1) {
		t.Error("one epoch with four workers was printed, and nothing else")
	}
	if !v.shrank(3, 4) || v.shrank(4, 4) || v.shrank(3, 3) {
		t.Error("generation 4 has 4 workers and a first step")
	}
	if v.accuracy != 0.961 || !slices.Equal(v.digests, []string{"00ff"}) {
		t.Errorf("accuracy %v, digests %q", v.accuracy, v.digests)
	}
}

func TestVerify(t *testing.T) {
	calm := func() *view { return &view{accuracy: 0.96, digests: []string{"ab", "ab"}} }
	rows := func() []row { return table(readEvents(t, "testdata/events.jsonl")) }
	if wrong := verify(rows(), calm(), calm()); len(wrong) > 0 {
		t.Errorf("a good run is said to be wrong: %q", wrong)
	}
	for want, spoil := range map[string]func(rows *[]row, stormy *view){
		"in another way":     func(rows *[]row, _ *view) { *rows = (*rows)[1:] },
		"completed no step":  func(rows *[]row, _ *view) { (*rows)[2].toStep = 0 },
		"accuracies differ":  func(_ *[]row, v *view) { v.accuracy = 0.93 },
		"digests are":        func(_ *[]row, v *view) { v.digests[1] = "ac" },
		"runs differ":        func(_ *[]row, v *view) { v.digests = []string{"ac", "ac"} },
		"process":            func(_ *[]row, v *view) { v.events = []event{{Name: "worker_started", PID: os.Getpid()}} },
		"should have been l": func(_ *[]row, v *view) { v.digests = nil },
	} {
		r, v := rows(), calm()
		spoil(&r, v)
		if wrong := verify(r, calm(), v); len(wrong) != 1 || !strings.Contains(wrong[0], want) {
			t.Errorf("found %q, want one complaint with %q", wrong, want)
		}
	}
}

func TestDiscoveryScriptPrintsTheHosts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's a place")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	hosts := filepath.Join(dir, "hosts")
	command, err := writeScript(dir, hosts)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		hosts []string
		want  string
	}{{[]string{"a"}, "a:2\n"}, {[]string{"a", "b"}, "a:2\nb:2\n"}} {
		if err := writeHosts(hosts, c.hosts...); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), "sh", "-c", command).Output()
		if err != nil || string(out) != c.want {
			t.Errorf("printed %q (%v), want %q", out, err, c.want)
		}
	}
}

// TestJobIsWatchedToItsEnd uses a shell in place of hvdrun.
func TestJobIsWatchedToItsEnd(t *testing.T) {
	events := filepath.Join(t.TempDir(), "events")
	const script = `echo '{"time":"2026-01-02T03:04:05Z","event":"reset"}' >"$0"; echo out; echo err >&2; echo '{"time":"2026-01-02T03:04:05Z","event":"job_done"}' >>"$0"; exit 3`
	j, err := startJob(t.Context(), events, "sh", "-c", script, events)
	if err != nil {
		t.Fatal(err)
	}
	defer j.end()
	s := &story{teller: &teller{began: time.Now()}, job: j}
	err = s.until(t.Context(), "the moon", func() bool { return false })
	if !errors.Is(err, errEnded) || !strings.Contains(err.Error(), "before the moon; hvdrun: exit status 3") {
		t.Errorf("error %v", err)
	}
	if len(s.events) != 2 || s.events[0].Name != "reset" || s.events[1].Name != "job_done" {
		t.Errorf("events %v", s.events)
	}
}

func TestAnInterruptedJobIsEnded(t *testing.T) {
	ctx, interrupt := context.WithCancelCause(t.Context())
	j, err := startJob(ctx, "", "sh", "-c", "echo $$; exec sleep 1000")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi((<-j.seen).line)
	if err != nil {
		t.Fatal(err)
	}
	s := &story{teller: &teller{began: time.Now()}, job: j}
	want := errors.New("enough")
	interrupt(want)
	if err := s.until(ctx, "the moon", func() bool { return false }); !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
	j.end()
	if !gone(pid) {
		t.Errorf("process %d is left", pid)
	}
}
