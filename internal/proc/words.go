package proc

import (
	"bytes"
	"cmp"
	"strings"

	"golang.org/x/sys/unix"
)

// LastWords finds, in the standard error of a program that fails, the line that gives the reason:
// the first line of a crash of the Go runtime, of a panic, or of an unhandled C++ exception; else
// the last line of a Python traceback; else the last line that is not empty. The zero value has
// read nothing. It is not safe for concurrent use.
type LastWords struct {
	part        []byte // of an incomplete line
	crash       string // the first line of a crash
	more        bool   // the next line belongs to crash: it is the message
	exception   string // the last line of the latest traceback
	inTraceback bool
	last        string
}

// mostWords bounds the bytes that are kept of a line.
const mostWords = 4 << 10

// Write reads what the program has written. It never fails.
func (w *LastWords) Write(b []byte) (int, error) {
	rest := b
	for {
		i := bytes.IndexAny(rest, "\r\n")
		if i < 0 {
			w.part = append(w.part, rest[:min(len(rest), mostWords-len(w.part))]...)
			return len(b), nil
		}
		w.part = append(w.part, rest[:min(i, mostWords-len(w.part))]...)
		w.line(string(w.part))
		w.part, rest = w.part[:0], rest[i+1:]
	}
}

func (w *LastWords) line(line string) {
	text := strings.TrimSpace(line)
	switch {
	case text == "":
	case w.more:
		w.crash, w.more = w.crash+" "+text, false
	case w.crash != "": // a stack follows
	case strings.HasPrefix(line, "panic: "), strings.HasPrefix(line, "fatal error: "), isGoSignal(line):
		w.crash = text
	case strings.HasPrefix(line, "thread '") && strings.Contains(line, " panicked at "): // Rust
		w.crash, w.more = text, strings.HasSuffix(text, ":")
	case strings.HasPrefix(line, "terminate called "): // C++
		w.crash, w.more = text, strings.Contains(line, "throwing an instance")
	case strings.HasPrefix(line, "Traceback (most recent call last):"):
		w.inTraceback = true
	case w.inTraceback && line[0] != ' ' && line[0] != '\t':
		w.exception, w.inTraceback = text, false
	}
	if text != "" {
		w.last = text
	}
}

// isGoSignal returns whether the line begins the Go runtime's dump of stacks and registers: the
// name of the signal that ends the program, as in "SIGQUIT: quit".
func isGoSignal(line string) bool {
	name, _, is := strings.Cut(line, ": ")
	return is && unix.SignalNum(name) != 0
}

// Why returns that line, or "" if nothing was written.
func (w *LastWords) Why() string {
	end := *w
	end.line(string(w.part))
	return cmp.Or(end.crash, end.exception, end.last)
}

// Crash returns that line if it is of a crash, a panic or an exception, or "".
func (w *LastWords) Crash() string {
	end := *w
	end.line(string(w.part))
	return cmp.Or(end.crash, end.exception)
}
