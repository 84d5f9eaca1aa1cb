// Package calls makes the kernel refuse single system calls to the programs that a test runs, as an
// old kernel, a container's filter or a file system without them does. Its tests run whole jobs
// under such refusals. It needs no privileges: a filter applies to one process and its descendants.
package calls

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Refusal is a system call that fails.
type Refusal struct {
	// Call is the number of the system call, such as unix.SYS_FLOCK.
	Call uint32
	// If, if not nil, restricts the refusal to calls whose argument matches.
	If *Argument
	// Errno is the error that the call returns. The call has no other effect.
	Errno unix.Errno
}

// Argument matches calls whose argument number Index, from 0, lies in First to Last; the values are
// unsigned 32-bit numbers.
type Argument struct{ Index, First, Last uint32 }

// word is the first argument of a process that Wrap starts.
const word = "refuse-a-call"

// Wrap returns a command that runs this executable. The caller appends the path and the arguments
// of the program to run, and become in the new process applies the refusal and executes it.
func (r Refusal) Wrap() []string {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // of numbers
	}
	return []string{os.Args[0], word, string(text)}
}

// become must be called at the beginning of a TestMain. It returns nil at once if this process was
// not started by the command of [Refusal.Wrap]. Otherwise it replaces the process by the program to
// run, or returns the error that prevents it.
func become() error {
	if len(os.Args) < 4 || os.Args[1] != word {
		return nil
	}
	var r Refusal
	err := json.Unmarshal([]byte(os.Args[2]), &r)
	path := ""
	if err == nil {
		path, err = exec.LookPath(os.Args[3])
	}
	if err == nil {
		err = r.Enter()
	}
	if err == nil {
		err = unix.Exec(path, os.Args[3:], os.Environ())
	}
	return fmt.Errorf("calls: %w", err)
}

// Offsets in the kernel's struct seccomp_data, which BPF reads in words of 32 bits.
const (
	ofCall      = 0
	ofArguments = 16
)

// Enter makes the kernel refuse the call to all threads of this process and to all processes that
// they start, permanently.
func (r Refusal) Enter() error {
	const load, equal, atLeast, above, give = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K,
		unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	const allow, fail = 0x7fff0000, 0x00050000 // SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
	filter := []unix.SockFilter{{Code: load, K: ofCall}}
	if a := r.If; a == nil {
		filter = append(filter, unix.SockFilter{Code: equal, K: r.Call, Jf: 1})
	} else {
		filter = append(filter,
			unix.SockFilter{Code: equal, K: r.Call, Jf: 4},
			unix.SockFilter{Code: load, K: ofArguments + 8*a.Index}, // the lower half on little-endian machines
			unix.SockFilter{Code: atLeast, K: a.First, Jf: 2},
			unix.SockFilter{Code: above, K: a.Last, Jt: 1})
	}
	filter = append(filter, unix.SockFilter{Code: give, K: fail | uint32(r.Errno)}, unix.SockFilter{Code: give, K: allow})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new rights: %w", err)
	}
	const setFilter, allThreads = 1, 1
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, setFilter, allThreads, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("a filter of system calls: %w", errno)
	}
	return nil
}
