package scaler

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// errFormat is returned by decode for frames that are not a message.
var errFormat = errors.New("scaler: the frames are not a message")

// unknownTypeError is returned by decode for a message of a type that workers do not know. Scaler's
// own programs drop such messages.
type unknownTypeError struct{ Type string }

func (e *unknownTypeError) Error() string {
	return fmt.Sprintf("scaler: a message of the unknown type %.16q", e.Type)
}

// encode returns a message as frames. They share memory with the message.
func encode(m outgoing) [][]byte {
	return append([][]byte{[]byte(m.kind())}, m.encode()...)
}

// decode decodes the message in the frames. The message shares memory with the frames. decode
// allocates memory only in proportion to the frames, because it checks counts within a message
// against the number of frames.
func decode(all [][]byte) (incoming, error) { return decodeAs(all, blank) }

// decodeAs is like decode. blank returns an empty message of a type, or nil.
func decodeAs(all [][]byte, blank func(kind string) incoming) (incoming, error) {
	if len(all) < 2 {
		return nil, fmt.Errorf("%w: it has %d frames", errFormat, len(all))
	}
	m := blank(string(all[0]))
	if m == nil {
		return nil, &unknownTypeError{string(all[0])}
	}
	f := &frames{rest: all[1:]}
	err := m.decode(f)
	if err == nil {
		err = f.end()
	}
	if err != nil {
		return nil, fmt.Errorf("%w of type %s: %w", errFormat, all[0], err)
	}
	return m, nil
}

// blank returns an empty message of a type that workers receive, or nil.
func blank(kind string) incoming {
	switch kind {
	case "TK":
		return new(task)
	case "TC":
		return new(taskCancel)
	case "OI":
		return new(objectInstruction)
	case "OA":
		return new(objectResponse)
	case "HE":
		return new(heartbeatEcho)
	case "CS":
		return new(disconnect)
	case "DP":
		return new(disconnectResponse)
	}
	return nil
}

// frames are the frames that have not been decoded yet. The first error is kept.
type frames struct {
	rest [][]byte
	err  error
}

func (f *frames) fail(format string, args ...any) {
	if f.err == nil {
		f.err = fmt.Errorf(format, args...)
	}
}

// end returns the first error. Frames that are left are an error too.
func (f *frames) end() error {
	if len(f.rest) > 0 {
		f.fail("%d frames too many", len(f.rest))
	}
	return f.err
}

// next returns the next frame, or nil after an error.
func (f *frames) next(what string) []byte {
	if f.err != nil {
		return nil
	}
	if len(f.rest) == 0 {
		f.fail("no %s", what)
		return nil
	}
	frame := f.rest[0]
	f.rest = f.rest[1:]
	return frame
}

// sized returns the next frame, which must have n bytes; after an error it returns zeros.
func (f *frames) sized(what string, n int) []byte {
	frame := f.next(what)
	if f.err == nil && len(frame) != n {
		f.fail("%s of %d bytes, not %d", what, len(frame), n)
	}
	if f.err != nil {
		return make([]byte, n)
	}
	return frame
}

// one returns the next frame, which must be one of the bytes in of.
func (f *frames) one(what, of string) byte {
	b := f.sized(what, 1)[0]
	if f.err != nil {
		return 0
	}
	for i := range len(of) {
		if b == of[i] {
			return b
		}
	}
	f.fail("%s %q", what, b)
	return 0
}

func (f *frames) empty(what string) {
	f.sized(what, 0)
}

// several returns the next n frames, or nil after an error.
func (f *frames) several(what string, n uint64) [][]byte {
	if f.err != nil {
		return nil
	}
	if n > uint64(len(f.rest)) {
		f.fail("%d %s in %d frames", n, what, len(f.rest))
		return nil
	}
	if n == 0 {
		return nil
	}
	some := f.rest[:n:n]
	f.rest = f.rest[n:]
	return some
}

// Numbers are encoded as Python's module struct packs them: in the byte order of the machine, and
// aligned. All machines of a cluster must have the same order, which is little-endian on those on
// which Scaler and this program run.
var order = binary.LittleEndian

