package proc

import (
	"bytes"
	"strings"
)

// LastWords finds the line by which a program that fails says why, in what it writes to its
// standard error: the first one of a crash of the Go runtime or of a panic, the last one of a
// traceback of Python, otherwise the last line that is not empty. The zero value has read nothing.
// It is not safe for concurrent use.
type LastWords struct {
	part        []byte // of an incomplete line
	crash       string // how a stack begins
	exception   string // with which the latest traceback ends
	inTraceback bool
	last        string
}

// mostWords bounds the bytes of a line that are kept.
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
	case text == "" || w.crash != "": // a stack follows
	case strings.HasPrefix(line, "panic: "), strings.HasPrefix(line, "fatal error: "):
		w.crash = text
	case strings.HasPrefix(line, "Traceback (most recent call last):"):
		w.inTraceback = true
	case w.inTraceback && line[0] != ' ' && line[0] != '\t':
		w.exception, w.inTraceback = text, false
	}
	if text != "" {
		w.last = text
	}
}

// Why returns that line; empty: none has been written.
func (w *LastWords) Why() string {
	end := *w
	end.line(string(w.part))
	for _, why := range []string{end.crash, end.exception} {
		if why != "" {
			return why
		}
	}
	return end.last
}
