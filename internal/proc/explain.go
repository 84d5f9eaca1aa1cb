package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// maxFirstLine is how much Linux reads of a program to find its interpreter.
const maxFirstLine = 256

// ExplainStart returns err, with which a program could not be started, with what is wrong with the
// file at path, if that is known: it is not executable, the interpreter that its first line names
// is missing, it has no such line, or it is for another processor. Nil stays nil.
func ExplainStart(err error, path string) error {
	if fi, stat := os.Stat(path); errors.Is(err, syscall.EACCES) && stat == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 == 0 {
		return fmt.Errorf("%w (it is there: make it executable by chmod +x %s)", err, path)
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

// ExplainCommand returns what is wrong with the program that a shell's command begins with, if its
// first line tells: the shell itself says "not found" of a file that is there. "" where nothing is
// known.
func ExplainCommand(command string) string {
	words := strings.Fields(command)
	if len(words) == 0 || !strings.Contains(words[0], "/") {
		return ""
	}
	interpreter, isScript := interpreterOf(firstLine(words[0]))
	if !isScript || there(interpreter) {
		return ""
	}
	return firstLineFault(words[0], false)
}

// firstLineFault returns why the program at path cannot be started, or "".
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

// firstLine returns the first line of a regular file, as far as Linux reads it; nil where it cannot
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
