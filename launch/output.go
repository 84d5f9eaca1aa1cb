package launch

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// maxPiece is the maximum number of bytes of one line that are held back until the line ends.
const maxPiece = 64 << 10

// Output joins the lines of all workers into one stdout and one stderr and, on request, into files
// by rank. Set the fields before the first use and do not change them later; the zero value drops
// everything. It must not be copied.
//
// A line reaches its destination by a single Write, with the prefix "[rank]<stdout>:" or
// "[rank]<stderr>:". "\r" and "\n" end a line and are kept; "\r\n" is one end. If the last text of
// a worker has no newline, none is added. A line longer than 64 KiB is written in pieces, cut
// between characters, with the prefix before the first piece. If another worker's line comes after
// such an unfinished line, a newline is put between them, and the rest of the interrupted line gets
// the prefix again. Bytes that are not UTF-8 pass unchanged.
type Output struct {
	// Stdout and Stderr are the destinations of lines; nil: none. They may be the same.
	Stdout, Stderr io.Writer
	// Dir, if not empty, receives a second copy: Dir/rank.N/stdout and stderr are created when
	// needed and appended to. Files that belong to another user are refused.
	Dir string
	// Shared lets other users read the files of Dir.
	Shared bool
	// Timestamps puts the local time in front of the prefix: "Mon Jan 20 12:00:01
	// 2020[1]<stdout>:".
	Timestamps bool
	// Prefix, if not nil, returns the prefix of a rank's lines that replaces "[rank]<stdout>:". It
	// must not block, since it is called with a lock held.
	Prefix func(rank int, tag string) string
	// Log takes the first failure to write; nil: nothing is logged.
	Log logrus.FieldLogger
	// Patience is how long Finish waits for a destination that accepts nothing. Zero: 10 s.
	Patience time.Duration

	passed atomic.Uint64 // lines, and pieces of them

	mu sync.Mutex // of what follows; it is not held while something is written or opened
	streams
	failed  error
	closed  bool
	hurried chan struct{} // closed by Hurry; nil: not made yet
	over    chan struct{} // closed by Finish where it gives up; nil: not made yet
}

// streams are the destinations of an Output, which are made when they are first needed.
type streams struct {
	begun    bool // out and err are made
	out, err *stream
	files    map[string]*stream // by path
}

// stream is one destination, with the state in which the last write left it. The goroutine that has
// put its value into turn may write.
type stream struct {
	turn chan struct{} // of capacity 1
	path string        // of a file that is opened when it is first written to
	mode fs.FileMode   // of that file
	w    io.Writer
	last *LineWriter
	end  ending
}

func newStream(w io.Writer) *stream { return &stream{turn: make(chan struct{}, 1), w: w} }

type ending uint8

const (
	newline ending = iota
	carriageReturn
	unfinished
)

// Worker returns the two writers for the output of one worker. rank returns its present rank and is
// called each time a line ends, without locks held; if rank is nil, or returns less than 0, the
// text passes unchanged and goes to no file. The caller closes both writers when the worker has
// ended.
func (o *Output) Worker(rank func() int) (stdout, stderr *LineWriter) {
	return &LineWriter{output: o, tag: "stdout", rank: rank}, &LineWriter{output: o, tag: "stderr", rank: rank}
}

// Close closes the files, not Stdout and Stderr, and returns the first failure to open or write any
// of them. Later lines go to no file. It waits for lines that are being written, unless Finish has
// given them up.
func (o *Output) Close() error {
	over := o.signal(&o.over)
	o.mu.Lock()
	files := o.files
	o.files, o.closed = nil, true
	o.mu.Unlock()
	for _, s := range files {
		if !s.take(over) {
			continue // the system closes it
		}
		if f, ok := s.w.(*os.File); ok {
			if err := f.Close(); err != nil {
				o.fail(err)
			}
		}
		<-s.turn
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.failed
}

// signal returns one of the output's channels, which it makes on first use.
func (o *Output) signal(c *chan struct{}) chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if *c == nil {
		*c = make(chan struct{})
	}
	return *c
}

// defaultPatience is the default of Output.Patience, and hurriedPatience replaces it after Hurry.
const (
	defaultPatience = 10 * time.Second
	hurriedPatience = 200 * time.Millisecond
)

