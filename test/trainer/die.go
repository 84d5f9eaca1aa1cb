package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// deaths are the signals with which a fault can end the process as the kernel ends a program
// without handlers: without the Go runtime's trace, and with a core dump if the limit permits.
var deaths = map[string]syscall.Signal{
	"kill": syscall.SIGKILL,
	"segv": syscall.SIGSEGV,
	"abrt": syscall.SIGABRT,
}

// die ends the process by the signal with its default action. It returns only on failure.
func die(by syscall.Signal) error {
	if by != syscall.SIGKILL {
		// The layout of the kernel's struct sigaction: handler, flags, restorer, mask. All zero
		// means SIG_DFL.
		var action [4]uint64
		if _, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(by), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0); errno != 0 {
			return fmt.Errorf("the default action of %v: %w", by, errno)
		}
	}
	if err := syscall.Kill(os.Getpid(), by); err != nil {
		return err
	}
	select {}
}

// starve allocates memory until the process ends: by the out-of-memory killer in the memory cgroup
// of the given directory, which must have a limit, or, without a cgroup, by the Go runtime, which
// gives up at a limit of the address space.
func starve(cgroup string) error {
	if cgroup == "" {
		if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: 1 << 26, Max: 1 << 26}); err != nil { // less than is in use
			return err
		}
	} else if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return err
	}
	for {
		block := make([]byte, 16<<20)
		for i := range block {
			block[i] = 1 // touch each page
		}
		hoard = append(hoard, block)
	}
}

// hoard keeps the memory of starve reachable.
var hoard [][]byte

// orphan starts a process that has an empty environment, its own session, and a parent that has
// ended: only its last argument shows to which job it belongs.
func orphan(word string) error {
	cmd := exec.Command("sh", "-c", "(env -i setsid sleep 86400 "+word+" >/dev/null 2>&1 </dev/null &)")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("the orphaned process: %w: %s", err, out)
	}
	return nil
}
