package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// maxFirstLine is how many bytes of a program Linux reads to find its interpreter.
const maxFirstLine = 256

// ExplainStart adds to err, the error of a start, what is wrong with the program file at path, if
// that is known: it is not executable, the interpreter in its first line does not exist, it has no
// such line, it is for another processor, or the environment is too large for any program. Nil
// stays nil.
func ExplainStart(err error, path string) error {
	if errors.Is(err, syscall.E2BIG) {
		return fmt.Errorf("%w: the kernel permits 128 KiB for one argument or variable of the environment, and a quarter of the stack's limit "+
			"(ulimit -s) for all: unset the largest variables", err)
	}
	if why := modeFault(path); errors.Is(err, syscall.EACCES) && why != "" {
		return fmt.Errorf("%w (%s)", err, why)
	}
	noFile, noFormat := errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOEXEC)
	if !noFile && !noFormat {
		return err
	}
	if why := firstLineFault(path, noFormat); why != "" {
		return fmt.Errorf("%s: %w", why, err)
	}
	return err
}

// ExplainDescriptors adds the remedy to err if this process or the machine has no descriptor left.
// Nil stays nil.
func ExplainDescriptors(err error) error {
	if _, done := errors.AsType[*descriptorsError](err); done {
		return err
	}
	switch {
	case errors.Is(err, syscall.ENFILE):
		return &descriptorsError{err, "the machine has as many files open as it permits (sysctl fs.file-max)"}
	case !errors.Is(err, syscall.EMFILE):
		return err
	}
	limit := "as many"
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) == nil {
		limit = strconv.FormatUint(l.Cur, 10)
	}
	return &descriptorsError{err, "this process may have " + limit + " files open; hvdrun needs 5 for each worker that it starts " +
		"on a host, and 50 more: raise the limit there (ulimit -n, in a unit of systemd LimitNOFILE=)"}
}

// ExplainListen adds to err, the error of a listener, which process has the port, or what else is
// wrong with the address. Nil stays nil.
func ExplainListen(err error) error {
	op, is := errors.AsType[*net.OpError](err)
	if !is || op.Op != "listen" || op.Addr == nil {
		return err
	}
	addr, noAddr := netip.ParseAddrPort(op.Addr.String())
	switch {
	case noAddr != nil:
	case errors.Is(err, syscall.EADDRINUSE):
		if pid, program := Listener(addr); pid != 0 {
			return fmt.Errorf("%w by process %d (%s): choose another port", err, pid, program)
		}
		return fmt.Errorf("%w by another program: choose another port", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%w: this machine has no such address; `ip addr` lists its addresses", err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%w: only root may listen at ports below 1024: choose another port", err)
	}
	return err
}

// descriptorsError is an error with the remedy.
type descriptorsError struct {
	error
	do string
}

func (e *descriptorsError) Error() string { return e.error.Error() + ": " + e.do }
func (e *descriptorsError) Unwrap() error { return e.error }

// ExplainCommand returns what is wrong with the mode or the first line of the program that begins a
// shell's command, or "" if that is unknown. The shell itself reports "not found" even if the file
// exists.
func ExplainCommand(command string) string {
	words := strings.Fields(command)
	if len(words) == 0 || !strings.Contains(words[0], "/") {
		return ""
	}
	if why := modeFault(words[0]); why != "" {
		return why
	}
	interpreter, isScript := interpreterOf(firstLine(words[0]))
	if !isScript || there(interpreter) {
		return ""
	}
	return firstLineFault(words[0], false)
}

// modeFault returns the remedy if nobody may execute the file, or "".
func modeFault(path string) string {
	fi, err := os.Stat(path)
	if err != nil || !fi.Mode().IsRegular() || fi.Mode()&0o111 != 0 {
		return ""
	}
	return "it is there: make it executable by chmod +x " + path
}

// firstLineFault returns the reason why the program at path cannot be started, or "".
func firstLineFault(path string, noFormat bool) string {
	line := firstLine(path)
	interpreter, isScript := interpreterOf(line)
	switch {
	case line == nil:
		return ""
	case isScript && strings.HasSuffix(interpreter, "\r"):
		return fmt.Sprintf("its interpreter %q is missing: the lines of the file end in CR LF, as on Windows; sed -i 's/\\r$//' mends it", interpreter)
	case isScript && !there(interpreter):
		return fmt.Sprintf("its interpreter %s is missing", interpreter)
	case bytes.HasPrefix(line, []byte("\x7fELF")) && noFormat:
		return "it is a program for another processor"
	case bytes.HasPrefix(line, []byte("\x7fELF")):
		return "its loader, or another interpreter, is missing: it was built for another C library"
	case noFormat:
		return "it has no first line such as #!/bin/sh"
	}
	return ""
}

// firstLine returns the first line of a regular file, as far as Linux reads it, or nil if it cannot
// be read.
func firstLine(path string) []byte {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // it may have become a pipe
	if err != nil {
		return nil
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFirstLine))
	if err != nil {
		return nil
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	return append([]byte{}, line...)
}

// interpreterOf returns the program that a first line names.
func interpreterOf(line []byte) (path string, isScript bool) {
	rest, isScript := bytes.CutPrefix(line, []byte("#!"))
	words := strings.FieldsFunc(string(rest), func(r rune) bool { return r == ' ' || r == '\t' })
	if !isScript || len(words) == 0 {
		return "", false
	}
	return words[0], true
}

func there(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
