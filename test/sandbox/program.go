package sandbox

import (
	"os"
	"syscall"
)

// WriteProgram writes a program, a script perhaps, that can be run at once. A process that another
// goroutine starts while the file is open for writing would have it open until it runs its own
// program, and the kernel runs no file that is open for writing (ETXTBSY).
func WriteProgram(path string, text []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, text, 0o700)
}
