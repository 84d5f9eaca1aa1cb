// Package line defines the messages between a worker and its launcher, and implements the worker's
// end.
//
// A message is a line of JSON (docs/reference/worker-protocol.md). Lines are sent over the socket
// that a worker inherits, or, if a process between the launcher and the worker has not passed the
// socket on, over a connection to the launcher's door. The launcher's end is internal/line/server.
// It passes lines between workers and the driver, by the session of an agent or within the driver's
// process.
package line

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// Version is the version of the lines.
	Version = 1
	// Protocol is the ALPN protocol of lines at a launcher's door.
	Protocol = "hvdrun-line"
	// TasksProtocol is the ALPN protocol of the connections that tasks.proto describes.
	TasksProtocol = "hvdrun-tasks"
	// StoreProtocol is the ALPN protocol of connections to the driver's store for programs in other
	// languages.
	StoreProtocol = "hvdrun-store"

	// MostUp bounds a line of a worker, in bytes.
	MostUp = 1 << 20
	// mostDown bounds a line to a worker, in bytes.
	mostDown = 16 << 20
	// mostTail bounds the bytes after a line to a worker.
	mostTail = 16 << 20
)

// Hello is the first line of a worker.
type Hello struct {
	Version int    `json:"version"`
	Program string `json:"program,omitempty"`
	// Full: the worker is a program of package elastic. It sends heartbeats itself, each as a Beat,
	// and receives the members of a world as columns.
	Full bool `json:"full,omitempty"`
}

// ReportLine is a report of a worker.
type ReportLine struct {
	What       string `json:"what"` // a word of a Report, "backend" or "failed"
	Generation uint64 `json:"generation,omitempty"`
	Commits    uint64 `json:"commits,omitempty"`
	Backend    string `json:"backend,omitempty"`
	Error      string `json:"error,omitempty"`
	Where      string `json:"where,omitempty"`
}

// Heard is the launcher's report to the driver of what a worker has received.
type Heard struct {
	Seq            uint64 `json:"seq,omitempty"`
	LostGeneration uint64 `json:"lost_generation,omitempty"`
	LostRanks      int    `json:"lost_ranks,omitempty"`
	// Again: the driver should send again what the worker lacks, since it may have been lost.
	Again bool `json:"again,omitempty"`
}

// StacksLine is the answer to "stacks".
type StacksLine struct {
	ID   uint64 `json:"id"`
	Text string `json:"text,omitempty"`
	// Worker is JSON of package stacks, instead of Text.
	Worker json.RawMessage `json:"worker,omitempty"`
}

// Message is any line to a worker. Is determines which other fields have a meaning.
type Message struct {
	Is string `json:"is"`
	// hello
	Version     int    `json:"version,omitempty"`
	Incarnation string `json:"incarnation,omitempty"`
	// world and looked: the encoded members follow in Tail bytes. Base, unless 0, is the number of
	// the members from which these differ.
	Generation  uint64 `json:"generation,omitempty"`
	Rank        int    `json:"rank,omitempty"`
	Size        int    `json:"size,omitempty"`
	Root        int    `json:"root,omitempty"`
	Seq         uint64 `json:"seq,omitempty"`
	DataKey     string `json:"data_key,omitempty"`
	StoreNumber uint64 `json:"store_number,omitempty"`
	Number      uint64 `json:"number,omitempty"`
	Base        uint64 `json:"base,omitempty"`
	Tail        int    `json:"tail,omitempty"`
	// dismissed
	Why  string `json:"why,omitempty"`
	Last bool   `json:"last,omitempty"`
	// updated, with seq and generation
	Change []string `json:"change,omitempty"`
	// lost, with generation
	Ranks []int `json:"ranks,omitempty"`
	// stacks and pong
	ID        uint64 `json:"id,omitempty"`
	MostBytes int    `json:"most_bytes,omitempty"`
	Driver    bool   `json:"driver,omitempty"`
	// error
	Text  string `json:"text,omitempty"`
	Fatal bool   `json:"fatal,omitempty"`
}

// Up returns a line of a worker without its newline: v with the field do.
func Up(do string, v any) []byte { return encode("do", do, v) }

// Down returns a line to a worker without its newline: v with the field is.
func Down(is string, v any) []byte { return encode("is", is, v) }

// Text returns a plain value, such as a Message, as a line without its newline.
func Text(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("line: %v", err)) // cannot happen: the lines are plain values
	}
	return text
}

