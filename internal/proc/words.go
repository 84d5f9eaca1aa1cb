package proc

import (
	"bytes"
	"cmp"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// LastWords finds, in the standard error of a program that fails, the line that gives the reason:
// the first line of a crash of the Go runtime, with the remedy if it can start no thread, of a
// panic, or of an unhandled C++ exception; else the last line of a Python traceback, with the
// program's line in parentheses; else the last line with a letter or a digit. A traceback that many
// lines follow does not count. The zero value has read nothing. It is not safe for concurrent use.
type LastWords struct {
	part        []byte // of an incomplete line
	crash       string // the first line of a crash
	more        bool   // the next line belongs to crash: it is the message
	exception   string // the last line of the latest traceback
	after       int    // number of lines since exception
	inTraceback bool
	place       string // of the traceback: its innermost line of the program, or else of a library
	last        string
}

const (
	// mostWords bounds the bytes that are kept of a line.
	mostWords = 4 << 10
	// mostAfter bounds the lines after a traceback: a program that prints more has handled the
	// exception. PyTorch's errors print the stack of C++ after it.
	mostAfter = 100
)

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
	line = withoutRank(line)
	text := strings.TrimSpace(line)
	place := pythonPlace(line)
	w.after++
	switch {
	case text == "":
	case w.more:
		w.crash, w.more = w.crash+" "+text, false
	case w.crash != "": // a stack follows
	case strings.Contains(line, "pthread_create failed: "), strings.HasPrefix(line, "runtime: failed to create new OS thread "): // Go
		w.crash = text + ": there are too many processes and threads: raise the limit (ulimit -u, pids.max of the cgroup)"
	case strings.HasPrefix(line, "panic: "), strings.HasPrefix(line, "fatal error: "), isGoSignal(line):
		w.crash = text
	case strings.HasPrefix(line, "thread '") && strings.Contains(line, " panicked at "): // Rust
		w.crash, w.more = text, strings.HasSuffix(text, ":")
	case strings.HasPrefix(line, "terminate called "): // C++
		w.crash, w.more = text, strings.Contains(line, "throwing an instance")
	case strings.HasPrefix(line, "Traceback (most recent call last):"):
		w.inTraceback, w.place = true, ""
	case place != "": // of a traceback, or of a syntax error, which has none
		if !w.inTraceback || w.place == "" || !inLibrary(place) {
			w.place = place
		}
		w.inTraceback = true
	case w.inTraceback && line[0] != ' ' && line[0] != '\t':
		w.exception, w.inTraceback, w.after = text, false, 0
		if w.place != "" {
			w.exception += " (" + w.place + ")"
		}
	}
	if strings.ContainsFunc(text, isWord) {
		w.last = text
	}
}

func isWord(c rune) bool { return unicode.IsLetter(c) || unicode.IsDigit(c) }

// withoutRank returns a line without the prefix, as in "[rank0]: ", that PyTorch puts before each
// line of a traceback.
func withoutRank(line string) string {
	if rest, is := strings.CutPrefix(line, "[rank"); is {
		if n, rest, is := strings.Cut(rest, "]: "); is && isNumber(n) {
			return rest
		}
	}
	return line
}

// pythonPlace returns "train.py:3" for a line of a traceback of Python such as `  File "train.py",
// line 3, in f`, and nothing for others.
func pythonPlace(line string) string {
	rest, is := strings.CutPrefix(line, `  File "`)
	if !is {
		return ""
	}
	file, rest, is := strings.Cut(rest, `", line `)
	number, _, _ := strings.Cut(rest, ",")
	if !is || !isNumber(number) {
		return ""
	}
	return file + ":" + number
}

func isNumber(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(c rune) bool { return c < '0' || c > '9' })
}

// inLibrary reports whether a place is in a library of Python, or in a module without a file.
func inLibrary(place string) bool {
	return strings.HasPrefix(place, "<") || slices.ContainsFunc(libraries, func(of string) bool { return strings.Contains(place, of) })
}

// libraries are parts of the paths of Python's libraries, and of hvdrun's own package.
var libraries = []string{"/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "/hvdrun/python-"}

// isGoSignal returns whether the line begins the Go runtime's dump of stacks and registers: the
// name of the signal that ends the program, as in "SIGQUIT: quit".
func isGoSignal(line string) bool {
	name, _, is := strings.Cut(line, ": ")
	return is && unix.SignalNum(name) != 0
}

// Why returns the line that gives the reason, or "" if nothing was written.
func (w *LastWords) Why() string {
	end := *w
	end.line(string(w.part))
	return cmp.Or(end.failure(), end.last)
}

// Crash returns the line that gives the reason if it reports a crash, a panic or an exception, and
// "" otherwise.
func (w *LastWords) Crash() string {
	end := *w
	end.line(string(w.part))
	return end.failure()
}

func (w *LastWords) failure() string {
	if w.crash == "" && w.after <= mostAfter {
		return w.exception
	}
	return w.crash
}
