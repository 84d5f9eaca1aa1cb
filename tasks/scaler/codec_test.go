package scaler

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/scalertest"
)

func b(text string) []byte { return []byte(text) }

// everything has a message of each type, in each of its forms.
var everything = []Message{
	&Task{ID: b("0123456789abcdef"), Source: b("client"), Flags: TaskFlags{Profiling: true, Priority: -2}, Function: b("f"),
		Args: []Arg{{ArgObject, b("a")}, {ArgTask, b("t")}}},
	&Task{ID: b("t"), Source: b("c"), Flags: TaskFlags{Absent: true, Profiling: true}, Function: b("f")},
	&TaskResult{ID: b("t"), Status: Success, Profile: Profile{Duration: 1.5, Memory: 4096}, Results: [][]byte{b("r")}},
	&TaskResult{ID: b("t"), Status: Canceled, Profile: Profile{Absent: true}},
	&ObjectInstruction{Create, b("client"), Objects{[][]byte{b("i"), b("j")}, [][]byte{b("n"), b("m")}, [][]byte{b("x"), {}}}},
	&ObjectInstruction{Delete, b("worker"), Objects{IDs: [][]byte{b("i"), b("j"), b("k")}}},
	&ObjectRequest{IDs: [][]byte{b("i"), b("j")}},
	&ObjectResponse{Content, Objects{[][]byte{b("i"), b("j")}, [][]byte{b("n")}, [][]byte{b("x")}}},
	&ObjectResponse{NoObject, Objects{IDs: [][]byte{b("i")}}},
	&Heartbeat{CPU: 0.25, RSS: 1 << 33, Free: 2, Queued: 3, LatencyUS: 4, Locked: true,
		Processors: []Processor{{Initialized: true, HasTask: true, CPU: 1.5, RSS: 7}}},
	&HeartbeatEcho{},
	&ClientHeartbeat{CPU: 0.125, RSS: 1 << 40, LatencyUS: 9},
	&ClientHeartbeatEcho{},
	&Disconnect{Shutdown},
	&Disconnect{Leave},
	&DisconnectRequest{b("worker")},
	&DisconnectResponse{b("worker")},
	&TaskCancel{b("t"), true, false},
	&TaskCancel{b("t"), false, true},
	&Heartbeat{Processors: []Processor{{PID: 1, Suspended: true}, {PID: 2}}},
	&Heartbeat{},
	&TaskResult{ID: b("t"), Status: Canceled, Profile: Profile{Absent: true}, Results: [][]byte{b("a"), {}, b("c")}},
}

func TestRoundTrip(t *testing.T) {
	for _, m := range everything {
		if got, err := Decode(Encode(m)); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%+v became %+v, %v", m, got, err)
		}
	}
}

// TestLayouts: frames of numbers have the sizes and offsets of Python's struct.
func TestLayouts(t *testing.T) {
	heartbeat := &Heartbeat{CPU: 0.258, RSS: 0x1112131415161718, Free: 0x2122232425262728, Queued: 0x3132, LatencyUS: 0x41424344, Locked: true,
		Processors: []Processor{{PID: 0x51525354, Initialized: true, Suspended: true, CPU: 0.515, RSS: 0x6162636465666768}}}
	for _, c := range []struct {
		m     Message
		frame int
		want  string // in hexadecimal, spaces between fields and padding
	}{
		{heartbeat, 1, "0201 000000000000 1817161514131211 2827262524232221 3231 0000 44434241 01"},
		{heartbeat, 2, "54535251 01 00 01 00 0302 000000000000 6867666564636261"},
		{&ClientHeartbeat{CPU: 0.258, RSS: 0x1112131415161718, LatencyUS: 0x21222324}, 1, "0201 000000000000 1817161514131211 24232221"},
		{&ObjectResponse{Content, Objects{[][]byte{b("i"), b("j")}, [][]byte{b("n")}, nil}}, 2, "02000000 01000000 00000000"},
		{&TaskCancel{b("t"), true, false}, 2, "01 00"},
		{&Task{Flags: TaskFlags{Profiling: true, Priority: -2}}, 3, "01 fffffffe"},
		{&TaskResult{Status: Success, Profile: Profile{Duration: 1.5, Memory: 0x4142}}, 3, "3fc00000 0000000000004142"},
	} {
		frame := Encode(c.m)[c.frame]
		if want := strings.ReplaceAll(c.want, " ", ""); hex.EncodeToString(frame) != want {
			t.Errorf("frame %d of %T:\n%x, want\n%s", c.frame, c.m, frame, want)
		}
	}
	for frame, want := range map[string]int{"main": 33, "processor": 24, "client": 20, "counts": 12} {
		got := map[string]int{
			"main": len(Encode(heartbeat)[1]), "processor": len(Encode(heartbeat)[2]),
			"client": len(Encode(&ClientHeartbeat{})[1]),
			"counts": len(Encode(&ObjectInstruction{Kind: Create})[3]),
		}[frame]
		if got != want {
			t.Errorf("%s has %d bytes, not %d", frame, got, want)
		}
	}
}

