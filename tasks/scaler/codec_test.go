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
)

func b(text string) []byte { return []byte(text) }

// everything has a message of each type, in each of its forms.
var everything = []anyMessage{
	&task{ID: b("0123456789abcdef"), Source: b("client"), Flags: taskFlags{Profiling: true, Priority: -2}, Function: b("f"),
		Args: []argument{{argObject, b("a")}, {argTask, b("t")}}},
	&task{ID: b("t"), Source: b("c"), Flags: taskFlags{Absent: true, Profiling: true}, Function: b("f")},
	&taskResult{ID: b("t"), Status: success, Profile: profile{Duration: 1.5, Memory: 4096}, Results: [][]byte{b("r")}},
	&taskResult{ID: b("t"), Status: canceled, Profile: profile{Absent: true}},
	&objectInstruction{createObjects, b("client"), objects{[][]byte{b("i"), b("j")}, [][]byte{b("n"), b("m")}, [][]byte{b("x"), {}}}},
	&objectInstruction{deleteObjects, b("worker"), objects{IDs: [][]byte{b("i"), b("j"), b("k")}}},
	&objectRequest{IDs: [][]byte{b("i"), b("j")}},
	&objectResponse{contentFound, objects{[][]byte{b("i"), b("j")}, [][]byte{b("n")}, [][]byte{b("x")}}},
	&objectResponse{noObject, objects{IDs: [][]byte{b("i")}}},
	&heartbeat{CPU: 0.25, RSS: 1 << 33, Free: 2, Queued: 3, LatencyUS: 4, Locked: true,
		Processors: []processor{{Initialized: true, HasTask: true, CPU: 1.5, RSS: 7}}},
	&heartbeatEcho{},
	&disconnect{shutdown},
	&disconnect{leave},
	&disconnectRequest{b("worker")},
	&disconnectResponse{b("worker")},
	&taskCancel{b("t"), true, false},
	&taskCancel{b("t"), false, true},
	&heartbeat{Processors: []processor{{PID: 1, Suspended: true}, {PID: 2}}},
	&heartbeat{},
	&taskResult{ID: b("t"), Status: canceled, Profile: profile{Absent: true}, Results: [][]byte{b("a"), {}, b("c")}},
}

func TestRoundTrip(t *testing.T) {
	for _, m := range everything {
		if got, err := decodeAny(encode(m)); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%+v became %+v, %v", m, got, err)
		}
	}
}

// TestLayouts: frames of numbers have the sizes and offsets of Python's struct.
func TestLayouts(t *testing.T) {
	heartbeat := &heartbeat{CPU: 0.258, RSS: 0x1112131415161718, Free: 0x2122232425262728, Queued: 0x3132, LatencyUS: 0x41424344, Locked: true,
		Processors: []processor{{PID: 0x51525354, Initialized: true, Suspended: true, CPU: 0.515, RSS: 0x6162636465666768}}}
	for _, c := range []struct {
		m     outgoing
		frame int
		want  string // in hexadecimal, spaces between fields and padding
	}{
		{heartbeat, 1, "0201 000000000000 1817161514131211 2827262524232221 3231 0000 44434241 01"},
		{heartbeat, 2, "54535251 01 00 01 00 0302 000000000000 6867666564636261"},
		{&objectResponse{contentFound, objects{[][]byte{b("i"), b("j")}, [][]byte{b("n")}, nil}}, 2, "02000000 01000000 00000000"},
		{&taskCancel{b("t"), true, false}, 2, "01 00"},
		{&task{Flags: taskFlags{Profiling: true, Priority: -2}}, 3, "01 fffffffe"},
		{&taskResult{Status: success, Profile: profile{Duration: 1.5, Memory: 0x4142}}, 3, "3fc00000 0000000000004142"},
	} {
		frame := encode(c.m)[c.frame]
		if want := strings.ReplaceAll(c.want, " ", ""); hex.EncodeToString(frame) != want {
			t.Errorf("frame %d of %T:\n%x, want\n%s", c.frame, c.m, frame, want)
		}
	}
	for frame, want := range map[string]int{"main": 33, "processor": 24, "counts": 12} {
		got := map[string]int{
			"main": len(encode(heartbeat)[1]), "processor": len(encode(heartbeat)[2]),
			"counts": len(encode(&objectInstruction{Kind: createObjects})[3]),
		}[frame]
		if got != want {
			t.Errorf("%s has %d bytes, not %d", frame, got, want)
		}
	}
}

// TestClamped: a value too large for its field becomes the field's largest value.
func TestClamped(t *testing.T) {
	got, err := decodeAny(encode(&heartbeat{CPU: 128, Queued: 1 << 20, Processors: []processor{{CPU: -1}}}))
	if err != nil {
		t.Fatal(err)
	}
	m := got.(*heartbeat)
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
		if m, err := decodeAny(frames); !errors.Is(err, errFormat) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
	for _, kind := range []string{"BQ", "WDN", "ST", "XX", ""} {
		var unknown *unknownTypeError
		if _, err := decodeAny([][]byte{b(kind), {}}); !errors.As(err, &unknown) || unknown.Type != kind {
			t.Errorf("type %q: %v", kind, err)
		}
	}
}

func TestObjectIDs(t *testing.T) {
	// Python's hashlib gives these hashes for client-1 and serializer.
	id := objectID(b("client-1"), b("serializer"))
	if got := hex.EncodeToString(id); got != "28224c5e84194032"+"84f6fb7cd5cd53b5679489a29396448f" {
		t.Errorf("the id is %s", got)
	}
	if !bytes.Equal(id[:8], objectID(b("client-1"), b("other"))[:8]) || bytes.Equal(id[:8], objectID(b("client-2"), b("serializer"))[:8]) {
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
			m, err := decodeAny(frames)
			if err != nil {
				t.Errorf("%s: %s%v", path, line, err)
				continue
			}
			seen[m.kind()] = true
			if again := encode(m); !equal(again, frames) {
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
		f.Add(joinFrames(encode(m)))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := decodeAny(splitFrames(text))
		if err != nil {
			return
		}
		again, err := decodeAny(encode(m))
		if err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		if r, ok := m.(*taskResult); ok && r.Profile.Duration != r.Profile.Duration {
			return // not a number
		}
		if !reflect.DeepEqual(again, m) {
			t.Fatalf("%+v became %+v", m, again)
		}
	})
}
