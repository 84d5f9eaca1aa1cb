// Package calls makes the kernel refuse single system calls to the programs that a test runs, as an
// old kernel, a container's filter or a file system that lacks them does. Its tests run whole jobs
// so. Nothing of it needs rights: a filter is of a process, and of its descendants.
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
	// Call is the number of the call, as unix.SYS_FLOCK has it.
	Call uint32
	// If, where it is not nil, restricts the refusal to calls with such an argument.
	If *Argument
	// Errno is what the call returns, and does nothing else.
	Errno unix.Errno
}

// Argument is true of calls whose argument of an index, from 0, is within First to Last, as numbers
// of 32 bits without sign.
type Argument struct{ Index, First, Last uint32 }

// word begins the arguments of a process that is to refuse a call to a program.
const word = "refuse-a-call"

// Wrap returns the command, of this very executable, that runs the program whose path and arguments
// are appended. become must see its arguments.
func (r Refusal) Wrap() []string {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // of numbers
	}
	return []string{os.Args[0], word, string(text)}
}

// become is for the beginning of a TestMain. It returns nil at once where this process was not
// started by the words of [Refusal.Wrap]; where it was, it becomes the program that they run, or
// returns why not.
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

// Offsets in the kernel's struct seccomp_data, of which BPF reads words of 32 bits.
const (
	ofCall      = 0
	ofArguments = 16
)

// Enter has all threads of this process, and what they start, refused the call for good.
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
			unix.SockFilter{Code: load, K: ofArguments + 8*a.Index}, // its lower half, of little-endian machines
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