// TestClamped: a value too large for its field becomes the field's largest value.
func TestClamped(t *testing.T) {
	got, err := Decode(Encode(&Heartbeat{CPU: 128, Queued: 1 << 20, Processors: []Processor{{CPU: -1}}}))
	if err != nil {
		t.Fatal(err)
	}
	m := got.(*Heartbeat)
	if math.Abs(m.CPU-65.535) > 1e-9 || m.Queued != math.MaxUint16 || m.Processors[0].CPU != 0 {
		t.Errorf("%+v", m)
	}
}

func TestDecodeRefuses(t *testing.T) {
	counts := func(n ...uint32) []byte {
		var b []byte
		for _, n := range n {
			b = order.AppendUint32(b, n)
		}
		return b
	}
	for name, frames := range map[string][][]byte{
		"nothing":             nil,
		"a type alone":        {b("HE")},
		"counts over frames":  {b("OA"), b("C"), counts(1<<32-1, 1<<32-1, 1<<32-1), b("i")},
		"counts that are sum": {b("OA"), b("C"), counts(1, 1<<31, 1<<31), b("i"), b("n"), b("x")},
		"counts under frames": {b("OA"), b("C"), counts(1, 0, 0), b("i"), b("j")},
		"counts of 11 bytes":  {b("OA"), b("C"), make([]byte, 11)},
		"half an argument":    {b("TK"), b("t"), b("c"), nil, b("f"), b("R")},
		"argument's kind":     {b("TK"), b("t"), b("c"), nil, b("f"), b("X"), b("a")},
		"flags of 4 bytes":    {b("TK"), b("t"), b("c"), b("1234"), b("f")},
		"no function":         {b("TK"), b("t"), b("c"), nil},
		"cancel, no flags":    {b("TC"), b("t")},
		"status":              {b("TR"), b("t"), b("Z"), nil},
		"status of 2 bytes":   {b("TR"), b("t"), b("SS"), nil},
		"profile of 8 bytes":  {b("TR"), b("t"), b("S"), make([]byte, 8)},
		"heartbeat of 51":     {b("HB"), make([]byte, 51)},
		"processor of 23":     {b("HB"), make([]byte, 33), make([]byte, 23)},
		"echo with content":   {b("HE"), b("x")},
		"disconnect's kind":   {b("CS"), b("X")},
		"request's kind":      {b("OR"), b("B"), b("i")},
		"two workers":         {b("DR"), b("w"), b("v")},
	} {
		if m, err := Decode(frames); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
	for _, kind := range []string{"BQ", "WDN", "ST", "XX", ""} {
		var unknown *UnknownTypeError
		if _, err := Decode([][]byte{b(kind), {}}); !errors.As(err, &unknown) || unknown.Type != kind {
			t.Errorf("type %q: %v", kind, err)
		}
	}
}

func TestObjectIDs(t *testing.T) {
	// Python's hashlib gives these hashes for client-1 and serializer.
	id := SerializerID(b("client-1"))
	if got := hex.EncodeToString(id); got != "28224c5e84194032"+"84f6fb7cd5cd53b5679489a29396448f" {
		t.Errorf("the serializer's id is %s", got)
	}
	if !IsSerializerID(id) || IsSerializerID(ObjectID(b("client-1"), b("x"))) || IsSerializerID(id[8:]) {
		t.Error("a serializer's id is not told from others")
	}
	if !bytes.Equal(id[:8], ObjectID(b("client-1"), b("other"))[:8]) || bytes.Equal(id[:8], SerializerID(b("client-2"))[:8]) {
		t.Error("the first 8 bytes are not the client's")
	}
}

// TestGolden: the messages that Scaler 1.7.14 and this package have exchanged decode, and encode to
// the same bytes. TestReal… with -update records them again.
func TestGolden(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.frames")
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	seen := map[string]bool{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			words := strings.Fields(line)
			frames := [][]byte{b(words[1])}
			for _, word := range words[2:] {
				frame, err := hex.DecodeString(strings.TrimSuffix(word, "."))
				if err != nil {
					t.Fatal(err)
				}
				frames = append(frames, frame)
			}
			m, err := Decode(frames)
			if err != nil {
				t.Errorf("%s: %s%v", path, line, err)
				continue
			}
			seen[m.kind()] = true
			if again := Encode(m); !equal(again, frames) {
				t.Errorf("%s: %s became %x", path, line, again)
			}
		}
	}
	for _, kind := range []string{"TK", "TC", "TR", "OI", "OR", "OA", "HB", "HE", "CS", "DR"} {
		if !seen[kind] {
			t.Errorf("no message of type %s is recorded", kind)
		}
	}
}

// FuzzDecode: decoded messages encode to the same frames, or to frames with the same meaning.
func FuzzDecode(f *testing.F) {
	for _, m := range everything {
		f.Add(scalertest.Join(Encode(m)))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := Decode(scalertest.Split(text))
		if err != nil {
			return
		}
		again, err := Decode(Encode(m))
		if err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		if r, ok := m.(*TaskResult); ok && r.Profile.Duration != r.Profile.Duration {
			return // not a number
		}
		if !reflect.DeepEqual(again, m) {
			t.Fatalf("%+v became %+v", m, again)
		}
	})
}
