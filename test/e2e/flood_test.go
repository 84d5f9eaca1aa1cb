package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// floodSize returns the number of connections that strangers open to each listener, and the limit
// of descriptors for each process of the job. The defaults suit every machine; E2E_FLOOD sets
// others, such as 8000:1024.
func floodSize(t *testing.T) (connections, descriptors int) {
	t.Helper()
	text := os.Getenv("E2E_FLOOD")
	if text == "" {
		return 300, 192
	}
	if _, err := fmt.Sscanf(text, "%d:%d", &connections, &descriptors); err != nil {
		t.Fatal(err)
	}
	return connections, descriptors
}

// maxGrowth bounds by how much a process's memory grows, in kB, when all its listeners are flooded.
const maxGrowth = 20 << 10

// usage is what a process uses.
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

// hold opens connections that send nothing or begin a handshake, and returns them.
func hold(t *testing.T, addr string, connections int) (all []net.Conn) {
	t.Helper()
	words := []byte{0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3} // of a hello of 16 KiB
	for i := range connections {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Errorf("stranger %d at %s: %v", i, addr, err)
			return all
		}
		all = append(all, c)
		if i%2 == 0 {
			c.Write(append(words, make([]byte, 8<<10)...))
		}
	}
	return all
}

// TestFloodsDoNotKeepAJobFromHealing: strangers open more connections to each listener of a job
// than its processes have descriptors. A worker that dies meanwhile is replaced.
func TestFloodsDoNotKeepAJobFromHealing(t *testing.T) {
	connections, descriptors := floodSize(t)
	limited := filepath.Join(t.TempDir(), "hvdrun")
	script := fmt.Sprintf("#!/bin/sh\nulimit -n %d\nexec '%s' \"$@\"\n", descriptors, binaries.Hvdrun)
	if err := sandbox.WriteProgram(limited, []byte(script)); err != nil {
		t.Fatal(err)
	}
	r := follow.Programs{Hvdrun: limited, Trainer: binaries.Trainer}.Test(t, Job{
		Flags:   []string{"-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "1,1", "--discovery-interval", "100ms", "--log-level", "debug"},
		Stages:  []Stage{{Hosts: on(hostA, 2)}},
		Trainer: []string{"-hold", "5", "-steps", "10"},
	})
	awaitStep(t, r, 5)
	var workers []int
	err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		workers = nil
		for _, e := range events {
			if e.Name == "worker_started" {
				workers = append(workers, e.PID)
			}
		}
		return len(workers) == 2
	})
	if err != nil {
		t.Fatal(err)
	}
	listeners := map[int][]netip.AddrPort{}
	for _, pid := range append(r.Processes(), r.PID) {
		if addrs := follow.Listening(pid); len(addrs) > 0 {
			listeners[pid] = addrs
		}
	}
	if _, driver := listeners[r.PID]; len(listeners) != 3 || driver {
		t.Fatalf("%d processes listen; want an agent and two workers", len(listeners))
	}
	for pid, addrs := range listeners {
		calm := usageOf(pid)
		for _, at := range addrs {
			before := usageOf(pid)
			conns := hold(t, at.String(), connections)
			now := usageOf(pid)
			t.Logf("%.60s: %d descriptors, %d kB; after %d connections to %v: %d, %d kB",
				follow.CommandLine(pid), before.descriptors, before.kilobytes, connections, at, now.descriptors, now.kilobytes)
			// A listener can use a quarter of the descriptors. A connection that was displaced
			// stays open until its reader notices.
			if !follow.Await(t, func() bool { now = usageOf(pid); return now.descriptors <= descriptors*3/4 }) {
				t.Errorf("process %d has %d of %d descriptors", pid, now.descriptors, descriptors)
			}
			// Programs with the race detector are not measured; large floods are not run with them.
			if grown := now.kilobytes - calm.kilobytes; grown > maxGrowth && os.Getenv("E2E_FLOOD") != "" {
				t.Errorf("process %d has grown by %d kB; at most %d", pid, grown, maxGrowth)
			}
			for _, c := range conns {
				c.Close()
			}
			if !follow.Await(t, func() bool { return usageOf(pid).descriptors <= before.descriptors+descriptors/16 }) {
				t.Errorf("process %d has %d descriptors long after the flood, and had %d", pid, usageOf(pid).descriptors, before.descriptors)
			}
		}
	}
	for pid := range listeners { // these stay until the job has healed
		if pid == workers[0] {
			continue
		}
		conns := hold(t, listeners[pid][0].String(), connections)
		defer func() {
			for _, c := range conns {
				c.Close()
			}
		}()
	}
	if err := syscall.Kill(workers[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	res := finish(t, r, 0, 10)
	if n := follow.Count(res.Events, "worker_started"); n != 3 {
		t.Errorf("%d workers were started, want 3", n)
	}
}