func truth(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// load returns a number of busy processors in thousandths, at most 65.535 processors.
func load(cpu float64) uint16 {
	return uint16(min(max(cpu*1000+0.5, 0), math.MaxUint16))
}

func count16(n int) uint16 { return uint16(min(max(n, 0), math.MaxUint16)) }

func (m *task) encode() [][]byte {
	out := [][]byte{m.ID, m.Source, m.Flags.encode(), m.Function}
	for _, a := range m.Args {
		out = append(out, []byte{a.Kind}, a.ID)
	}
	return out
}

func (m *task) decode(f *frames) error {
	m.ID, m.Source = f.next("id"), f.next("source")
	m.Flags.decode(f.next("flags"), f)
	m.Function = f.next("function")
	if len(f.rest)%2 != 0 {
		f.fail("%d frames of arguments", len(f.rest))
		return f.err
	}
	if n := len(f.rest) / 2; n > 0 && f.err == nil {
		m.Args = make([]argument, n)
	}
	for i := range m.Args {
		m.Args[i] = argument{Kind: f.one("argument's kind", "RT"), ID: f.next("argument")}
	}
	return f.err
}

func (t taskFlags) encode() []byte {
	if t.Absent {
		return nil
	}
	return binary.BigEndian.AppendUint32([]byte{truth(t.Profiling)}, uint32(t.Priority))
}

func (t *taskFlags) decode(b []byte, f *frames) {
	switch len(b) {
	case 0:
		*t = taskFlags{Absent: true, Profiling: true}
	case 5:
		*t = taskFlags{Profiling: b[0] != 0, Priority: int32(binary.BigEndian.Uint32(b[1:]))}
	default:
		f.fail("flags of %d bytes", len(b))
	}
}

func (m *taskCancel) decode(f *frames) error {
	m.ID = f.next("id")
	b := f.sized("flags", 2)
	m.Force, m.Retrieve = b[0] != 0, b[1] != 0
	return f.err
}

func (m *taskResult) encode() [][]byte {
	return append([][]byte{m.ID, {byte(m.Status)}, m.Profile.encode()}, m.Results...)
}

func (p profile) encode() []byte {
	if p.Absent {
		return nil
	}
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(nil, math.Float32bits(p.Duration)), p.Memory)
}

// encode returns a frame with three counts, followed by three columns.
func (o objects) encode() [][]byte {
	var counts []byte
	var out [][]byte
	for _, column := range [][][]byte{o.IDs, o.Names, o.Contents} {
		counts = order.AppendUint32(counts, uint32(len(column)))
		out = append(out, column...)
	}
	return append([][]byte{counts}, out...)
}

func (o *objects) decode(f *frames) {
	counts := f.sized("counts", 12)
	for i, column := range []*[][]byte{&o.IDs, &o.Names, &o.Contents} {
		*column = f.several("objects", uint64(order.Uint32(counts[4*i:])))
	}
}

func (m *objectInstruction) encode() [][]byte {
	return append([][]byte{{m.Kind}, m.User}, m.objects.encode()...)
}

func (m *objectInstruction) decode(f *frames) error {
	m.Kind = f.one("kind", "CD")
	m.User = f.next("user")
	m.objects.decode(f)
	return f.err
}

func (m *objectRequest) encode() [][]byte { return append([][]byte{{'A'}}, m.IDs...) }

func (m *objectResponse) decode(f *frames) error {
	m.Kind = f.one("kind", "CN")
	m.objects.decode(f)
	return f.err
}

func (m *heartbeat) encode() [][]byte {
	b := make([]byte, 33)
	order.PutUint16(b, load(m.CPU))
	order.PutUint64(b[8:], m.RSS)
	order.PutUint64(b[16:], m.Free)
	order.PutUint16(b[24:], count16(m.Queued))
	order.PutUint32(b[28:], m.LatencyUS)
	b[32] = truth(m.Locked)
	out := [][]byte{b}
	for _, p := range m.Processors {
		out = append(out, p.encode())
	}
	return out
}

func (p processor) encode() []byte {
	b := make([]byte, 24)
	order.PutUint32(b, p.PID)
	b[4], b[5], b[6] = truth(p.Initialized), truth(p.HasTask), truth(p.Suspended)
	order.PutUint16(b[8:], load(p.CPU))
	order.PutUint64(b[16:], p.RSS)
	return b
}

func (*heartbeatEcho) decode(f *frames) error {
	f.empty("echo")
	return f.err
}

func (m *disconnect) decode(f *frames) error {
	m.Kind = f.one("kind", "SD")
	return f.err
}

func (m *disconnectRequest) encode() [][]byte { return [][]byte{m.Worker} }

func (m *disconnectResponse) decode(f *frames) error {
	m.Worker = f.next("worker")
	return f.err
}