// Finish blocks until done is closed, which the caller does when all workers' writers are closed.
// If nothing is written for the time Patience before that, Finish gives up: it drops the rest and
// lets waiting calls of Write return. It does not wait for a Write that its destination blocks.
// Finish is called once.
func (o *Output) Finish(done <-chan struct{}) {
	hurried, over := o.signal(&o.hurried), o.signal(&o.over)
	patience := o.Patience
	if patience <= 0 {
		patience = defaultPatience
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for passed := o.passed.Load(); ; {
		select {
		case <-done:
			return
		case <-hurried:
			hurried, patience = nil, min(patience, hurriedPatience)
		case <-timer.C:
			if now := o.passed.Load(); now == passed {
				close(over)
				if o.Log != nil {
					o.Log.Warnf("nobody has read the output of workers for %v: the rest of it is lost", patience)
				}
				return
			} else {
				passed = now
			}
		}
		timer.Reset(patience)
	}
}

// Hurry makes Finish, which may already have been called, wait for only a moment. Any goroutine may
// call it.
func (o *Output) Hurry() {
	hurried := o.signal(&o.hurried)
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-hurried:
	default:
		close(hurried)
	}
}

// take blocks until the caller may write to the stream. It returns false if over is closed first.
func (s *stream) take(over <-chan struct{}) bool {
	select {
	case s.turn <- struct{}{}:
	default:
		select {
		case s.turn <- struct{}{}:
		case <-over:
			return false
		}
	}
	select {
	case <-over:
		<-s.turn
		return false
	default:
		return true
	}
}

// LineWriter takes the output of one worker as it comes and passes it on line by line. It is for
// one goroutine at a time.
type LineWriter struct {
	output *Output
	tag    string // stdout or stderr
	rank   func() int
	held   []byte // the beginning of a line, or the next piece of an overlong one
}

// Write takes any part of the output. It never fails: Output.Close returns the failures.
func (w *LineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		end := LineEnd(p)
		ended := end > 0
		if !ended {
			end = len(p)
		}
		w.held = append(w.held, p[:end]...)
		p = p[end:]
		w.flush(ended)
	}
	return n, nil
}

// Held returns the text since the last end of a line that has not been passed on. The writer owns
// the slice.
func (w *LineWriter) Held() []byte { return w.held }

// Hold sets the text that another writer of the same output still held as the beginning of the
// first line. It is called before the first Write.
func (w *LineWriter) Hold(text []byte) { w.held = append(w.held[:0], text...) }

// Close passes on the text since the last end of a line.
func (w *LineWriter) Close() error {
	w.flush(true)
	return nil
}

// flush writes the pieces of an overlong line and, if all is true, the rest too.
func (w *LineWriter) flush(all bool) {
	text := w.held
	for len(text) > maxPiece {
		cut := boundary(text, maxPiece)
		w.output.put(w, text[:cut])
		text = text[cut:]
	}
	if all && len(text) > 0 {
		w.output.put(w, text)
		text = nil
	}
	if len(text) < len(w.held) {
		w.held = append(w.held[:0], text...)
	}
}

// LineEnd returns the length of the first line, including its end, or 0 if p contains no end of a
// line.
func LineEnd(p []byte) int {
	i := bytes.IndexAny(p, "\r\n")
	if i >= 0 && p[i] == '\r' && i+1 < len(p) && p[i+1] == '\n' {
		i++
	}
	return i + 1
}

// boundary returns the last index up to limit at which a character begins, or limit if the text is
// not UTF-8.
func boundary(text []byte, limit int) int {
	for i := limit; i > limit-utf8.UTFMax; i-- {
		if utf8.RuneStart(text[i]) {
			return i
		}
	}
	return limit
}

// put writes a line, or a part of one, to the console and to the rank's file.
func (o *Output) put(w *LineWriter, text []byte) {
	rank := -1
	if w.rank != nil {
		rank = w.rank()
	}
	o.mu.Lock()
	prefix := o.prefix(rank, w.tag)
	to := [...]*stream{o.console(w.tag), o.file(rank, w.tag)}
	if o.over == nil {
		o.over = make(chan struct{})
	}
	over := o.over
	o.mu.Unlock()
	for _, s := range to {
		if s == nil || !s.take(over) {
			continue
		}
		err := s.put(w, prefix, text)
		<-s.turn
		o.passed.Add(1)
		if err != nil {
			o.fail(err)
		}
	}
}

