package sandbox

import (
	"os"
	"syscall"
)

// WriteProgram writes a program or script that can be run at once. Without it, a process that
// another goroutine starts while the file is open for writing would keep it open until that process
// runs its own program, and the kernel does not run a file that is open for writing (ETXTBSY).
func WriteProgram(path string, text []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, text, 0o700)
}
