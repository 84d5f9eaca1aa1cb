package proc

import (
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Pass sends a signal to a process if it has a handler for it, and otherwise to its nearest
// descendants that have one, since the process may be a shell that runs the program. It returns the
// number of processes that it signaled. It never ends a process by a signal that it does not
// handle.
func Pass(pid int, sig syscall.Signal) (passed int) {
	if handles(pid, sig) {
		if syscall.Kill(pid, sig) == nil {
			return 1
		}
		return 0
	}
	parents, _ := below([]int{pid})
	for child, parent := range parents {
		if parent == pid && child != pid {
			passed += Pass(child, sig)
		}
	}
	return passed
}

// handles returns whether a process has a handler for the signal. A process without a handler that
// blocks the signal may wait for it, or be a shell that is about to start a program.
func handles(pid int, sig syscall.Signal) bool {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		name, mask, _ := strings.Cut(line, ":")
		if name == "SigCgt" {
			bits, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			return err == nil && bits>>(sig-1)&1 == 1
		}
	}
	return false
}
