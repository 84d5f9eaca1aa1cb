package scaler

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// ErrFormat is returned by Decode for frames that are not a message.
var ErrFormat = errors.New("scaler: the frames are not a message")

// UnknownTypeError is returned by Decode for a message of an unknown type. Scaler's own programs
// drop such messages.
type UnknownTypeError struct{ Type string }

func (e *UnknownTypeError) Error() string {
	return fmt.Sprintf("scaler: a message of the unknown type %.16q", e.Type)
}

// Encode returns a message as frames. They share memory with the message.
func Encode(m Message) [][]byte {
	return append([][]byte{[]byte(m.kind())}, m.encode()...)
}

// Decode decodes the message in the frames. The message shares memory with the frames. Decode
// allocates memory only in proportion to the frames, because it checks counts within a message
// against the number of frames.
func Decode(all [][]byte) (Message, error) {
	if len(all) < 2 {
		return nil, fmt.Errorf("%w: %d frames", ErrFormat, len(all))
	}
	m := blank(string(all[0]))
	if m == nil {
		return nil, &UnknownTypeError{string(all[0])}
	}
	f := &frames{rest: all[1:]}
	err := m.decode(f)
	if err == nil {
		err = f.end()
	}
	if err != nil {
		return nil, fmt.Errorf("%w of type %s: %w", ErrFormat, all[0], err)
	}
	return m, nil
}

