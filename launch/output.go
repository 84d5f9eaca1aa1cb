package launch

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/sirupsen/logrus"
)

// maxPiece is the most text of one line that is held back until the line ends.
const maxPiece = 64 << 10

// Output joins the lines of all workers into one stdout and one stderr and, if asked to, into files by rank. The fields
// are set before first use and not changed after; the zero value throws everything away. It must not be copied.
//
// A line reaches its destination by a single Write, prefixed "[rank]<stdout>:" or "[rank]<stderr>:". "\r" and "\n" end a
// line and are kept; "\r\n" is one end. The last text of a worker is written without a newline if it has none, and of a
// line longer than 64 KiB pieces are written, cut between characters, with the prefix in front of the first. Where another
// worker's line comes after such an unfinished one, a newline is put between them, and what follows of the interrupted
// line gets the prefix again. Bytes that are not UTF-8 pass unchanged.
type Output struct {
	// Stdout and Stderr are where lines go; nil is nowhere. They may be the same.
	Stdout, Stderr io.Writer
	// Dir, if not empty, receives a second copy: Dir/rank.N/stdout and stderr are appended to, and made when needed.
	Dir string
	// Timestamps puts the local time in front of the prefix: "Mon Jan 20 12:00:01 2020[1]<stdout>:".
	Timestamps bool
	// Now tells the time; nil is time.Now.
	Now func() time.Time
	// Log is told of the first failure to write; nil is nobody.
	Log logrus.FieldLogger

	mu     sync.Mutex
	begun  bool
	out    *stream
	err    *stream
	files  map[string]*stream
	failed error
	closed bool
}

// stream is one destination and how what was last written to it ended.
type stream struct {
	w    io.Writer
	last *LineWriter
	end  ending
}

type ending uint8

const (
	newline ending = iota
	carriageReturn
	unfinished
)

// Worker returns the two ends that take the output of one worker. rank tells its present rank and is called each time a
// line ends, without locks held; where rank is nil, or returns less than 0, the text passes unchanged and goes to no file.
// The caller closes both ends when the worker has ended.
func (o *Output) Worker(rank func() int) (stdout, stderr *LineWriter) {
	return &LineWriter{output: o, tag: "stdout", rank: rank}, &LineWriter{output: o, tag: "stderr", rank: rank}
}

// Close closes the files, not Stdout and Stderr, and returns the first failure to open or write anything. Lines that come
// later go to no file.
func (o *Output) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.files {
		if f, ok := s.w.(*os.File); ok {
			if err := f.Close(); err != nil {
				o.fail(err)
			}
		}
	}
	o.files, o.closed = nil, true
	return o.failed
}

// LineWriter takes the output of one worker as it comes and passes it on line by line. It is for one goroutine at a time.
type LineWriter struct {
	output *Output
	tag    string // stdout or stderr
	rank   func() int
	held   []byte // begins a line, or goes on with one that is too long
}

// Write takes a part of the output, whatever its ends. It never fails: Output.Close tells what could not be written.
func (w *LineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		end := lineEnd(p)
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

// Held returns what has come since the last end of a line and was not passed on. It is the writer's own.
func (w *LineWriter) Held() []byte { return w.held }

// Hold begins with what another writer has held of the same output. It is called before the first Write.
func (w *LineWriter) Hold(text []byte) { w.held = append(w.held[:0], text...) }

// Close passes on what has come since the last end of a line.
func (w *LineWriter) Close() error {
	w.flush(true)
	return nil
}

// flush writes pieces of an overlong line and, where all is asked for, the rest too.
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

// lineEnd returns the length of the first line with its end, or 0 where none ends.
func lineEnd(p []byte) int {
	i := bytes.IndexAny(p, "\r\n")
	if i >= 0 && p[i] == '\r' && i+1 < len(p) && p[i+1] == '\n' {
		i++
	}
	return i + 1
}

// boundary returns the last place up to limit where a character begins; limit itself in what is not UTF-8.
func boundary(text []byte, limit int) int {
	for i := limit; i > limit-utf8.UTFMax; i-- {
		if utf8.RuneStart(text[i]) {
			return i
		}
	}
	return limit
}

// put writes a line, or a piece of one, to wherever it belongs.
func (o *Output) put(w *LineWriter, text []byte) {
	rank := -1
	if w.rank != nil {
		rank = w.rank()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	prefix := o.prefix(rank, w.tag)
	for _, s := range []*stream{o.console(w.tag), o.file(rank, w.tag)} {
		if s == nil {
			continue
		}
		if err := s.put(w, prefix, text); err != nil {
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
		now := time.Now
		if o.Now != nil {
			now = o.Now
		}
		prefix = now().AppendFormat(prefix, time.ANSIC)
	}
	return fmt.Appendf(prefix, "[%d]<%s>:", rank, tag)
}

func (s *stream) put(w *LineWriter, prefix, text []byte) error {
	var line []byte
	goesOn := s.last == w && (s.end == unfinished || s.end == carriageReturn && text[0] == '\n')
	if !goesOn {
		if s.end == unfinished {
			line = append(line, '\n')
		}
		line = append(line, prefix...)
	}
	s.last = w
	switch text[len(text)-1] {
	case '\n':
		s.end = newline
	case '\r':
		s.end = carriageReturn
	default:
		s.end = unfinished
	}
	_, err := s.w.Write(append(line, text...))
	return err
}

// console returns the stream of a tag; both tags have the same one where both go to the same place.
func (o *Output) console(tag string) *stream {
	if !o.begun {
		o.begun = true
		if o.Stdout != nil {
			o.out = &stream{w: o.Stdout}
		}
		if o.Stderr != nil {
			o.err = &stream{w: o.Stderr}
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

// same tells whether two writers are one place, as the two ends of a terminal are.
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

// file returns the stream of a rank's file, or nil where there is none to write to.
func (o *Output) file(rank int, tag string) *stream {
	if o.Dir == "" || rank < 0 || o.closed {
		return nil
	}
	path := filepath.Join(o.Dir, "rank."+strconv.Itoa(rank), tag)
	s, ok := o.files[path]
	if !ok {
		var err error
		if s, err = openStream(path); err != nil {
			o.fail(err)
			s = &stream{w: io.Discard} // not tried again with each line
		}
		if o.files == nil {
			o.files = make(map[string]*stream)
		}
		o.files[path] = s
	}
	return s
}

func openStream(path string) (*stream, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o666)
	if err != nil {
		return nil, err
	}
	s := &stream{w: f}
	var last [1]byte
	if fi, err := f.Stat(); err == nil && fi.Size() > 0 {
		if _, err := f.ReadAt(last[:], fi.Size()-1); err == nil && last[0] != '\n' {
			s.end = unfinished // by an earlier run
		}
	}
	return s, nil
}

// fail keeps and logs the first failure: those that follow are mostly the same.
func (o *Output) fail(err error) {
	if o.failed != nil {
		return
	}
	o.failed = fmt.Errorf("launch: output of workers: %w", err)
	if o.Log != nil {
		o.Log.WithError(err).Error("output of workers cannot be written")
	}
}
