package torchrun

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/launch"
)

// Std selects streams of a worker: bit 0 is its stdout, bit 1 its stderr.
type Std uint8

// Streams selects streams of each worker: those that Of has for its local rank, or All if Of has no
// entry for it.
type Streams struct {
	All Std
	Of  map[int]Std
}

// ParseStreams parses "3", or "0:3,1:1" for single workers. 0 selects none, 1 stdout, 2 stderr, and
// 3 both.
func ParseStreams(text string) (s Streams, err error) {
	one := func(text string) Std {
		n, nerr := strconv.Atoi(text)
		if nerr != nil || n < 0 || n > 3 {
			err = fmt.Errorf("%q is neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list such as 0:3,1:1", text)
		}
		return Std(n)
	}
	if !strings.Contains(text, ":") {
		s.All = one(text)
		return s, err
	}
	s.Of = make(map[int]Std)
	for part := range strings.SplitSeq(text, ",") {
		rank, what, _ := strings.Cut(part, ":")
		n, nerr := strconv.Atoi(strings.TrimSpace(rank))
		if nerr != nil || n < 0 {
			return s, fmt.Errorf("%q is not a local rank, in %q", rank, text)
		}
		s.Of[n] = one(strings.TrimSpace(what))
	}
	return s, err
}

func (s Streams) of(local int) Std {
	if std, is := s.Of[local]; is {
		return std
	}
	return s.All
}

// Logs configures the destinations of the workers' output.
type Logs struct {
	// Dir is where each run of the agent creates a folder. Empty: in a temporary folder. /dev/null:
	// no files are written.
	Dir string
	// Redirects selects the streams that go only to a file, and Tee those that go to a file and,
	// with a prefix, to the console.
	Redirects, Tee Streams
	// Shown are the local ranks whose output reaches the console. Nil: all.
	Shown map[int]bool
	// Template is the prefix, in which ${role_name}, ${rank} and ${local_rank} stand for their
	// values. Empty: "[${role_name}${local_rank}]:".
	Template string
	// Stdout and Stderr are the console; nil: nothing is printed.
	Stdout, Stderr io.Writer
}

// check returns an error if files are requested without a folder.
func (l Logs) check() error {
	if l.Dir != os.DevNull {
		return nil
	}
	for _, s := range []Streams{l.Redirects, l.Tee} {
		for _, std := range append(slices.Collect(maps.Values(s.Of)), s.All) {
			if std != 0 {
				return errors.New("torchrun: redirected output needs a folder for logs, not " + os.DevNull)
			}
		}
	}
	return nil
}

// paths are the files of one run of a worker; empty: no files.
type paths struct {
	dir, errorFile string
}

// logs is the state of the logs in one run of the agent.
type logs struct {
	Logs
	dir      string // folder of the run; empty: none
	log      logrus.FieldLogger
	console  *launch.Output
	prefixes []string // by local rank, for the current round
}

// open creates the folder of the run.
func (l Logs) open(runID, tempDir string, log logrus.FieldLogger) (*logs, error) {
	o := &logs{Logs: l, log: log}
	o.console = &launch.Output{Stdout: l.Stdout, Stderr: l.Stderr, Prefix: func(local int, _ string) string { return o.prefixes[local] }}
	if l.Dir == os.DevNull {
		return o, nil
	}
	base := l.Dir
	var err error
	if base == "" {
		base, err = os.MkdirTemp(tempDir, "torchelastic_")
	} else {
		err = safefile.MakeDir(base, safefile.Private)
	}
	if err == nil {
		o.dir, err = os.MkdirTemp(base, fileName(runID)+"_")
	}
	if err != nil {
		return nil, fmt.Errorf("torchrun: the folder of logs: %w", err)
	}
	return o, nil
}

// fileName converts any text to a valid file name.
func fileName(text string) string {
	name := strings.Map(func(r rune) rune {
		if r == '/' || r == '*' || r < ' ' {
			return '_'
		}
		return r
	}, text)
	return name[:min(len(name), 100)]
}

// begin sets the prefixes for a round. No worker of another round may be running.
func (l *logs) begin(role string, workers, base int) {
	template := l.Template
	if template == "" {
		template = "[${role_name}${local_rank}]:"
	}
	l.prefixes = make([]string, workers)
	for i := range l.prefixes {
		l.prefixes[i] = strings.NewReplacer("${role_name}", role, "${rank}", strconv.Itoa(base+i),
			"${local_rank}", strconv.Itoa(i)).Replace(template)
	}
}

// paths creates the folder of a worker, and removes the error file of an earlier run from it.
func (l *logs) paths(attempt, local int) (p paths, err error) {
	if l.dir == "" {
		return p, nil
	}
	p.dir = filepath.Join(l.dir, "attempt_"+strconv.Itoa(attempt), strconv.Itoa(local))
	p.errorFile = filepath.Join(p.dir, "error.json")
	if err := safefile.MakeDir(p.dir, safefile.Private); err != nil {
		return p, fmt.Errorf("torchrun: the folder of a worker's logs: %w", err)
	}
	if err := os.Remove(p.errorFile); err != nil && !errors.Is(err, os.ErrNotExist) {
		return p, fmt.Errorf("torchrun: the error file of an earlier worker: %w", err)
	}
	return p, nil
}

// writers returns the writers for the streams of a worker, and a function that closes them.
func (l *logs) writers(p paths, local int) (stdout, stderr io.Writer, closeAll func() error, err error) {
	var closers []io.Closer
	closeAll = func() (err error) {
		for _, c := range closers {
			err = errors.Join(err, c.Close())
		}
		return err
	}
	for i, name := range []string{"stdout", "stderr"} {
		bit := Std(1) << i
		tee := l.Tee.of(local)&bit != 0
		var to []io.Writer
		if tee || l.Redirects.of(local)&bit != 0 {
			f, ferr := safefile.AppendPlain(filepath.Join(p.dir, name+".log"), os.O_WRONLY, safefile.Private)
			if ferr != nil {
				return nil, nil, closeAll, fmt.Errorf("torchrun: the log of a worker: %w", ferr)
			}
			to, closers = append(to, &logFile{WriteCloser: f, log: l.log}), append(closers, f)
		}
		if console := l.line(local, i, tee, len(to) > 0); console != nil {
			to, closers = append(to, console), append(closers, console)
		}
		if w := io.MultiWriter(to...); i == 0 {
			stdout = w
		} else {
			stderr = w
		}
	}
	return stdout, stderr, closeAll, nil
}

// logFile is a file for the output of a worker. Its Write does not fail: the worker continues, and
// its output still reaches the console. The first failure is logged; output after it is lost.
type logFile struct {
	io.WriteCloser
	log  logrus.FieldLogger
	full bool
}

func (f *logFile) Write(p []byte) (int, error) {
	if f.full {
		return len(p), nil
	}
	if _, err := f.WriteCloser.Write(p); err != nil {
		f.full = true
		f.log.Errorf("torchrun: the output of a worker is no longer kept (--log-dir): %v", safefile.Explain(err))
	}
	return len(p), nil
}

// line returns the writer that sends a stream to the console, or nil if the console does not get
// the stream.
func (l *logs) line(local, stream int, tee, filed bool) *launch.LineWriter {
	if filed && !tee || l.Shown != nil && !l.Shown[local] {
		return nil
	}
	var rank func() int // lines without a rank have no prefix
	if tee {
		rank = func() int { return local }
	}
	stdout, stderr := l.console.Worker(rank)
	return [...]*launch.LineWriter{stdout, stderr}[stream]
}

func (l *logs) close() error { return l.console.Close() }
