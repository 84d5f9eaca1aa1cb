package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// usage is what the tests of a package used. Seconds is the user and system time of all their
// processes; Wall is also in seconds.
type usage struct {
	Dir     string
	Seconds float64
	Wall    float64
	Left    []string `json:",omitempty"` // the command lines of processes that outlived the tests
}

// guards is how long a process can outlive the tests: a process that guards another notices its end
// and exits, which takes long on a busy machine.
const guards = time.Minute

// underKind runs under for the tests of a package that budget.txt assigns to the kind.
func underKind(file string, k kind, args []string) int {
	flags, err := chosen(k)
	if err != nil {
		fmt.Fprintln(os.Stderr, "check under:", err)
		return 1
	}
	return under(file, append(args, flags...), guards)
}

// chosen returns the flags for the package in the current folder.
func chosen(k kind) ([]string, error) {
	b, err := parseBudget(budgetText)
	if err != nil {
		return nil, err
	}
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	root := dir
	for {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			break
		}
		if parent := filepath.Dir(root); parent != root {
			root = parent
			continue
		}
		return nil, fmt.Errorf("%s is in no module", dir)
	}
	rel, err := filepath.Rel(root, dir)
	return b.of(rel).flags(k), err
}

// under runs a test binary in the current folder, which is that of its package, appends its usage
// record to a file, and returns the exit status. All descendants of the tests become children of
// this process, so that their time is counted and none of them outlives the tests by more than
// grace.
func under(file string, args []string, grace time.Duration) int {
	u, code, err := watched(args, grace)
	if err == nil {
		err = record(file, u)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "check under:", err)
		return max(code, 1)
	}
	if len(u.Left) > 0 {
		fmt.Printf("--- FAIL: processes are left behind:\n\t%s\n", strings.Join(u.Left, "\n\t"))
		return max(code, 1)
	}
	return code
}

func watched(args []string, grace time.Duration) (usage, int, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return usage{}, 0, fmt.Errorf("subreaper: %w", err)
	}
	dir, err := os.Getwd()
	if err != nil {
		return usage{}, 0, err
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return usage{}, 0, err
	}
	// The go command sends SIGQUIT to get stacks, and Ctrl-C sends SIGINT.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGQUIT, syscall.SIGTERM, os.Interrupt)
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s) // fails if the tests have ended
		}
	}()
	code, err := awaitChild(cmd.Process.Pid)
	signal.Stop(signals)
	close(signals)
	if err != nil {
		return usage{}, 1, err
	}
	left := reap(time.Now().Add(grace))
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &used); err != nil {
		return usage{}, code, err
	}
	seconds := time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
	return usage{Dir: dir, Seconds: seconds, Wall: time.Since(start).Seconds(), Left: left}, code, nil
}

// awaitChild waits for a child and returns its exit status. It reaps other children that end
// before, as an init process does: some tests check that a process is gone.
func awaitChild(pid int) (code int, err error) {
	for {
		var status unix.WaitStatus
		ended, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 1, err
		case ended == pid && status.Signaled():
			fmt.Printf("--- FAIL: the tests were ended by signal %v\n", status.Signal())
			return 1, nil
		case ended == pid:
			return status.ExitStatus(), nil
		}
	}
}

// reap waits until all children have ended. At the deadline it kills those that are left, and
// returns their command lines.
func reap(deadline time.Time) (left []string) {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.ECHILD):
			return left
		case pid != 0 || errors.Is(err, unix.EINTR):
			continue
		}
		if time.Now().After(deadline) {
			for _, child := range children() {
				if what := commandLine(child); what != "" {
					left = append(left, fmt.Sprintf("%d: %s", child, what))
				}
				_ = unix.Kill(child, unix.SIGKILL) // fails if it has ended
			}
			deadline = deadline.Add(time.Hour) // their children become ours one by one
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// children returns the descendants of this process, the youngest first.
func children() []int {
	parents := map[int]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(text[strings.LastIndexByte(string(text), ')'):]), " ")
		fields := strings.Fields(rest)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if len(fields) > 1 {
			parents[pid], _ = strconv.Atoi(fields[1])
		}
	}
	var found []int
	for pid := range parents {
		for p := pid; p > 1; p = parents[p] {
			if parents[p] == os.Getpid() {
				found = append(found, pid)
				break
			}
		}
	}
	slices.Sort(found)
	slices.Reverse(found)
	return found
}

// commandLine returns the command line of a process, or "" if it has ended.
func commandLine(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(strings.ReplaceAll(string(text), "\x00", " "))
}

// record appends a line to a file to which several processes write.
func record(file string, u usage) error {
	line, err := json.Marshal(u)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}
