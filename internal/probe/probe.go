package probe

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/stacks"
)

// Probe describes a process and its descendants by the contents of /proc. It neither stops nor
// signals them, and works whatever they do. It omits threads that end meanwhile. It reads the
// parents of all processes on the machine.
func Probe(pid int) ([]stacks.Process, error) {
	p, err := probe(pid)
	if err != nil {
		return nil, err
	}
	all := []stacks.Process{p}
	for _, child := range proc.Descendants(pid) {
		if p, err := probe(child); err == nil && len(all) < stacks.MaxProcesses {
			all = append(all, p)
		}
	}
	return all, nil
}

// stat returns the fields of a stat file from the state on, or nil.
func stat(dir string) []string {
	text := read(dir+"/stat", 4096)
	return strings.Fields(text[strings.LastIndexByte(text, ')')+1:]) // the name before may contain anything
}

// read returns the beginning of a file; empty if it cannot be read.
func read(path string, most int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, most)) // after an error, the part that was read
	return string(text)
}

func probe(pid int) (stacks.Process, error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	p := stacks.Process{PID: pid}
	fields := stat(dir)
	if len(fields) < 2 {
		return p, fmt.Errorf("probe: there is no process %d", pid)
	}
	p.Parent, _ = strconv.Atoi(fields[1])
	tasks, err := os.ReadDir(dir + "/task")
	if err != nil {
		return p, fmt.Errorf("probe: %w", err)
	}
	tids := make([]int, 0, len(tasks))
	for _, e := range tasks {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	slices.SortFunc(tids, func(a, b int) int { // the main thread first
		return cmp.Or(cmp.Compare(notMain(a, pid), notMain(b, pid)), cmp.Compare(a, b))
	})
	p.More = max(0, len(tids)-stacks.MaxThreads)
	for _, tid := range tids[:min(len(tids), stacks.MaxThreads)] {
		if t, ok := probeThread(dir, tid); ok {
			p.Threads = append(p.Threads, t)
		}
	}
	// The command line is in the memory of the process. While a thread waits in the kernel for a
	// page of that memory, a reader would block too.
	if !slices.ContainsFunc(p.Threads, func(t stacks.Thread) bool { return t.State == "D" }) {
		p.Command = stacks.Clean(strings.TrimSpace(strings.ReplaceAll(read(dir+"/cmdline", stacks.MaxText), "\x00", " ")))
	}
	return p, nil
}

func notMain(tid, pid int) int {
	if tid == pid {
		return 0
	}
	return 1
}

func probeThread(process string, tid int) (stacks.Thread, bool) {
	dir := fmt.Sprintf("%s/task/%d", process, tid)
	fields := stat(dir)
	if len(fields) == 0 {
		return stacks.Thread{}, false
	}
	t := stacks.Thread{TID: tid, Name: stacks.Clean(strings.TrimSpace(read(dir+"/comm", 64))), State: stacks.Clean(fields[0])}
	if wait := read(dir+"/wchan", 128); wait != "0" {
		t.Wait = stacks.Clean(wait)
	}
	t.Syscall, t.Of = syscallOf(process, read(dir+"/syscall", 256))
	for line := range strings.Lines(read(dir+"/stack", 8192)) {
		if _, frame, ok := strings.Cut(strings.TrimSpace(line), "] "); ok && len(t.Kernel) < stacks.MaxKernel {
			t.Kernel = append(t.Kernel, stacks.Clean(frame))
		}
	}
	if t.Wait == "" && t.State != "R" && len(t.Kernel) > 0 {
		t.Wait, _, _ = strings.Cut(t.Kernel[0], "+")
	}
	return t, true
}

// syscallOf parses the line of /proc/PID/syscall: "running", or the number of the call (-1 for
// none), its arguments, and the stack pointer and program counter.
func syscallOf(process, line string) (name, of string) {
	fields := strings.Fields(line)
	if len(fields) < 2 {
		return "", ""
	}
	n, err := strconv.Atoi(fields[0])
	if err != nil || n < 0 {
		return "", ""
	}
	if name, known := otherCalls[n]; known {
		return name, ""
	}
	name, known := fileCalls[n]
	if !known {
		return fmt.Sprintf("system call %d", n), ""
	}
	if fd, err := strconv.ParseInt(fields[1], 0, 32); err == nil {
		of, _ = os.Readlink(filepath.Join(process, "fd", strconv.FormatInt(fd, 10)))
	}
	return name, stacks.Clean(of)
}
