package torchrun

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/launch"
)

// Failure describes how a worker has failed.
type Failure struct {
	Rank, LocalRank, PID int
	// ExitCode is the exit status, or the negated number of the signal.
	ExitCode int
	// ErrorFile is the error file of the worker; empty: it has not written one.
	ErrorFile string
	// Message gives the reason, and Traceback, if not empty, the place.
	Message, Traceback string
	Time               time.Time
}

// maxErrorFile is the largest size of an error file that is read, in bytes.
const maxErrorFile = 4 << 20

// newFailure returns the failure of a worker that ended at the given time with the error end.
func newFailure(rank, local, pid int, end error, file string, now time.Time) Failure {
	f := Failure{Rank: rank, LocalRank: local, PID: pid, ExitCode: exitCode(end), Time: now}
	var exit *launch.ExitError
	if end != nil && !errors.As(end, &exit) {
		f.Message = end.Error() // it was not started, or cannot be killed
	}
	if text, err := safefile.OwnText(file, maxErrorFile); err == nil {
		f.ErrorFile = file
		f.read(text)
	} else if file != "" && !errors.Is(err, fs.ErrNotExist) {
		f.Message = fmt.Sprintf("its error file cannot be read: %v", err)
	}
	switch {
	case f.Message != "" || f.Traceback != "":
	case f.ExitCode < 0:
		f.Message = fmt.Sprintf("Signal %d (%s) received by PID %d", -f.ExitCode, unix.SignalName(syscall.Signal(-f.ExitCode)), pid)
		if exit != nil && exit.Why != "" {
			f.Message += ": " + exit.Why
		}
	default:
		f.Message = noMessage
	}
	return f
}

// say sets the line of the worker's stderr that gives the reason, unless the worker wrote an error
// file.
func (f *Failure) say(text string) {
	switch {
	case text == "" || f.ErrorFile != "":
	case f.Message == noMessage:
		f.Message = text
	case f.ExitCode < 0:
		f.Message += ": " + text
	}
}

// noMessage is the message of a worker that has not reported why it failed.
const noMessage = "neither an error file nor a line on stderr: a program whose main function is decorated with @record of " +
	"torch.distributed.elastic.multiprocessing.errors has the file"

// read reads the contents of an error file: {"message": text or {"message": …, "extraInfo":
// {"py_callstack": …, "timestamp": …}}, "timestamp": …}.
func (f *Failure) read(text []byte) {
	var file struct {
		Message   json.RawMessage `json:"message"`
		Timestamp json.Number     `json:"timestamp"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		f.Message = fmt.Sprintf("its error file is not what a handler writes: %v", err)
		return
	}
	var long struct {
		Message string `json:"message"`
		Extra   struct {
			Callstack string      `json:"py_callstack"`
			Timestamp json.Number `json:"timestamp"`
		} `json:"extraInfo"`
	}
	if json.Unmarshal(file.Message, &long) == nil && (long.Message != "" || long.Extra.Callstack != "") {
		f.Message, f.Traceback, file.Timestamp = long.Message, long.Extra.Callstack, long.Extra.Timestamp
	} else {
		_ = json.Unmarshal(file.Message, &f.Message) // if it is not a text, the message stays empty
	}
	if s, err := file.Timestamp.Float64(); err == nil && s > 0 && s < 1<<40 {
		f.Time = time.UnixMicro(int64(s * 1e6))
	}
}

// exitCode returns the exit code of an end in Python's form.
func exitCode(end error) int {
	var exit *launch.ExitError
	switch {
	case end == nil:
		return 0
	case !errors.As(end, &exit):
		return 1
	case exit.Signal != 0:
		return -int(exit.Signal)
	}
	return exit.Code
}

// FailedError is returned by Run if workers have failed and no restart was left.
type FailedError struct {
	// Command is the failed command.
	Command string
	// Host is the name of this node.
	Host string
	// Failures are the failures of this node, by rank. There is at least one.
	Failures []Failure
}

// Root returns the first failure by time. If several are equally early, it returns the one with the
// lowest rank.
func (e *FailedError) Root() Failure {
	return slices.MinFunc(e.Failures, func(a, b Failure) int { return a.Time.Compare(b.Time) })
}

// Error returns one line that names the first failure.
func (e *FailedError) Error() string {
	f := e.Root()
	how := fmt.Sprintf("exited with code %d", f.ExitCode)
	if f.ExitCode < 0 {
		how = fmt.Sprintf("was killed by %s", unix.SignalName(syscall.Signal(-f.ExitCode)))
	} else if said, _, _ := strings.Cut(f.Message, "\n"); said != "" && said != noMessage {
		how += ": " + said
	}
	return fmt.Sprintf("%s failed: rank %d (local rank %d, pid %d) %s", e.Command, f.Rank, f.LocalRank, f.PID, how)
}

// Report returns a report of all failures, in several lines.
func (e *FailedError) Report() string {
	root := e.Root()
	var others []string
	first := ""
	for i, f := range e.Failures {
		if text := f.report(i, e.Host); f.Rank == root.Rank {
			first = text
		} else {
			others = append(others, text)
		}
	}
	if len(others) == 0 {
		others = []string{"  <NO_OTHER_FAILURES>"}
	}
	const width = 60
	line, rule := strings.Repeat("=", width), strings.Repeat("-", width)
	return strings.Join([]string{
		line, e.Command + " FAILED", rule, "Failures:", strings.Join(others, "\n"), rule,
		"Root Cause (first observed failure):", first, line,
	}, "\n") + "\n"
}

func (f Failure) report(i int, host string) string {
	file, text := f.ErrorFile, f.Traceback
	if file == "" {
		file = "<N/A>"
	}
	if text == "" {
		text = f.Message
	}
	return fmt.Sprintf("[%d]:\n  time      : %s\n  host      : %s\n  rank      : %d (local_rank: %d)\n"+
		"  exitcode  : %d (pid: %d)\n  error_file: %s\n  traceback : %s",
		i, f.Time.Format("2006-01-02_15:04:05"), host, f.Rank, f.LocalRank, f.ExitCode, f.PID, file,
		strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n  "))
}
