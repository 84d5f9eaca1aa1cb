package follow

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Processes returns the living processes of the job: those with its tag or marks, or with its run
// id in the environment or the arguments, as the guard uses it.
func (r *Running) Processes() []int {
	marks := append([]string{r.Tag}, r.Marks...)
	if id := r.RunID(); id != "" {
		marks = append(marks, "HVD_RUN_ID="+id)
	}
	return Processes(marks...)
}

// Left returns the living processes of the job, with their command lines.
func (r *Running) Left() (left []string) {
	for _, pid := range r.Processes() {
		left = append(left, fmt.Sprintf("%d %s", pid, CommandLine(pid)))
	}
	return left
}

// AwaitGone blocks until no process of the job remains, at most for the limit, and returns the
// remaining ones. For a job of a test, the limit of the run of tests applies instead. It kills
// nothing.
func (r *Running) AwaitGone(limit time.Duration) (left []string) {
	r.awaitGone(limit, func(int) bool { return true })
	return r.Left()
}

// awaitGone blocks until no process of the job that satisfies the condition remains, or until the
// limit.
func (r *Running) awaitGone(limit time.Duration, is func(pid int) bool) {
	var over <-chan struct{}
	if r.test != nil {
		over = r.test.limit
	} else {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		over = ctx.Done()
	}
	for {
		pids := slices.DeleteFunc(r.Processes(), func(pid int) bool { return !is(pid) })
		if len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			if !awaitEnd(pid, over) {
				return
			}
		}
	}
}

// awaitEnd blocks until a process has ended, and returns false if over is closed before.
func awaitEnd(pid int, over <-chan struct{}) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return true // it has ended
	}
	defer unix.Close(fd)
	for {
		const look = 100 // ms, after which a closed channel is noticed at the latest
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, look)
		switch {
		case n > 0 || err != nil && !errors.Is(err, unix.EINTR):
			return true
		case closed(over):
			return false
		}
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Kill kills all processes of the job and returns when they have ended. It gives up after [killing]
// if some cannot end.
func (r *Running) Kill() {
	poll(killing, func() bool { return r.strike(syscall.SIGKILL) == 0 && r.Over() })
}

// killing is the longest time in which [Running.Kill] waits for processes.
const killing = 20 * time.Second

// strike sends a signal to all processes of the job, suspended ones as well, and returns their
// number.
func (r *Running) strike(s syscall.Signal) int {
	pids := r.Processes()
	for _, pid := range pids {
		_ = syscall.Kill(pid, s) // it may have ended
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
	return len(pids)
}

// Stacks records once what the job's processes are doing: their kernel stacks in a file of the
// job's directory, and the stacks of Go programs, which end by that, in hvdrun's output. The
// workers come first, because hvdrun forwards their output.
func (r *Running) Stacks() { r.dump.Do(r.stacks) }

func (r *Running) stacks() {
	r.Tail = Tail(r.OutputPath(), 3000)
	f, err := os.Create(filepath.Join(r.Dir, "processes"))
	if err != nil {
		return
	}
	defer f.Close()
	pids := r.Processes()
	for _, pid := range pids {
		fmt.Fprintf(f, "== %d %s\n", pid, CommandLine(pid))
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stack", pid))
		for _, name := range append(files, fmt.Sprintf("/proc/%d/status", pid)) {
			if text, err := os.ReadFile(name); err == nil {
				fmt.Fprintf(f, "-- %s\n%s", name, text)
			}
		}
	}
	for _, hvdrun := range []bool{false, true} {
		for _, pid := range pids {
			if strings.HasPrefix(CommandLine(pid), r.programs.Hvdrun) == hvdrun {
				_ = syscall.Kill(pid, syscall.SIGQUIT) // it may have ended
			}
		}
		select {
		case <-r.ended:
		case <-time.After(time.Second):
		}
	}
}

// Tail returns the end of a file.
func Tail(path string, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil && fi.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd) // read as much as possible
	}
	b, _ := io.ReadAll(io.LimitReader(f, n))
	return string(b)
}

// Processes returns the living processes with one of the entries in their environment or arguments.
func Processes(entries ...string) []int {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	var pids []int
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if Alive(pid) && (holds(dir+"/environ", entries) || holds(dir+"/cmdline", entries)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func holds(path string, entries []string) bool {
	b, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	for word := range bytes.SplitSeq(b, []byte{0}) {
		if slices.Contains(entries, string(word)) {
			return true
		}
	}
	return false
}

// Alive returns false for processes that do not exist and for zombies.
func Alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	return len(fields) > 0 && !bytes.ContainsAny(fields[0], "ZX")
}

// CommandLine returns the command line of a process; empty if it has ended.
func CommandLine(pid int) string {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	return strings.TrimSpace(string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
}

// Sleep blocks for a time, or until ctx ends; then it returns the cause.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