func (o *Output) prefix(rank int, tag string) []byte {
	if rank < 0 || tag == "" {
		return nil
	}
	var prefix []byte
	if o.Timestamps {
		prefix = time.Now().AppendFormat(prefix, time.ANSIC)
	}
	if o.Prefix != nil {
		return append(prefix, o.Prefix(rank, tag)...)
	}
	return fmt.Appendf(prefix, "[%d]<%s>:", rank, tag)
}

func (s *stream) put(w *LineWriter, prefix, text []byte) error {
	if s.w == nil {
		if err := s.open(); err != nil {
			s.w = io.Discard // not tried again with each line
			return err
		}
	}
	var line []byte
	goesOn := s.last == w && (s.end == unfinished || s.end == carriageReturn && text[0] == '\n')
	if !goesOn {
		if s.end == unfinished {
			line = append(line, '\n')
		}
		line = append(line, prefix...)
	}
	last, end := s.last, s.end
	s.last = w
	switch text[len(text)-1] {
	case '\n':
		s.end = newline
	case '\r':
		s.end = carriageReturn
	default:
		s.end = unfinished
	}
	line = append(line, text...)
	n, err := safefile.Write(s.w, line)
	switch {
	case err != nil && n == 0:
		s.last, s.end = last, end
	case err != nil && line[n-1] != '\n':
		s.last, s.end = nil, unfinished // the next write begins a new line
	}
	return err
}

// console returns the stream of a tag. If both go to the same destination, both tags have the same
// stream.
func (o *Output) console(tag string) *stream {
	if !o.begun {
		o.begun = true
		if o.Stdout != nil {
			o.out = newStream(o.Stdout)
		}
		if o.Stderr != nil {
			o.err = newStream(o.Stderr)
		}
		if o.out != nil && o.err != nil && same(o.Stdout, o.Stderr) {
			o.err = o.out
		}
	}
	if tag == "stderr" {
		return o.err
	}
	return o.out
}

// same reports whether two writers have the same destination, such as one terminal.
func same(a, b io.Writer) bool {
	f, ok1 := a.(*os.File)
	g, ok2 := b.(*os.File)
	if ok1 && ok2 {
		fi, err1 := f.Stat()
		gi, err2 := g.Stat()
		return err1 == nil && err2 == nil && os.SameFile(fi, gi)
	}
	return reflect.TypeOf(a).Comparable() && reflect.TypeOf(b).Comparable() && a == b
}

// file returns the stream of a rank's file, or nil if the output goes to no file.
func (o *Output) file(rank int, tag string) *stream {
	if o.Dir == "" || rank < 0 || o.closed {
		return nil
	}
	path := filepath.Join(o.Dir, "rank."+strconv.Itoa(rank), tag)
	s, ok := o.files[path]
	if !ok {
		s = newStream(nil)
		s.path, s.mode = path, safefile.Mode(o.Shared)
		if o.files == nil {
			o.files = make(map[string]*stream)
		}
		o.files[path] = s
	}
	return s
}

// open opens the stream's file.
func (s *stream) open() error {
	// Other users may be able to create files in Dir. Links to Dir, and links in place of rank.N,
	// are followed: users make them to use another disk.
	if err := safefile.MakeDir(filepath.Dir(s.path), s.mode); err != nil {
		return err
	}
	f, err := safefile.AppendPlain(s.path, os.O_RDWR, s.mode)
	if err != nil {
		return err
	}
	s.w = f
	var last [1]byte
	if fi, err := f.Stat(); err == nil && fi.Size() > 0 {
		if _, err := f.ReadAt(last[:], fi.Size()-1); err == nil && last[0] != '\n' {
			s.end = unfinished // by an earlier run
		}
	}
	return nil
}

// fail keeps and logs the first failure only: later ones are mostly the same.
func (o *Output) fail(err error) {
	o.mu.Lock()
	before := o.failed
	if before == nil {
		o.failed = fmt.Errorf("launch: output of workers: %w", err)
	}
	o.mu.Unlock()
	if before == nil && o.Log != nil {
		o.Log.WithError(safefile.Explain(err)).Error("output of workers cannot be written; the job continues")
	}
}