// blank returns an empty message of a type, or nil.
func blank(kind string) Message {
	switch kind {
	case "TK":
		return new(Task)
	case "TC":
		return new(TaskCancel)
	case "TR":
		return new(TaskResult)
	case "OI":
		return new(ObjectInstruction)
	case "OR":
		return new(ObjectRequest)
	case "OA":
		return new(ObjectResponse)
	case "HB":
		return new(Heartbeat)
	case "HE":
		return new(HeartbeatEcho)
	case "CB":
		return new(ClientHeartbeat)
	case "CE":
		return new(ClientHeartbeatEcho)
	case "CS":
		return new(Disconnect)
	case "DR":
		return new(DisconnectRequest)
	case "DP":
		return new(DisconnectResponse)
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

func (f *frames) all(what string) [][]byte { return f.several(what, uint64(len(f.rest))) }

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

func loadOf(b []byte) float64 { return float64(order.Uint16(b)) / 1000 }

func count16(n int) uint16 { return uint16(min(max(n, 0), math.MaxUint16)) }

func (m *Task) encode() [][]byte {
	out := [][]byte{m.ID, m.Source, m.Flags.encode(), m.Function}
	for _, a := range m.Args {
		out = append(out, []byte{a.Kind}, a.ID)
	}
	return out
}

func (m *Task) decode(f *frames) error {
	m.ID, m.Source = f.next("id"), f.next("source")
	m.Flags.decode(f.next("flags"), f)
	m.Function = f.next("function")
	if len(f.rest)%2 != 0 {
		f.fail("%d frames of arguments", len(f.rest))
		return f.err
	}
	if n := len(f.rest) / 2; n > 0 && f.err == nil {
		m.Args = make([]Arg, n)
	}
	for i := range m.Args {
		m.Args[i] = Arg{Kind: f.one("argument's kind", "RT"), ID: f.next("argument")}
	}
	return f.err
}

func (t TaskFlags) encode() []byte {
	if t.Absent {
		return nil
	}
	return binary.BigEndian.AppendUint32([]byte{truth(t.Profiling)}, uint32(t.Priority))
}

func (t *TaskFlags) decode(b []byte, f *frames) {
	switch len(b) {
	case 0:
		*t = TaskFlags{Absent: true, Profiling: true}
	case 5:
		*t = TaskFlags{Profiling: b[0] != 0, Priority: int32(binary.BigEndian.Uint32(b[1:]))}
	default:
		f.fail("flags of %d bytes", len(b))
	}
}

func (m *TaskCancel) encode() [][]byte {
	return [][]byte{m.ID, {truth(m.Force), truth(m.Retrieve)}}
}

func (m *TaskCancel) decode(f *frames) error {
	m.ID = f.next("id")
	b := f.sized("flags", 2)
	m.Force, m.Retrieve = b[0] != 0, b[1] != 0
	return f.err
}

func (m *TaskResult) encode() [][]byte {
	return append([][]byte{m.ID, {byte(m.Status)}, m.Profile.encode()}, m.Results...)
}

func (m *TaskResult) decode(f *frames) error {
	m.ID, m.Status = f.next("id"), Status(f.one("status", "SFCNKW"))
	m.Profile.decode(f.next("profile"), f)
	m.Results = f.all("results")
	return f.err
}

func (p Profile) encode() []byte {
	if p.Absent {
		return nil
	}
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(nil, math.Float32bits(p.Duration)), p.Memory)
}

func (p *Profile) decode(b []byte, f *frames) {
	switch len(b) {
	case 0:
		*p = Profile{Absent: true}
	case 12:
		*p = Profile{Duration: math.Float32frombits(binary.BigEndian.Uint32(b)), Memory: binary.BigEndian.Uint64(b[4:])}
	default:
		f.fail("a profile of %d bytes", len(b))
	}
}

// encode returns a frame with three counts, followed by three columns.
func (o Objects) encode() [][]byte {
	var counts []byte
	var out [][]byte
	for _, column := range [][][]byte{o.IDs, o.Names, o.Contents} {
		counts = order.AppendUint32(counts, uint32(len(column)))
		out = append(out, column...)
	}
	return append([][]byte{counts}, out...)
}

func (o *Objects) decode(f *frames) {
	counts := f.sized("counts", 12)
	for i, column := range []*[][]byte{&o.IDs, &o.Names, &o.Contents} {
		*column = f.several("objects", uint64(order.Uint32(counts[4*i:])))
	}
}

func (m *ObjectInstruction) encode() [][]byte {
	return append([][]byte{{m.Kind}, m.User}, m.Objects.encode()...)
}

func (m *ObjectInstruction) decode(f *frames) error {
	m.Kind = f.one("kind", "CD")
	m.User = f.next("user")
	m.Objects.decode(f)
	return f.err
}

func (m *ObjectRequest) encode() [][]byte { return append([][]byte{{'A'}}, m.IDs...) }

func (m *ObjectRequest) decode(f *frames) error {
	f.one("kind", "A")
	m.IDs = f.all("ids")
	return f.err
}

func (m *ObjectResponse) encode() [][]byte {
	return append([][]byte{{m.Kind}}, m.Objects.encode()...)
}

func (m *ObjectResponse) decode(f *frames) error {
	m.Kind = f.one("kind", "CN")
	m.Objects.decode(f)
	return f.err
}

func (m *Heartbeat) encode() [][]byte {
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

func (m *Heartbeat) decode(f *frames) error {
	b := f.sized("heartbeat", 33)
	*m = Heartbeat{
		CPU: loadOf(b), RSS: order.Uint64(b[8:]), Free: order.Uint64(b[16:]), Queued: int(order.Uint16(b[24:])),
		LatencyUS: order.Uint32(b[28:]), Locked: b[32] != 0,
	}
	for len(f.rest) > 0 && f.err == nil {
		m.Processors = append(m.Processors, processorOf(f.sized("processor", 24)))
	}
	return f.err
}

func (p Processor) encode() []byte {
	b := make([]byte, 24)
	order.PutUint32(b, p.PID)
	b[4], b[5], b[6] = truth(p.Initialized), truth(p.HasTask), truth(p.Suspended)
	order.PutUint16(b[8:], load(p.CPU))
	order.PutUint64(b[16:], p.RSS)
	return b
}

func processorOf(b []byte) Processor {
	return Processor{
		PID: order.Uint32(b), Initialized: b[4] != 0, HasTask: b[5] != 0, Suspended: b[6] != 0,
		CPU: loadOf(b[8:]), RSS: order.Uint64(b[16:]),
	}
}

func (m *ClientHeartbeat) encode() [][]byte {
	b := make([]byte, 20)
	order.PutUint16(b, load(m.CPU))
	order.PutUint64(b[8:], m.RSS)
	order.PutUint32(b[16:], m.LatencyUS)
	return [][]byte{b}
}

func (m *ClientHeartbeat) decode(f *frames) error {
	b := f.sized("heartbeat", 20)
	*m = ClientHeartbeat{CPU: loadOf(b), RSS: order.Uint64(b[8:]), LatencyUS: order.Uint32(b[16:])}
	return f.err
}

// nothing is the content of messages without content: one empty frame, because Scaler's programs
// drop messages of fewer than two frames.
var nothing = [][]byte{{}}

func (*HeartbeatEcho) encode() [][]byte       { return nothing }
func (*ClientHeartbeatEcho) encode() [][]byte { return nothing }

func (*HeartbeatEcho) decode(f *frames) error {
	f.empty("echo")
	return f.err
}

func (*ClientHeartbeatEcho) decode(f *frames) error {
	f.empty("echo")
	return f.err
}

func (m *Disconnect) encode() [][]byte { return [][]byte{{m.Kind}} }

func (m *Disconnect) decode(f *frames) error {
	m.Kind = f.one("kind", "SD")
	return f.err
}

func (m *DisconnectRequest) encode() [][]byte  { return [][]byte{m.Worker} }
func (m *DisconnectResponse) encode() [][]byte { return [][]byte{m.Worker} }

func (m *DisconnectRequest) decode(f *frames) error {
	m.Worker = f.next("worker")
	return f.err
}

func (m *DisconnectResponse) decode(f *frames) error {
	m.Worker = f.next("worker")
	return f.err
}
