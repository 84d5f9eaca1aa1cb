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

// deaths are the signals by which a fault can end the process as the kernel does for a program that
// handles none of them: without the Go runtime's trace, and with a core dump where the limit allows
// one.
var deaths = map[string]syscall.Signal{
	"kill": syscall.SIGKILL,
	"segv": syscall.SIGSEGV,
	"abrt": syscall.SIGABRT,
}

// die ends the process by the signal, with its default action. It returns only where it cannot.
func die(by syscall.Signal) error {
	if by != syscall.SIGKILL {
		// The layout of the kernel's struct sigaction: handler, flags, restorer, mask. All zero is
		// SIG_DFL.
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

// starve takes memory until the kernel ends the process. In the folder of a memory cgroup, which
// must have a limit, that is the kernel's out-of-memory killer; without one it is the Go runtime,
// which gives up at the limit of the address space.
func starve(cgroup string) error {
	if cgroup == "" {
		if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: 1 << 26, Max: 1 << 26}); err != nil { // less than is taken
			return err
		}
	} else if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return err
	}
	for {
		block := make([]byte, 16<<20)
		for i := range block {
			block[i] = 1 // each page is taken
		}
		hoard = append(hoard, block)
	}
}

// hoard keeps what starve takes.
var hoard [][]byte

// stray starts a process that has an empty environment and a session of its own, and whose parent
// has ended: nothing but its last argument tells where it comes from.
func stray(word string) error {
	cmd := exec.Command("sh", "-c", "(env -i setsid sleep 86400 "+word+" >/dev/null 2>&1 </dev/null &)")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("the stray process: %w: %s", err, out)
	}
	return nil
}
