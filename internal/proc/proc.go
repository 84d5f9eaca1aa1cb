// Package proc runs process trees: it starts a child process, and makes sure that the child and
// everything that it starts ends.
//
// Start starts a helper: it leads a process group and dies with this process. Fork does the same
// for a worker, and finds and kills what the worker leaves behind: by a cgroup, by descent and by a
// mark in the environment. Guard does so once this process itself has ended. The package needs
// Linux 5.3 or newer (process descriptors).
package proc

import (
	"fmt"
	"syscall"
)

// EndText describes how a process has ended: "exited with status 7" or "was killed by signal 9
// (killed)".
func EndText(ws syscall.WaitStatus) string {
	if ws.Signaled() {
		return signalText(ws.Signal())
	}
	return fmt.Sprintf("exited with status %d", ws.ExitStatus())
}

func signalText(sig syscall.Signal) string {
	return fmt.Sprintf("was killed by signal %d (%s)", int(sig), sig)
}