func encode(field, kind string, v any) []byte {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if v == nil {
		v = struct{}{}
	}
	if err := encoder.Encode(v); err != nil {
		panic(fmt.Sprintf("line: %v", err)) // cannot happen: the lines are plain values
	}
	body := bytes.TrimSuffix(b.Bytes(), []byte{'\n'})[1:]
	text := append(make([]byte, 0, len(body)+len(field)+len(kind)+8), `{"`+field+`":"`+kind+`"`...)
	if len(body) > 1 {
		text = append(text, ',')
	}
	return append(text, body...)
}

// Kind returns the field do of a worker's line.
func Kind(text []byte) (string, error) {
	var of struct {
		Do string `json:"do"`
	}
	if !utf8.Valid(text) {
		return "", errors.New("the line is not UTF-8")
	}
	if err := json.Unmarshal(text, &of); err != nil {
		return "", fmt.Errorf("the line is not a JSON object of the protocol: %w", err)
	}
	if len(of.Do) > maxAddr {
		return "", fmt.Errorf("the word of the line is longer than %d bytes", maxAddr)
	}
	return of.Do, nil
}

// Dismissed returns the line that dismisses a worker because of ErrRemoved, ErrLast or ErrFinished;
// it panics for other errors.
func Dismissed(why error) []byte {
	d := struct {
		Why  string `json:"why"`
		Last bool   `json:"last"`
	}{Last: errors.Is(why, ErrLast)}
	switch {
	case errors.Is(why, ErrRemoved):
		d.Why = "removed"
	case errors.Is(why, ErrFinished):
		d.Why = "finished"
	default:
		panic(fmt.Sprintf("line: %v is not a dismissal", why))
	}
	return Down("dismissed", d)
}

// Updated returns the line that notifies a worker of an update.
func Updated(u notify.Update) []byte {
	change := []string{}
	if u.Change&plan.Added != 0 {
		change = append(change, "added")
	}
	if u.Change&plan.Removed != 0 {
		change = append(change, "removed")
	}
	return Down("updated", struct {
		Seq        uint64   `json:"seq"`
		Change     []string `json:"change"`
		Generation uint64   `json:"generation"`
	}{u.Seq, change, u.Generation})
}

// Lost returns the line that notifies a worker of a loss.
func Lost(l notify.Loss) []byte {
	return Down("lost", struct {
		Generation uint64 `json:"generation"`
		Ranks      []int  `json:"ranks"`
	}{l.Generation, append([]int{}, l.Ranks...)})
}

// update returns the update in an updated line.
func (m *Message) update() notify.Update {
	u := notify.Update{Seq: m.Seq, Generation: m.Generation}
	for _, word := range m.Change {
		switch word {
		case "added":
			u.Change |= plan.Added
		case "removed":
			u.Change |= plan.Removed
		}
	}
	return u
}

// Error returns the line that reports an error to a worker.
func Error(text string, fatal bool) []byte {
	return Down("error", struct {
		Text  string `json:"text"`
		Fatal bool   `json:"fatal"`
	}{text, fatal})
}

// Reader reads lines and the bytes after them.
type Reader struct {
	in   *bufio.Reader
	most int
	buf  []byte
}

// NewReader returns a Reader that accepts lines of up to most bytes.
func NewReader(from io.Reader, most int) *Reader {
	return &Reader{in: bufio.NewReaderSize(from, 4<<10), most: most}
}

// TooLongError is the error for a line of more than Most bytes.
type TooLongError struct{ Most int }

// Error names the bound.
func (e *TooLongError) Error() string { return fmt.Sprintf("a line of more than %d bytes", e.Most) }

// Line returns the next line without its newline. The next call overwrites its memory.
func (r *Reader) Line() ([]byte, error) {
	r.buf = r.buf[:0]
	if cap(r.buf) > 64<<10 {
		r.buf = nil // long lines are rare
	}
	for {
		part, err := r.in.ReadSlice('\n')
		if len(r.buf)+len(part) > r.most {
			return nil, &TooLongError{r.most}
		}
		r.buf = append(r.buf, part...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(r.buf, []byte{'\n'}), nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(r.buf) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}

// Message returns the next line to a worker and the bytes after it.
func (r *Reader) Message() (m Message, tail []byte, err error) {
	text, err := r.Line()
	if err != nil {
		return m, nil, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, nil, fmt.Errorf("line: a line of the launcher is not JSON: %w", err)
	}
	if m.Tail < 0 || m.Tail > mostTail {
		return m, nil, fmt.Errorf("line: %d bytes follow a line; at most %d are allowed", m.Tail, mostTail)
	}
	if m.Tail > 0 {
		tail = make([]byte, m.Tail)
		_, err = io.ReadFull(r.in, tail)
	}
	return m, tail, err
}
