package bridge

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// RemoteError is a Python exception that a task has ended with, as far as it can be read without
// running it.
type RemoteError struct {
	// Class is that of the exception, with its module unless that is builtins; Text its arguments.
	Class, Text string
}

func (e *RemoteError) Error() string {
	if e.Text == "" {
		return e.Class
	}
	return e.Class + ": " + e.Text
}

const (
	// maxOps bounds the steps in which a pickle is read, and maxParts the arguments of an exception
	// that are shown.
	maxOps   = 100_000
	maxParts = 16
	// maxName bounds the name of its class, maxShown its text.
	maxName  = 255
	maxShown = 16 << 10
)

// exceptionFrom reads the class and the arguments of a pickled exception. Nothing of the pickle is
// run: of calls, only what is called and with what is noted. Bytes that are no such pickle are an
// error with a text that says so.
func exceptionFrom(p []byte) *RemoteError {
	top, err := (&unpickler{in: p, memo: make(map[uint64]*thing)}).read()
	if err != nil {
		return &RemoteError{"unreadable exception", fmt.Sprintf("%d bytes: %v", len(p), err)}
	}
	class, args := top.callee, top.parts
	// tblib, which Scaler's workers use, pickles exceptions with their tracebacks.
	if class != nil && strings.HasSuffix(class.text, ".unpickle_exception") && len(args) > 1 && args[1].kind == isTuple {
		class, args = args[0], args[1].parts
	}
	if top.kind != isCall || class == nil || class.kind != isGlobal {
		return &RemoteError{"unreadable exception", fmt.Sprintf("%d bytes, which are no exception", len(p))}
	}
	e := &RemoteError{Class: cut(strings.TrimPrefix(class.text, "builtins."), maxName)}
	var texts []string
	for i, a := range args {
		if i == maxParts {
			texts = append(texts, "…")
			break
		}
		texts = append(texts, a.String())
	}
	e.Text = cut(strings.Join(texts, ", "), maxShown)
	return e
}

