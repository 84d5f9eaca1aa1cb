package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// floodSize is how many connections strangers open to each listener: E2E_FLOOD, or few enough for
// every machine. The job's processes may have fewer descriptors than that.
func floodSize(t *testing.T) (connections, descriptors int) {
	t.Helper()
	text := os.Getenv("E2E_FLOOD")
	if text == "" {
		return 300, 192
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n, 1024
}

// usage is what a process has.
type usage struct{ descriptors, kilobytes int }

func usageOf(pid int) (u usage) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	fds, _ := os.ReadDir(dir + "/fd")
	u.descriptors = len(fds)
	text, _ := os.ReadFile(dir + "/status")
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			u.kilobytes, _ = strconv.Atoi(f[1])
		}
	}
	return u
}

// hold opens connections that say nothing, or begin a handshake, until the test is over.
func hold(t *testing.T, addr string, connections int) {
	t.Helper()
	words := []byte{0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3} // of a hello of 16 KiB
	for i := range connections {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Errorf("stranger %d at %s: %v", i, addr, err)
			return
		}
		t.Cleanup(func() { c.Close() })
		if i%2 == 0 {
			c.Write(append(words, make([]byte, 8<<10)...))
		}
	}
}

// TestFloodsDoNotKeepAJobFromHealing: strangers hold more connections open to each listener of a
// job than its processes may have descriptors. A worker that dies meanwhile is replaced.
func TestFloodsDoNotKeepAJobFromHealing(t *testing.T) {
	connections, descriptors := floodSize(t)
	limited := filepath.Join(t.TempDir(), "hvdrun")
	script := fmt.Sprintf("#!/bin/sh\nulimit -n %d\nexec '%s' \"$@\"\n", descriptors, binaries.Hvdrun)
	if err := os.WriteFile(limited, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	r, err := Binaries{Hvdrun: limited, Trainer: binaries.Trainer}.Start(Job{
		Dir:     t.TempDir(),
		Flags:   []string{"-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "1,1", "--discovery-interval", "100ms", "--log-level", "debug"},
		Stages:  []Stage{{Hosts: on(hostA, 2)}},
		Trainer: []string{"-hold", "5", "-steps", "10"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			r.Kill()
		}
	})
	r.awaitStep(t, 5)
	before, names := map[int]usage{}, map[int]string{}
	var flooding sync.WaitGroup
	for _, pid := range append(Processes(r.marks()...), r.PID) {
		addrs := Listening(pid)
		if len(addrs) == 0 {
			continue
		}
		before[pid], names[pid] = usageOf(pid), commandLine(pid)
		for _, at := range addrs {
			flooding.Go(func() { hold(t, at.String(), connections) })
		}
	}
	flooding.Wait()
	for pid, was := range before {
		now := usageOf(pid)
		t.Logf("%.60s: %d descriptors, %d kB; after %d connections to each of its %d listeners: %d, %d kB",
			names[pid], was.descriptors, was.kilobytes, connections, len(Listening(pid)), now.descriptors, now.kilobytes)
		if room := descriptors / 8; now.descriptors > descriptors-room {
			t.Errorf("process %d has %d of %d descriptors", pid, now.descriptors, descriptors)
		}
	}
	if len(before) != 4 {
		t.Errorf("%d processes listen: %v; want a driver, an agent and two workers", len(before), names)
	}
	victim := 0
	err = r.AwaitEvents(t.Context(), func(events []Event) bool {
		i := slices.IndexFunc(events, func(e Event) bool { return e.Name == "worker_started" })
		if i >= 0 {
			victim = events[i].PID
		}
		return i >= 0
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	res := finish(t, r, 0, 10)
	if n := Count(res.Events, "worker_started"); n != 3 {
		t.Errorf("%d workers were started, want 3", n)
	}
}
