package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// guardShell is the shell that runs guardScript, which waits for the end of its input. If the input
// ends without a line, its writer has died, and the script executes the writer's own program, which
// is descriptor 3, to do the rest: see init. A waiting shell needs less memory than that program,
// which itself waits on machines without a shell.
var guardShell = "/bin/sh"

const guardScript = `while read -r line; do exit 0; done; exec /proc/self/fd/3 "$@"`

// The first argument of a program that a guard executes: to kill at once, and to wait before that.
const (
	sweepWord = "hvdrun-guard-sweep"
	waitWord  = "hvdrun-guard"
)

// The bounds of sweep: the number of looks for processes, and the pause after one that found some.
const (
	guardLooks = 200
	guardPause = 10 * time.Millisecond
)

// A guard executes the program of the process that has ended, whichever that is. The arguments are
// sweepWord or waitWord, the mark, and the prefixes of cgroup paths.
func init() {
	if len(os.Args) < 3 || os.Args[1] != sweepWord && os.Args[1] != waitWord {
		return
	}
	if os.Args[1] == waitWord {
		if n, _ := os.Stdin.Read(make([]byte, 1)); n > 0 {
			os.Exit(0)
		}
	}
	var cgroups []string
	for _, prefix := range os.Args[3:] {
		found, _ := filepath.Glob(prefix + "*") // the pattern is well-formed
		cgroups = append(cgroups, found...)
	}
	for _, path := range cgroups {
		_ = (&cgroup{path: path}).kill() // fails if it has been removed
	}
	err := sweep(os.Args[2], guardPause) // a child of the process that has ended may not have executed its program yet
	for _, path := range cgroups {
		_ = unix.Rmdir(path) // a later process of hvdrun sweeps what remains
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// sweep kills all processes whose environment has the entry mark, until two looks in a row, with
// the given pause between them, find none: one look can miss a process that is being started.
func sweep(mark string, pause time.Duration) error {
	quiet, left := 0, false
	for range guardLooks {
		var unclear bool
		if left, unclear = killMarked(mark); left || unclear {
			quiet = 0
			time.Sleep(guardPause)
		} else if quiet++; quiet == 2 {
			return nil
		} else {
			time.Sleep(pause)
		}
	}
	if left {
		return fmt.Errorf("processes with %s are left", mark)
	}
	return nil
}

// killMarked kills the processes whose environment has the entry mark. found reports that there
// were some, unclear that some environments could not be read yet.
func killMarked(mark string) (found, unclear bool) {
	for _, pid := range processIDs() {
		carried, unknown := carries(pid, mark)
		unclear = unclear || unknown
		if !carried {
			continue
		}
		found = true
		fd, err := unix.PidfdOpen(pid, 0)
		switch {
		case errors.Is(err, unix.ESRCH): // it has ended
			continue
		case err != nil: // some sandboxes lack the system call
			_ = unix.Kill(pid, unix.SIGKILL)
			continue
		}
		if carried, _ := carries(pid, mark); carried { // it is still the same process
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		_ = unix.Close(fd)
	}
	return found, unclear
}

// markable reports whether the text may be a name or value in a mark. Package regexp would enlarge
// every program that imports package elastic.
func markable(text string) bool {
	return text != "" && strings.Trim(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") == ""
}

// Guard kills every process with a mark in its environment once the process that started the guard
// has ended, however it ended. A guard is a process in a separate session that reads from a pipe
// whose other end only the starter holds.
type Guard struct {
	mark   string
	waiter *exec.Cmd
	pipe   io.WriteCloser
	close  func() error
}

// StartGuard starts the guard of the processes whose environment has variable=value, such as
// HVD_RUN_ID and the id of a run. Both are made of letters, digits, "_" and "-". It does not use
// PATH. The caller must call Close, and must not carry the mark itself. The guard also empties the
// cgroups whose paths begin with one of the prefixes (see CgroupsBelow), and those that this
// process creates by default.
func StartGuard(variable, value string, prefixes ...string) (*Guard, error) {
	mark := variable + "=" + value
	if !markable(variable) || !markable(value) {
		return nil, fmt.Errorf("proc: guard: %q has other characters than letters, digits, _ and -", mark)
	}
	if carried, _ := carries(os.Getpid(), mark); carried {
		return nil, fmt.Errorf("proc: guard: this process itself was started with %s", mark)
	}
	own, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, fmt.Errorf("proc: guard: this program: %w", err)
	}
	defer own.Close()
	args := []string{"/proc/self/fd/3", waitWord, mark}
	if _, err := os.Stat(guardShell); err == nil {
		args = []string{guardShell, "-c", guardScript, waitWord, sweepWord, mark}
	}
	args = append(args, prefixes...)
	if prefix := cgroupPrefix(); prefix != "" {
		args = append(args, prefix)
	}
	g := &Guard{mark: mark, waiter: exec.Command(args[0], args[1:]...)}
	g.waiter.Env, g.waiter.ExtraFiles = []string{}, []*os.File{own}
	g.waiter.Dir = "/"
	pipe, err := g.waiter.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("proc: guard: %w", err)
	}
	if err := StartSession(g.waiter); err != nil {
		return nil, fmt.Errorf("proc: guard: %w", err)
	}
	g.pipe = pipe
	g.close = sync.OnceValue(g.finish)
	return g, nil
}

// Close kills the processes now and blocks until that is done: for some milliseconds if nothing is
// left, and for a few seconds at most. It must not be called while this process starts one with the
// mark. It returns an error if a process could not be killed. Later calls return the same.
func (g *Guard) Close() error { return g.close() }

func (g *Guard) finish() error {
	err := sweep(g.mark, 0)                  // this process starts none at the moment
	_, _ = io.WriteString(g.pipe, "close\n") // fails if the guard itself has ended
	_ = g.pipe.Close()
	if err := errors.Join(err, WaitSession(g.waiter)); err != nil {
		return fmt.Errorf("proc: guard: %w", err)
	}
	return nil
}