// cut shortens a text.
func cut(text string, most int) string {
	if len(text) > most {
		text = text[:most] + "…"
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// thing is a value of a pickle, as far as it matters.
type thing struct {
	kind   kind
	text   string // of a text, a number, a global
	callee *thing
	parts  []*thing // of a tuple; arguments of a call
}

type kind uint8

const (
	isOther kind = iota
	isText
	isGlobal
	isTuple
	isCall
	isMark
)

func (t *thing) String() string {
	switch t.kind {
	case isText:
		return cut(t.text, maxShown)
	case isGlobal:
		return "<" + cut(t.text, maxName) + ">"
	case isTuple:
		return fmt.Sprintf("<%d values>", len(t.parts))
	case isCall:
		if t.callee.kind == isGlobal {
			return "<" + cut(t.callee.text, maxName) + ">"
		}
	}
	return "<value>"
}

var other = &thing{}

// unpickler follows the stack of a pickle of protocol 2 to 5. Values share memory with the bytes;
// each step adds at most one to the stack or the memo, so that steps bound memory too.
type unpickler struct {
	in    []byte
	stack []*thing
	memo  map[uint64]*thing
	done  bool
}

var errPickle = errors.New("no pickle that can be read")

func (u *unpickler) read() (*thing, error) {
	for range maxOps {
		if err := u.step(); err != nil {
			return nil, err
		}
		if u.done {
			return u.pop()
		}
	}
	return nil, errPickle
}

// take returns the next n bytes.
func (u *unpickler) take(n uint64) ([]byte, error) {
	if n > uint64(len(u.in)) {
		return nil, errPickle
	}
	b := u.in[:n:n]
	u.in = u.in[n:]
	return b, nil
}

// number returns the next number of so many bytes.
func (u *unpickler) number(size int) (uint64, error) {
	b, err := u.take(uint64(size))
	if err != nil {
		return 0, err
	}
	var all [8]byte
	copy(all[:], b)
	return binary.LittleEndian.Uint64(all[:]), nil
}

// counted returns bytes that follow their number.
func (u *unpickler) counted(size int) ([]byte, error) {
	n, err := u.number(size)
	if err != nil {
		return nil, err
	}
	return u.take(n)
}

func (u *unpickler) line() (string, error) {
	i := bytes.IndexByte(u.in, '\n')
	if i < 0 || i > 2*maxName {
		return "", errPickle
	}
	text := string(u.in[:i])
	u.in = u.in[i+1:]
	return text, nil
}

func (u *unpickler) push(t *thing) { u.stack = append(u.stack, t) }

func (u *unpickler) pop() (*thing, error) {
	if len(u.stack) == 0 || u.stack[len(u.stack)-1].kind == isMark {
		return nil, errPickle
	}
	t := u.stack[len(u.stack)-1]
	u.stack = u.stack[:len(u.stack)-1]
	return t, nil
}

// popMark returns what has come since the last mark.
func (u *unpickler) popMark() ([]*thing, error) {
	for i := len(u.stack) - 1; i >= 0; i-- {
		if u.stack[i].kind == isMark {
			parts := append([]*thing(nil), u.stack[i+1:]...)
			u.stack = u.stack[:i]
			return parts, nil
		}
	}
	return nil, errPickle
}

// popAll returns the last n values.
func (u *unpickler) popAll(n int) ([]*thing, error) {
	parts := make([]*thing, n)
	for i := n - 1; i >= 0; i-- {
		t, err := u.pop()
		if err != nil {
			return nil, err
		}
		parts[i] = t
	}
	return parts, nil
}

// step does what the next byte says.
func (u *unpickler) step() error {
	op, err := u.take(1)
	if err != nil {
		return err
	}
	switch op[0] {
	case 0x80: // the protocol
		_, err = u.take(1)
	case 0x95: // a frame
		_, err = u.take(8)
	case '.':
		u.done = true
	case '(':
		u.push(&thing{kind: isMark})
	case '0':
		_, err = u.pop()
	case '1':
		_, err = u.popMark()
	case '2':
		return u.memorize(func(t *thing) { u.push(t) })
	default:
		return u.value(op[0])
	}
	return err
}

// memorize calls f with the last value, which stays.
func (u *unpickler) memorize(f func(*thing)) error {
	t, err := u.pop()
	if err != nil {
		return err
	}
	u.push(t)
	f(t)
	return nil
}

// value reads a value, or refers to one.
func (u *unpickler) value(op byte) error {
	sizes := map[byte]int{0x8c: 1, 'X': 4, 0x8d: 8, 'C': 1, 'B': 4, 0x8e: 8, 0x96: 8, 'J': 4, 'K': 1, 'M': 2, 'G': 8, 0x8a: 1,
		'q': 1, 'r': 4, 'h': 1, 'j': 4}
	switch op {
	case 0x8c, 'X', 0x8d:
		b, err := u.counted(sizes[op])
		if err != nil || !utf8.Valid(b) {
			return errPickle
		}
		u.push(&thing{kind: isText, text: string(b[:min(len(b), maxShown+utf8.UTFMax)])})
		return nil
	case 'C', 'B', 0x8e, 0x96, 0x8a:
		b, err := u.counted(sizes[op])
		u.push(&thing{text: fmt.Sprintf("%d bytes", len(b))})
		return err
	case 'J', 'K', 'M':
		n, err := u.number(sizes[op])
		u.push(&thing{kind: isText, text: strconv.Itoa(int(int32(n)))})
		return err
	case 'G':
		b, err := u.take(8)
		if err == nil {
			u.push(&thing{kind: isText, text: strconv.FormatFloat(math.Float64frombits(binary.BigEndian.Uint64(b)), 'g', -1, 64)})
		}
		return err
	case 'N', 0x88, 0x89:
		u.push(&thing{kind: isText, text: map[byte]string{'N': "None", 0x88: "True", 0x89: "False"}[op]})
	case '}', ']', 0x8f:
		u.push(other)
	case ')':
		u.push(&thing{kind: isTuple})
	case 0x94:
		return u.memorize(func(t *thing) { u.memo[uint64(len(u.memo))] = t })
	case 'q', 'r':
		n, err := u.number(sizes[op])
		if err != nil {
			return err
		}
		return u.memorize(func(t *thing) { u.memo[n] = t })
	case 'h', 'j':
		n, err := u.number(sizes[op])
		if err != nil || u.memo[n] == nil {
			return errPickle
		}
		u.push(u.memo[n])
	default:
		return u.compound(op)
	}
	return nil
}

// compound makes a value of others.
func (u *unpickler) compound(op byte) error {
	var parts []*thing
	var err error
	switch op {
	case 'c':
		module, err := u.line()
		if err != nil {
			return err
		}
		name, err := u.line()
		u.push(&thing{kind: isGlobal, text: module + "." + name})
		return err
	case 0x93:
		if parts, err = u.popAll(2); err == nil {
			u.push(&thing{kind: isGlobal, text: cut(parts[0].text, maxName) + "." + cut(parts[1].text, maxName)})
		}
	case 0x85, 0x86, 0x87:
		if parts, err = u.popAll(int(op) - 0x84); err == nil {
			u.push(&thing{kind: isTuple, parts: parts})
		}
	case 't':
		if parts, err = u.popMark(); err == nil {
			u.push(&thing{kind: isTuple, parts: parts})
		}
	case 'R', 0x81:
		if parts, err = u.popAll(2); err == nil {
			u.push(&thing{kind: isCall, callee: parts[0], parts: parts[1].parts})
		}
	case 0x92: // a call with arguments by name
		if parts, err = u.popAll(3); err == nil {
			u.push(&thing{kind: isCall, callee: parts[0], parts: parts[1].parts})
		}
	case 'b', 'a': // a state, an element
		_, err = u.pop()
	case 's':
		_, err = u.popAll(2)
	case 'e', 'u', 0x90:
		_, err = u.popMark()
	case 0x91:
		_, err = u.popMark()
		u.push(other)
	default:
		return fmt.Errorf("%w: opcode %#x", errPickle, op)
	}
	return err
}
